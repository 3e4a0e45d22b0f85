"""The same examples in every run: ``make test`` must not fail by chance.
``CKPTD_RANDOM_EXAMPLES=1`` looks for new ones.

And one OpenMP thread, here and in all children, for whoever does not ask for more: several test
processes share the cores, and a team of which a member waits for a core waits as a whole. With two
threads the same tests took four to ten times as long.

Every process of a test checks the invariants of its state machines after each event
(`ckptd.core.state_machine`). ``--update-golden`` writes the transcripts in ``tests/testdata`` anew:
read their diff.
"""

from __future__ import annotations

import os
import sys
import uuid
from collections.abc import Callable, Iterator

import pytest
from hypothesis import settings

from ckptd.core.state_machine import validate_always
from tests.cpu_seconds import (
    pytest_collection_finish,
    pytest_runtest_logreport,
    pytest_runtest_makereport,
    pytest_terminal_summary,
)
from tests.long import LONG
from tests.transcripts import Driver, compare

__all__ = [
    "pytest_collection_finish",
    "pytest_runtest_logreport",
    "pytest_runtest_makereport",
    "pytest_terminal_summary",
]

# Bytecode is kept, of rewritten assertions too. Without it the collection takes twice as long, and each fresh
# interpreter of a test compiles what it imports.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
os.environ["CKPTD_VALIDATE"] = "1"  # of children
validate_always()
os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported, after this

# Without deadlines: a slow machine is no failure.
settings.register_profile("unhurried", deadline=None)
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("unhurried" if os.environ.get("CKPTD_RANDOM_EXAMPLES") else "repeatable")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items if not LONG else ():
        if mark := item.get_closest_marker("long"):
            item.add_marker(pytest.mark.skip(reason=mark.args[0]))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write golden transcripts anew")


@pytest.fixture
def unvalidated() -> Iterator[None]:
    """For tests of bytes, which put into a slot what no machine would."""
    validate_always(False)
    yield
    validate_always()


@pytest.fixture
def transcript(request: pytest.FixtureRequest) -> Callable[[str, Driver], None]:
    """Plays a transcript of ``tests/testdata`` and compares it with what is written there."""
    update = bool(request.config.getoption("--update-golden"))
    return lambda name, driver: compare(name, driver, update=update)


@pytest.fixture
def run() -> str:
    """The name of a run that no other test has."""
    return uuid.uuid4().hex[:8]
