"""What stages sent is in their daemons' memory after everybody was killed, and equals what the
receivers have written down.
"""

from __future__ import annotations

import re
import uuid
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ckptd.client.pipeline.log_reader import LogReader, facts_of, log_files
from ckptd.core.slots.boundary import SentKind
from ckptd.core.slots.segment_format import read_prologue
from ckptd.transport.messages import GetStatus, Status
from tests.ckptd.running import eventually
from tests.e2e.compare import differences
from tests.e2e.harness import DaemonProcess, Jobs, own_daemon
from tests.e2e.parallel.logged import CASES
from tests.e2e.ranks import Ranks
from tests.long import long_since

WINDOW, KILL_AT, TOTAL = 4, 11, 15
QUICK = ("one_f_one_b", "by_hand")
long = long_since("two cases stand for it")

Key = tuple[str, int, int, int]


def life(
    jobs: Jobs,
    run: str,
    case: str,
    received: Path,
    *options: str,
    daemon: str | None = None,
    killed: int | None = None,
) -> Ranks:
    received.mkdir(exist_ok=True)
    return Ranks(
        jobs,
        run,
        # Steps of a millisecond are quicker than any daemon: what is logged of them would be a
        # matter of luck. All replay what they sent: nobody goes on where it was parked.
        *("--received", str(received), "--step-ms", "30", "--set", "park=false", *options),
        case=f"logged/{case}",
        world_size=CASES.cases[case].ranks,
        total=TOTAL,
        kill_at=KILL_AT,
        daemon=daemon,
        killed=killed,
    )


def readers(daemon: DaemonProcess, run: str, world_size: int) -> list[LogReader]:
    """The logs of all ranks, as soon as what was filled is sealed."""

    def waiting() -> bool:
        segments = daemon.ask(GetStatus(), Status).segments
        mine = [s for s in segments if s.run == run]
        return any(s.owned or {"filled", "filling"} & s.states.keys() for s in mine)

    eventually(lambda: not waiting(), "everything is sealed")
    folder = daemon.segment_dir
    return [LogReader(log_files(folder, "e2e", run, rank)) for rank in range(world_size)]


def told(daemon: DaemonProcess, run: str, world_size: int) -> list[tuple[set[int], set[int]]]:
    """Neighbours and domain of each rank, as its log tells them."""
    found = []
    for rank in range(world_size):
        path = log_files(daemon.segment_dir, "e2e", run, rank)[-1]
        facts = facts_of(read_prologue(memoryview(path.read_bytes()))[1].client)
        assert facts is not None
        found.append((set(facts.neighbours), set(facts.domain)))
    return found


def expected_facts(case: str, world_size: int) -> list[tuple[set[int], set[int]]]:
    """A chain; an all-reduce that is no shared value joins all of it."""
    everybody = set(range(world_size))
    return [
        (everybody & {rank - 1, rank + 1}, {rank} if case in QUICK else everybody)
        for rank in range(world_size)
    ]


def logged(readers: list[LogReader], iteration: int) -> dict[Key, Tensor]:
    """What all ranks sent in an iteration."""
    found: dict[Key, Tensor] = {}
    for reader in readers:
        for key, tensor in reader.read(iteration).items():
            if key.kind is SentKind.VALUE:
                continue
            assert key.round == 0
            found[str(key.kind), key.stage, key.micro_batch, key.index] = tensor
    return found


def received(folder: Path, iteration: int, world_size: int) -> dict[Key, Tensor]:
    """What all ranks have written down of an iteration."""
    found: dict[Key, Tensor] = {}
    for rank in range(world_size):
        found.update(torch.load(folder / f"{iteration}-r{rank}.pt"))
    return found


def unlike(sent: dict[Key, Tensor], got: dict[Key, Tensor]) -> list[Key]:
    """What is in one of them only, or has other bits."""
    same = {key for key in sent.keys() & got.keys() if _same(sent[key], got[key])}
    return sorted((sent.keys() | got.keys()) - same)


def _same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a, b)


@pytest.mark.slow
@pytest.mark.parametrize("case", [pytest.param(n, marks=[] if n in QUICK else [long]) for n in CASES.cases])
def test_logs_outlive_trainers_and_daemon_and_are_what_was_received(tmp_path: Path, case: str) -> None:
    """All trainers are killed in the middle of a step, then the daemon, too; and the next life goes
    on where they ended.

    It replays what was logged, and compares: none of it may differ.
    """
    run, world_size = uuid.uuid4().hex[:8], CASES.cases[case].ranks
    with own_daemon() as daemon:
        jobs = Jobs(tmp_path, daemon.endpoint)
        references = life(jobs, run, case, tmp_path / "none", daemon="none").end()
        joined = case not in QUICK
        first, folder = tmp_path / "first", tmp_path / "second"
        before = life(jobs, run, case, first, killed=1)
        before.end_by_the_death_of(1)
        daemon.kill()
        daemon.start()
        logs = readers(daemon, run, world_size)
        for iteration in range(KILL_AT - WINDOW, KILL_AT):
            sent = logged(logs, iteration)
            got = received(first, iteration, world_size)
            assert len(got) >= 3 * (world_size - 1), before.logs
            assert unlike(sent, got) == [], f"iteration {iteration}\n{before.logs}"
        assert told(daemon, run, world_size) == expected_facts(case, world_size)
        after = life(jobs, run, case, folder, "--seed", "7")
        outs = after.end()
        for reference, out in zip(references, outs, strict=True):
            report = jobs.report(out)
            assert report["replayed_with_frozen"] > 0, after.logs
            assert report["log_compared"] > 0, after.logs
            assert (report["log_mismatches"], report["log_skipped"]) == (0, 0), after.logs
            assert ("localized recovery: never apart" in report["describe"]) == joined
            assert f"for {int(report['log_slots'])} iterations" in report["describe"]
            assert differences(reference, out) == [], after.logs
        logs = readers(daemon, run, world_size)
        for iteration in range(TOTAL - WINDOW, TOTAL):
            assert unlike(logged(logs, iteration), received(folder, iteration, world_size)) == []
        one_each = [path.name for path in daemon.segment_dir.glob("*.boundary")]
        assert len(one_each) <= 2 * world_size, one_each  # a wider one was made beside it, at most


@pytest.mark.slow
def test_a_record_that_is_left_out_is_noticed(jobs: Jobs, daemon: DaemonProcess) -> None:
    """The negative control of the comparison in the test above, and of the one that a replay makes."""
    run, case = uuid.uuid4().hex[:8], "one_f_one_b"
    folder = jobs.folder / "received"
    without = ("--leave-out", "one record")
    life(jobs, run, case, folder, *without, killed=1).end_by_the_death_of(1)
    logs = readers(daemon, run, 3)
    iteration = KILL_AT - 1
    found = unlike(logged(logs, iteration), received(folder, iteration, 3))
    assert found == [("activation", 0, 1, 0), ("activation", 1, 1, 0)]
    told = life(jobs, run, case, folder, "--seed", "7").end_by_a_failure()
    assert "sent other tensors than its log contains" in told
    # By the rank that comes to it first: the other one is ended then.
    noticed = re.findall(r"(activation/\d/1/0/0) was not sent before", told)
    assert noticed, told
    assert set(noticed) <= {"activation/0/1/0/0", "activation/1/1/0/0"}
