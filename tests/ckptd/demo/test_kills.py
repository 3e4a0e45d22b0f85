"""`make demo`, shortened: with a host and without, exact, and with the phases of each recovery."""

from __future__ import annotations

import os
import re
import runpy
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from ckptd.core.recovery.recovery_phases import RecoveryPhase
from ckptd.demo import kills
from ckptd.demo.kills import choose_batch_size
from ckptd.demo.lab import SHARED_CORES
from ckptd.demo.model import PRECISIONS, native_precision
from tests.examples.playing import play
from tests.long import long

pytest.importorskip("matplotlib", reason="the demo draws a picture (extra: demo)")

SHORT = ["--steps", "36", "--kills", "1", "--window", "2", "--batch-size", "1", "--seed", "3"]


def _play(folder: Path, *options: str) -> str:
    output = play("ckptd.demo", *SHORT, "--out", str(folder), *options)
    assert (folder / "demo.png").exists()
    return output


def _seeds(output: str) -> list[int]:
    """Of the lives of both runs, in order."""
    return [int(seed) for seed in re.findall(r"initialised from seed (\d+)", output)]


@long
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("plain", [False, True])
def test_the_demo_is_exact_and_names_the_phases(tmp_path: Path, plain: bool) -> None:
    """That of the wheel (tests/test_packaging.py) says the same in every run."""
    precision = "fp32" if plain else "bf16"
    output = _play(tmp_path, *(["--plain"] if plain else []), "--precision", precision)
    check_demo(output, precision, plain=plain)


def check_demo(output: str, precision: str, *, plain: bool = False) -> None:
    """What the shortened demo printed.

    Args:
        plain: it ran without a host.
    """
    assert "IDENTICAL: all" in output
    assert f"top-2 of 8 experts, {PRECISIONS[precision]}" in output
    assert output.count("--> SIGKILL to the trainer after") == 2
    assert output.count("--> SIGKILL to the daemon after") == 1
    undisturbed, first, *later = _seeds(output)
    assert undisturbed == first
    assert len(later) == 2
    assert len({first, *later}) == 3
    rows = re.findall(r"^(\w+) +[\d -]+$", output.partition("phase, ms")[2], re.MULTILINE)
    assert rows[-2:] == ["rest", "back"]
    assert set(rows[:-2]) <= {*map(str, RecoveryPhase)}
    assert {RecoveryPhase.ATTACH, RecoveryPhase.LOADED, RecoveryPhase.FIRST_NEW_STEP} <= set(rows)
    # A forked trainer has everything imported.
    assert (RecoveryPhase.IMPORTS in rows) == plain


@pytest.mark.parametrize(
    ("cpuinfo", "precision"),
    [
        ("flags\t\t: fpu sse2 avx2 avx512f avx512_bf16\n", "bf16"),
        ("flags\t\t: fpu sse2 avx2 fma f16c\n", "fp32"),
        ("Features\t: fp asimd sve i8mm bf16\n", "bf16"),
        ("Features\t: fp asimd\n", "fp32"),
    ],
)
def test_the_demo_computes_in_what_the_cpu_multiplies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cpuinfo: str, precision: str
) -> None:
    (tmp_path / "cpuinfo").write_text(f"processor\t: 0\n{cpuinfo}bugs\t\t: sysret_ss_attrs\n")
    monkeypatch.setattr("torch.ops.mkldnn._is_mkldnn_bf16_supported", lambda: True)
    assert native_precision(tmp_path / "cpuinfo") == precision
    assert native_precision(tmp_path / "missing") == "fp32"
    monkeypatch.setattr("torch.ops.mkldnn._is_mkldnn_bf16_supported", lambda: False)  # ONEDNN_MAX_CPU_ISA
    assert native_precision(tmp_path / "cpuinfo") == "fp32"


@pytest.mark.parametrize(
    ("native", "said"), [("fp32", "fp32, since this CPU does not multiply bf16"), ("bf16", "fp32")]
)
def test_a_precision_that_was_asked_for_is_not_explained_by_the_cpu(
    monkeypatch: pytest.MonkeyPatch, native: str, said: str
) -> None:
    monkeypatch.setattr(kills, "native_precision", lambda: native)
    assert kills._describe("fp32") == said
    assert kills._describe("bf16") == PRECISIONS["bf16"]


def test_what_the_machine_can_do_is_measured_under_the_settings_of_trainers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a busy machine the threads of the measurement spun where those of trainers do not: the demo took the
    smallest batches, promised 42 minutes, and was done in four.
    """
    for name in SHARED_CORES:
        monkeypatch.delenv(name, raising=False)
    execve = Mock(side_effect=SystemExit)
    monkeypatch.setattr(os, "execve", execve)
    with pytest.raises(SystemExit):
        runpy.run_module("ckptd.demo", run_name="__main__")
    _, command, environment = execve.call_args.args
    assert command == sys.orig_argv
    assert environment.items() >= SHARED_CORES.items()


def test_a_slow_machine_gets_smaller_batches() -> None:
    assert choose_batch_size(0.125) == (12, 0.25)
    assert choose_batch_size(0.3) == (6, 0.3)
    assert choose_batch_size(3.0) == (3, 1.5)
