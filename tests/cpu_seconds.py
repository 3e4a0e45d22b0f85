"""What each test costs in seconds of processor time, its processes included; the dearest are named at the end.

Processes that several tests share are charged for what they use while each of them runs; a daemon that has left its
parent is not seen. Wall-clock time tells more about the machine and what runs beside. No test fails for what it costs:
on a slow machine all cost more. ``CKPTD_CPU_SECONDS=FILE`` writes them all, one line of JSON for each.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import time
from collections import defaultdict
from collections.abc import Generator
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest

__all__ = [
    "pytest_collection_finish",
    "pytest_runtest_logreport",
    "pytest_runtest_makereport",
    "pytest_terminal_summary",
]

_KEY = "cpu_seconds"
_NAMED = 15
_LOOK_EVERY_S = 0.5  # a look at all processes takes some ms, as long as ten unit tests
_spent: dict[str, float] = {}


class _Meter:
    """The processor time of this process and of all that it has started, in seconds.

    A process that ends takes its time to whoever waits for it: the sum over the living and the waited-for only grows.
    """

    def __init__(self) -> None:
        self._own, self._others, self._looked = 0.0, 0.0, -_LOOK_EVERY_S

    def since_the_last(self) -> float:
        """What was used since the last call; that of the processes comes with the next look at them."""
        own = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
        spent, self._own = own - self._own, own
        if time.monotonic() - self._looked >= _LOOK_EVERY_S:
            others = self._of_others()
            spent += max(0.0, others - self._others)
            self._others, self._looked = others, time.monotonic()
        return spent

    @staticmethod
    def _of_others() -> float:
        found = sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):  # ended since it was listed
                found += sum(process.cpu_times()[:4])
        return float(found)


_meter = _Meter()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_finish() -> None:
    _meter.since_the_last()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.when == "teardown":
        report.user_properties.append((_KEY, round(_meter.since_the_last(), 2)))
    return report


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    for key, spent in report.user_properties if report.when == "teardown" else ():
        if key == _KEY and isinstance(spent, float):
            _spent[report.nodeid] = spent


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if sum(_spent.values()) < 1.0:
        return
    files: dict[str, float] = defaultdict(float)
    for test, spent in _spent.items():
        files[test.split("::")[0]] += spent
    terminalreporter.section("processor time")
    for what, costs in (("files", files), ("tests", _spent)):
        dearest = sorted(costs.items(), key=lambda pair: -pair[1])[:_NAMED]
        text = ", ".join(
            f"{name.removeprefix('tests/')} {spent:.0f}" for name, spent in dearest if spent >= 1
        )
        terminalreporter.write_line(
            f"{sum(costs.values()):.0f} s in {len(costs)} {what}; the dearest: {text}"
        )
    if path := os.environ.get("CKPTD_CPU_SECONDS"):
        lines = [json.dumps({"test": test, _KEY: spent}) for test, spent in sorted(_spent.items())]
        Path(path).write_text("\n".join(lines) + "\n")
