"""The end of a start: what was found is looked at on every rank before any goes on."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

from ckptd.client import RecoveryOptions
from ckptd.client.capture.step_state import Stateful
from ckptd.client.daemon_link.rank_memory import RankMemory
from ckptd.client.daemon_link.session import Session
from ckptd.client.identity import Identity
from ckptd.client.model.freezing import Tape
from ckptd.client.model.live_state import LiveState
from ckptd.client.model.operators import discover_operators
from ckptd.client.model.replicated_params import NOTHING_SHARED
from ckptd.client.ranks.collectives import Collectives
from ckptd.client.recovery import start
from ckptd.client.recovery.global_recovery import Recovered, recover_global
from ckptd.client.recovery.start import Recovery, Resumption
from ckptd.client.schedule.planner import PlanInputs, make_plan
from ckptd.client.training_state import TrainingState
from ckptd.core.schedule import Ordering
from ckptd.core.slots.segment_format import HINT_DROP_GRADIENTS
from ckptd.cuda.cuda_engine import make_engine
from ckptd.cuda.engine import CopyEngine
from ckptd.errors import AttachRefused, DaemonUnavailable
from ckptd.transport.messages import RunSeen
from tests.ckptd.running import MIB
from tests.client.daemon_link.test_rank_memory import attached, record
from tests.client.rank_threads import outcomes

NO_STATE: dict[str, Stateful] = {}


def bound(width: int) -> LiveState:
    model = nn.Linear(width, 2)
    return LiveState(model, [torch.optim.SGD(model.parameters())], None)


def payload(width: int) -> bytes:
    """What a trainer of such a model writes into its descriptor."""
    binding = bound(width)
    plan = make_plan(
        binding,
        discover_operators(binding.model, rows_allowed=binding.rows_allowed),
        PlanInputs(
            policy="sliding",
            window=2,
            every=1,
            budget_bytes=None,
            available_bytes=None,
            popularity=None,
            ordering=Ordering.HARD,
            compute_dtypes={},
            identity={"rank": "0"},
            scalars_capacity=4096,
        ),
    )
    return plan.payload(binding)


@pytest.fixture
def engine() -> Iterator[CopyEngine]:
    found = make_engine(torch.device("cpu"), inline=False)
    yield found
    found.close()


@contextmanager
def two_ranks(endpoint: str, run: str) -> Iterator[list[RankMemory]]:
    with ExitStack() as stack:
        yield [stack.enter_context(attached(endpoint, run, rank, 2)) for rank in range(2)]


@pytest.fixture
def run(endpoint: str) -> str:
    """A run of which both ranks have recorded a suffix."""
    run = uuid.uuid4().hex[:8]
    with two_ranks(endpoint, run) as memories:
        outcomes([partial(recover_global, memory) for memory in memories])
        for memory in memories:
            memory.reserve(MIB, 4, window=2, num_operators=2, payload=payload(4))
            for iteration in (3, 4):
                record(memory, iteration)
    return run


def find(
    memories: list[RankMemory],
    engine: CopyEngine,
    *,
    widths: tuple[int, int] = (4, 4),
    at: tuple[int | None, int | None] = (None, None),
) -> list[Resumption | Exception | None]:
    """What ranks with models of these widths find, or raise, if they are told to go back to an iteration."""

    def work(rank: int, ranks: Collectives) -> Resumption | None:
        subject = TrainingState(
            bound(widths[rank]),
            NO_STATE,
            Identity("job", "run", rank, 2),
            ("inputs", ""),
            [],
            NOTHING_SHARED,
        )
        options = RecoveryOptions(verify_iterations=0, resume_at=at[rank])
        return Recovery(subject, engine, Tape(), options).find(memories[rank], ranks)

    return outcomes([lambda e, r=r: work(r, e) for r in range(2)])  # type: ignore[misc]


def test_both_find_the_same(endpoint: str, run: str, engine: CopyEngine) -> None:
    with two_ranks(endpoint, run) as memories:
        first, second = find(memories, engine, widths=(4, 4))
        assert isinstance(first, Resumption), first
        assert isinstance(second, Resumption), second
        assert (first.replay.start, first.replay.end) == (3, 4)
        assert (second.replay.start, second.replay.end) == (3, 4)
        assert (first.replay.freezing, second.replay.freezing) == ("inputs", "inputs")


def test_where_none_was_parked_the_nodes_are_asked_once(
    endpoint: str, run: str, engine: CopyEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether some ranks need not go back was asked first, and then the same again. Each time a lost node
    was waited for.
    """
    asked: list[bool] = []
    ask = Session.see_run

    def counted(self: Session, *args: Any, **options: Any) -> RunSeen:
        asked.append(True)
        return ask(self, *args, **options)

    monkeypatch.setattr(Session, "see_run", counted)
    with two_ranks(endpoint, run) as memories:
        for found in find(memories, engine, widths=(4, 4)):
            assert isinstance(found, Resumption), found
    assert len(asked) == 1, "one rank of the node speaks for both"


@pytest.mark.parametrize(("durable", "asked"), [(4, [False]), (5, [False, True])])
def test_storage_is_asked_where_memory_is_older_than_what_is_durable(
    endpoint: str,
    run: str,
    engine: CopyEngine,
    monkeypatch: pytest.MonkeyPatch,
    durable: int,
    asked: list[bool],
) -> None:
    """A replica that lagged buried twelve durable iterations. Where storage has nothing that counts, or does not
    answer, memory does.
    """
    seen: list[bool] = []
    ask = Session.see_run

    def told(self: Session, *args: Any, **options: Any) -> RunSeen:
        seen.append(options["storage"])
        found = ask(self, *args, **options)
        holdings = [msgspec.structs.replace(h, durable=durable) for h in found.holdings]
        return msgspec.structs.replace(found, holdings=tuple(holdings))

    monkeypatch.setattr(Session, "see_run", told)
    with two_ranks(endpoint, run) as memories:
        for found in find(memories, engine, widths=(4, 4)):
            assert isinstance(found, Resumption), found
            assert found.replay.end == 4
    assert seen == asked


def test_an_iteration_that_any_rank_was_beyond_is_not_new(
    endpoint: str, run: str, engine: CopyEngine
) -> None:
    """Rank 1 was a snapshot ahead: iteration 4 was done. Both do it again, and what is new begins with 5."""
    with two_ranks(endpoint, run) as memories:
        record(memories[1], 5)
        for found in find(memories, engine, widths=(4, 4)):
            assert isinstance(found, Resumption), found
            assert (found.replay.end, found.new_from) == (4, 5)


def test_who_goes_back_by_choice_gives_up_what_was_done_since(endpoint: str, run: str) -> None:
    with two_ranks(endpoint, run) as memories:
        for memory in memories:
            record(memory, 5)
        for found in outcomes([partial(recover_global, memory, at=4) for memory in memories]):
            assert isinstance(found, Recovered), found
            assert found.new_from == 4


def ends(found: list[Resumption | Exception | None]) -> list[int]:
    """The iterations at which ranks resume."""
    assert all(isinstance(one, Resumption) for one in found), found
    return [one.replay.end for one in found if isinstance(one, Resumption)]


def test_a_start_that_is_told_the_same_as_the_last_one_does_not_go_back_again(
    endpoint: str, run: str, engine: CopyEngine
) -> None:
    """torchrun counts no restart where another node has come, and most launchers count none: the job went back
    at each failure, and gave up what it had done since.
    """
    with two_ranks(endpoint, run) as memories:
        assert ends(find(memories, engine, at=(4, 4))) == [4, 4]
        for memory in memories:
            record(memory, 5)
            record(memory, 6)
    for told, end in ((4, 6), (4, 6), (5, 5), (None, 5), (5, 5)):
        with two_ranks(endpoint, run) as memories:
            assert ends(find(memories, engine, at=(told, told))) == [end, end], told


def test_the_restart_that_one_launcher_knows_of_is_one_for_all_ranks(
    endpoint: str, run: str, engine: CopyEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each agent of torchrun counts its own: one rank went back, and the other did not."""
    with two_ranks(endpoint, run) as memories:
        assert ends(find(memories, engine)) == [4, 4]
        for memory in memories:
            record(memory, 5)
    monkeypatch.setattr(start, "_restarted", iter((False, True)).__next__)
    with two_ranks(endpoint, run) as memories:
        assert ends(find(memories, engine, at=(4, 4))) == [5, 5]


def test_ranks_that_are_told_to_go_back_to_different_iterations_are_refused(
    endpoint: str, run: str, engine: CopyEngine
) -> None:
    with two_ranks(endpoint, run) as memories:
        for found in find(memories, engine, at=(3, None)):
            assert isinstance(found, ValueError), found
            assert "resume_at= must be the same on all ranks, and is, by rank, {0: 3, 1: None}" in str(found)
        assert ends(find(memories, engine)) == [4, 4], "nothing was changed"


def test_what_one_rank_has_learnt_about_freezing_all_heed(
    endpoint: str, run: str, engine: CopyEngine
) -> None:
    """Only the rank that noticed changed over. The others' part of a norm over all gradients stayed
    wrong, at each start.
    """
    with two_ranks(endpoint, run) as memories:
        memories[1].leave_hint(HINT_DROP_GRADIENTS)
        for found in find(memories, engine, widths=(4, 4)):
            assert isinstance(found, Resumption), found
            assert found.replay.freezing == "drop"


def test_another_model_on_one_rank_stops_both(endpoint: str, run: str, engine: CopyEngine) -> None:
    """Rank 0 could go on, and would wait for rank 1 in its first step."""
    with two_ranks(endpoint, run) as memories:
        first, second = find(memories, engine, widths=(4, 5))
        assert isinstance(second, AttachRefused)
        assert second.code == "model_changed"
        assert isinstance(first, DaemonUnavailable)
        assert "rank 1 on node" in str(first)
        assert "are of another model" in str(first)
    with two_ranks(endpoint, run) as memories:
        found = find(memories, engine, widths=(4, 4))
        assert all(isinstance(one, Resumption) for one in found), "nothing was lost"


def test_a_snapshot_that_does_not_arrive_on_one_rank_stops_both(
    endpoint: str, run: str, engine: CopyEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was damaged on the way, say: the other must not begin its replay alone."""
    with two_ranks(endpoint, run) as memories:
        together = recover_global

        def without_the_first(
            memory: RankMemory, ranks: Collectives, at: int | None, **options: Any
        ) -> object:
            found = together(memory, ranks, at, **options)
            if memory is not memories[1]:
                return found
            assert isinstance(found, tuple)

            def gone() -> None:
                raise DaemonUnavailable("iteration 3 could not be brought here", operation="fetch")

            found[0][0]._view = gone  # type: ignore[assignment]
            return found

        monkeypatch.setattr(start, "recover_global", without_the_first)
        found = find(memories, engine, widths=(4, 4))
        assert all(isinstance(error, DaemonUnavailable) for error in found), found
        assert str(found[0]) == str(found[1])
        assert "fetch: iteration 3 could not be brought here" in str(found[0])
