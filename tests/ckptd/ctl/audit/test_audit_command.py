"""The arguments of `ckptctl audit`, and what it says where there is nothing to audit."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ckptd.ctl.audit import audit_command
from ckptd.ctl.audit.audit_run import Audited
from ckptd.ctl.command import CommandError
from ckptd.ctl.main import main, parse


def audited(end: int, *, passed: bool = True) -> Audited:
    return Audited("job", "run", end - 1, end, passed, True, "verdict", 1, 2, 0.1, 0.2, 3.0, {})


def test_the_program_comes_after_two_dashes(capsys: pytest.CaptureFixture[str]) -> None:
    args = parse(["audit", "--every", "10m", "--job", "moe", "--", "torchrun", "--json", "train.py"])
    assert (args.every, args.job, args.json) == (600.0, "moe", False)
    assert args.program[-3:] == ["torchrun", "--json", "train.py"]
    assert main(["audit"]) == 2
    assert "pass the program that trains" in capsys.readouterr().err
    assert main(["audit", "--times", "3", "--", "train.py"]) == 2
    assert "--times N is for --every" in capsys.readouterr().err


def test_an_auditor_goes_on_after_steps_that_fail_or_cannot_be_audited(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its exit status is that of all."""
    outcomes: list[Any] = [
        audited(5),
        CommandError("there is no step"),
        audited(9, passed=False),
        audited(12),
    ]
    asked: list[int] = []

    def step(args: Any, program: Any, newest: int) -> Audited:
        asked.append(newest)
        found = outcomes.pop(0)
        if isinstance(found, Exception):
            raise found
        assert isinstance(found, Audited)
        return found

    monkeypatch.setattr(audit_command, "_audit_step", step)
    assert main(["--json", "audit", "--every", "0s", "--times", "4", "--", "train.py"]) == 1
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert asked == [-1, 5, 5, 9]
    assert [each.get("end", each.get("error")) for each in told] == [5, "there is no step", 9, 12]
