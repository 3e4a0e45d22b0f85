"""A program that `ckptctl audit` has started attaches to the audit's daemon, whatever it says itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptd.client.options import DaemonOptions, OptionGroups, RecoveryOptions, RunOptions
from ckptd.client.recovery.audit_mode import AuditAsked, audit_of_environment, under_audit

AUDIT = AuditAsked(Path("/tmp/a"), "j", "r")


def test_only_the_environment_makes_an_audit() -> None:
    assert audit_of_environment({}) is None
    assert audit_of_environment({"CKPTD_AUDIT": ""}) is None
    named = {"CKPTD_AUDIT": "/tmp/a", "CKPTD_AUDITED_RUN": "u7.job~run-1"}
    assert audit_of_environment(named) == AuditAsked(Path("/tmp/a"), "u7.job", "run-1")


def test_daemon_recovery_and_names_are_the_audits() -> None:
    given: OptionGroups = {
        "run": RunOptions(topology="tp2", rank=1, world_size=2),
        "daemon": DaemonOptions(endpoint="ipc:///run/other.sock", required=False),
        "recovery": RecoveryOptions(resume_at=3, freeze="drop", start_from="model", park=True),
    }
    found = under_audit(given, AUDIT)
    daemon, recovery = found["daemon"], found["recovery"]
    assert isinstance(daemon, DaemonOptions)
    assert (daemon.endpoint, daemon.required) == ("ipc:///tmp/a/run/ckptd.sock", True)
    assert (recovery.resume_at, recovery.start_from, recovery.park) == (None, None, False)
    assert (recovery.rehearse, recovery.on_mismatch) == (False, "warn")
    assert recovery.freeze == "drop", "how the program replays is its own"
    assert found["run"] == RunOptions(name="r", job="j", topology="tp2", rank=1, world_size=2)


def test_a_program_without_a_daemon_has_no_step_to_audit() -> None:
    with pytest.raises(ValueError, match="daemon=None turns ckptd off"):
        under_audit({"daemon": None}, AUDIT)
