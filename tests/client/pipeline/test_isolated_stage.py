"""Running apart: over real processes, to the bit; and what is said when a log does not have what is needed."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptd.client.pipeline.isolated_stage import IsolatedStage
from ckptd.core.slots.boundary import RecordKey, SentKind
from tests.client.apart_ranks import BASE, RESUME, TOTAL, Log, Outcome, run_ranks
from tests.long import long

LAST = RESUME - 1


def check(outcomes: list[Outcome], lost: frozenset[int], readers: dict[int, set[int]]) -> None:
    """Everybody ran what it should, to the bit, and read the logs of those that were not there."""
    for rank, outcome in enumerate(outcomes):
        first = BASE if rank in lost else RESUME
        assert (outcome.error, outcome.unlike) == ("", []), f"rank {rank}"
        assert outcome.ran == list(range(first, TOTAL))
        sources = readers.get(rank, set())
        assert outcome.read == {(s, i) for s in sources for i in range(BASE, RESUME)}


@pytest.mark.slow
def test_lost_stages_run_alone_or_with_their_lost_neighbour(tmp_path: Path) -> None:
    """One in the middle, two side by side, the first, the last, and two that are not neighbours."""
    reads: list[dict[int, set[int]]] = [
        {1: {0, 2}},
        {1: {0}, 2: {3}},
        {0: {1}},
        {3: {2}},
        {0: {1}, 2: {1, 3}},
    ]
    restarts = [frozenset(readers) for readers in reads]
    found = run_ranks(tmp_path, "1f1b", restarts)
    for outcomes, lost, readers in zip(found, restarts, reads, strict=True):
        check(outcomes, lost, readers)


@pytest.mark.slow
@long
def test_replicas_of_a_stage_run_apart_together(tmp_path: Path) -> None:
    """Two pipelines of two stages: both ranks with the second stage go back, and reduce their
    gradients among themselves.
    """
    reads = {1: {0}, 3: {2}}
    (outcomes,) = run_ranks(tmp_path, "replicas", [frozenset(reads)])
    check(outcomes, frozenset(reads), reads)


@pytest.mark.slow
@long
@pytest.mark.parametrize("pipeline", ["gpipe", "static", "interleaved", "zero bubble"])
def test_every_schedule_runs_apart(tmp_path: Path, pipeline: str) -> None:
    """Also one that a step runs twice, one whose stages know their shapes, and two stages on a rank."""
    reads: list[dict[int, set[int]]] = [{0: {1}}, {1: {0, 2}}]
    if pipeline in ("interleaved", "zero bubble"):
        reads = [{0: {1}}, {1: {0}}]
    restarts = [frozenset(readers) for readers in reads]
    found = run_ranks(tmp_path, pipeline, restarts)
    for outcomes, lost, readers in zip(found, restarts, reads, strict=True):
        check(outcomes, lost, readers)


def change_one(rank: int, log: Log) -> None:
    if rank == 0:
        log[LAST][RecordKey(SentKind.ACTIVATION, 0, 1)][0, 0, 0] += 1


@pytest.mark.slow
def test_a_changed_record_is_not_without_consequence(tmp_path: Path) -> None:
    """The negative control: equality is not for free."""
    (outcomes,) = run_ranks(tmp_path, "pair", [frozenset({1})], change_one)
    wrong = outcomes[1].unlike
    assert any(path.startswith(f"after {LAST}: /model") for path in wrong)
    assert not any(path.startswith(f"after {LAST - 1}") for path in wrong)


def leave_one_out(rank: int, log: Log) -> None:
    if rank == 0:
        del log[LAST][RecordKey(SentKind.ACTIVATION, 0, 1)]


@pytest.mark.slow
def test_a_missing_record_is_told_by_its_name(tmp_path: Path) -> None:
    (outcomes,) = run_ranks(tmp_path, "pair", [frozenset({1})], leave_one_out)
    assert outcomes[1].ran == list(range(BASE, LAST))
    assert (
        f"run isolated [rank=1 iteration={LAST} neighbour=0 kind=activation stage=0 micro_batch=1 index=0 round=0]: it is not in the log"
        in outcomes[1].error
    )


def test_bases_after_the_end_are_refused() -> None:
    with pytest.raises(ValueError, match="rank 3 starts at 9, after resume=8"):
        IsolatedStage([], 0, {3: 9}, 8, lambda *_: {})
