"""`make demo-ops`: its rules, and, among the long tests, the demo itself."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from examples.moe_text.operations import FAULTS, RULES, rules_in_seconds
from tests.ckptd.scraped import promtool
from tests.examples.playing import play
from tests.long import long


def test_the_rules_of_the_demo_are_those_of_deploy_sixty_times_as_fast() -> None:
    ours, fast = RULES.read_text(), rules_in_seconds(RULES.read_text())
    durations = re.compile(r"(for: |\[)(\d+)([smh])")
    assert durations.sub("", fast) == durations.sub("", ours)
    units = {"s": 1, "m": 60, "h": 3600}
    slow = [int(number) * units[unit] for _, number, unit in durations.findall(ours)]
    quick = [int(number) * units[unit] for _, number, unit in durations.findall(fast)]
    assert len(slow) > 8
    assert [60 * seconds for seconds in quick] == slow


def test_prometheus_accepts_them(tmp_path: Path) -> None:
    file = tmp_path / "rules.yml"
    file.write_text(rules_in_seconds(RULES.read_text()))
    assert promtool("check", "rules", str(file)).returncode == 0


@long
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is not installed")
def test_every_fault_has_its_alert_and_every_alert_ends(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the demo draws a picture (extra: demo)")
    output = play("examples.moe_text.operations", "--out", str(tmp_path))
    for fault in FAULTS:
        assert re.search(rf"{fault.what} +{fault.alert} +[\d.]+ +[\d.]+", output), output
    assert "every alert ended, and training went on" in output
    assert (tmp_path / "alerts.png").exists()
