"""A trainer shows its host how far it is, and writes to nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptd.progress_page import PAGE_VARIABLE, ProgressPage, StepProgress, StepStage, inherited_page


@pytest.fixture(autouse=True)
def unknown_yet() -> Iterator[None]:
    inherited_page.cache_clear()
    yield
    inherited_page.cache_clear()


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> Iterator[ProgressPage]:
    page = ProgressPage.make()
    monkeypatch.setenv(PAGE_VARIABLE, str(page.descriptor))
    yield page
    os.close(page.descriptor)


def test_a_host_sees_the_step_of_its_trainer(page: ProgressPage) -> None:
    trainer = inherited_page()
    assert trainer is not None
    assert page.read() == StepProgress(0, -1, running=False)
    trainer.begins(7)
    assert page.read() == StepProgress(1, 7, running=True)
    trainer.begins(8)
    assert page.read() == StepProgress(2, 8, running=True, stage=StepStage.TOP)
    trainer.reaches(StepStage.BACKWARD)
    assert page.read() == StepProgress(2, 8, running=True, stage=StepStage.BACKWARD)
    trainer.left(9)
    assert page.read() == StepProgress(2, 9, running=False)
    page.reset()
    assert page.read() == StepProgress()


def test_all_loops_of_a_process_share_it_and_what_the_process_starts_does_not(page: ProgressPage) -> None:
    assert inherited_page() is inherited_page() is not None
    assert PAGE_VARIABLE not in os.environ


def test_a_program_that_a_trainer_starts_shows_in_another_process(page: ProgressPage) -> None:
    """As a trainer is started plainly: it inherits the descriptor."""
    program = "from ckptd.progress_page import inherited_page; inherited_page().begins(3)"
    subprocess.run(
        [sys.executable, "-c", program], pass_fds=[page.descriptor], env=os.environ, check=True, timeout=120
    )
    assert page.read() == StepProgress(1, 3, running=True)


@pytest.mark.parametrize("value", ["", "no number", "-1", "99999"])
def test_without_a_host_there_is_none(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PAGE_VARIABLE, value)
    assert inherited_page() is None


def test_another_file_that_has_its_number_is_not_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program that a trainer has started got the variable, and not the page."""
    path = tmp_path / "precious"
    path.write_bytes(bytes(8192))
    with path.open("r+b") as file:
        monkeypatch.setenv(PAGE_VARIABLE, str(file.fileno()))
        assert inherited_page() is None
    assert path.read_bytes() == bytes(8192)


@pytest.mark.parametrize(("written", "at"), [(b"said\n", 0), (b"\xff" * 64, 8)])
def test_what_a_script_has_written_over_it_shows_nothing(page: ProgressPage, written: bytes, at: int) -> None:
    """It ended the host with an error, and so the trainer."""
    page.begins(3)
    os.pwrite(page.descriptor, written, at)
    assert page.read() == StepProgress()
    page.reset()
    page.begins(4)
    assert page.read().step == 4
