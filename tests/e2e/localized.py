"""A run of several ranks in several lives, each torn down as torchrun does it, and who did what
again in the next one.
"""

from __future__ import annotations

import os
import signal
import time
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import MappingProxyType

from ckptd.core.slots.slots import SlotState
from ckptd.memory.segment_file import open_segment
from tests.e2e.compare import differences
from tests.e2e.harness import DaemonProcess, Jobs
from tests.e2e.ranks import Ranks, story
from tests.e2e.test_bad_input import flip

__all__ = ["KILL_AT", "TOTAL", "Life", "References", "Story", "Trace", "damage"]

KILL_AT, TOTAL = 14, 19
_REST_S = 0.5  # in which ranks come as far as they can without one
_GRACE_S = 30  # torchrun's, between SIGTERM and SIGKILL
_NOBODY: Mapping[int, tuple[str, ...]] = MappingProxyType({})


def damage(folder: Path, run: str, rank: int, kind: str) -> None:
    """Flip a bit in each sealed slot of this kind that this rank has in a segment folder."""
    found = list(folder.glob(f"e2e~{run}~r{rank}~*.{kind}"))
    assert found
    for path in found:
        segment = open_segment(path)
        for index, header in segment.headers():
            if header.state is SlotState.SEALED:
                flip(segment, index, header)


@dataclass(frozen=True, slots=True)
class Trace:
    """What one rank did in one life: the iterations that it began, those of them that were
    replayed, those that it completed, and where it is to die.
    """

    begun: list[int]
    replayed: list[int]
    completed: list[int]
    dying: list[int]

    @classmethod
    def read(cls, path: Path) -> Trace:
        lines = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
        begun = [(int(line[1]), line[2] == "1") for line in lines if line[0] == "begin"]
        return cls(
            [step for step, _ in begun],
            [step for step, replayed in begun if replayed],
            [int(line[1]) for line in lines if line[0] == "end"],
            [int(line[1]) for line in lines if line[0] == "dies"],
        )


class Life:
    """The ranks of one life."""

    def __init__(self, ranks: Ranks, traces: Sequence[Path]) -> None:
        self.ranks, self._traces = ranks, traces

    @property
    def processes(self) -> list[BaseProcess]:
        return [process for process, _ in self.ranks.started]

    @property
    def traces(self) -> list[Trace]:
        return [Trace.read(path) for path in self._traces]

    def reach(self, step: int) -> None:
        """Wait until all ranks have begun that iteration."""
        self._until(lambda: all(step in trace.begun for trace in self.traces))

    def reach_replay(self, rank: int) -> None:
        """Wait until this rank replays its second iteration."""
        self._until(lambda: len(self.traces[rank].replayed) > 1)

    def _until(self, reached: Callable[[], bool], timeout_s: float = 150) -> None:
        deadline = time.monotonic() + timeout_s
        while not reached():
            assert all(process.is_alive() for process in self.processes), self.ranks.logs
            assert time.monotonic() < deadline, self.ranks.logs
            time.sleep(0.01)

    def kill_with(self, dying: int, *others: int) -> None:
        """When this rank is where it would die after a delay, and the others have come as far as
        they can, they die before it: none of them is left to hear of it, and to be parked.
        """
        self._until(lambda: bool(self.traces[dying].dying))
        time.sleep(_REST_S)
        for rank in (*others, dying):
            self.processes[rank].kill()

    def torn_down(self, *victims: int, timeout_s: float = 150) -> None:
        """Wait until the first of the victims has killed itself; the others are killed with it,
        survivors get SIGTERM, as of torchrun.
        """
        lost = [self.processes[rank] for rank in victims]
        if lost:
            died = wait([process.sentinel for process in lost], timeout=timeout_s)
            assert died, f"no victim has died in {timeout_s:g} s\n{self.ranks.logs}"
            for process in lost:
                process.kill()
                process.join()
        self._end_survivors()
        codes = [process.exitcode for process in lost]
        assert codes == [-signal.SIGKILL] * len(lost), f"{codes}\n{self.ranks.logs}"

    def _end_survivors(self) -> None:
        for process in self.processes:
            if process.is_alive():
                process.terminate()
        until = time.monotonic() + _GRACE_S
        for process in self.processes:
            process.join(max(0.0, until - time.monotonic()))
        self.ranks.kill()

    def send(self, number: signal.Signals, ranks: Collection[int]) -> None:
        for rank in ranks:
            pid = self.processes[rank].pid
            assert pid is not None
            os.kill(pid, number)


class References:
    """The final states of runs without ckptd, each of which is made once."""

    def __init__(self, folder: Path) -> None:
        self._jobs = Jobs(folder, "none")
        self._known: dict[tuple[str, int], list[Path]] = {}

    def of(self, case: str, ranks: int) -> list[Path]:
        """By rank."""
        if (case, ranks) not in self._known:
            life = Ranks(self._jobs, "reference", case=case, world_size=ranks, total=TOTAL)
            self._known[case, ranks] = life.end()
        return self._known[case, ranks]


class Story:
    """One run. With ``endpoints``, rank r trains on the node with the daemon ``endpoints[r]``."""

    def __init__(
        self,
        jobs: Jobs,
        daemon: DaemonProcess,
        references: References,
        case: str,
        *,
        ranks: int,
        endpoints: Sequence[str] = (),
    ) -> None:
        self.jobs, self.daemon, self.case, self.ranks = jobs, daemon, case, ranks
        self._references = references
        self.run = uuid.uuid4().hex[:8]
        # Steps of a millisecond are quicker than any daemon: what is logged of them would be a
        # matter of luck.
        self.options: tuple[str, ...] = ("--step-ms", "20")
        self.endpoints = endpoints
        self.lives: list[Life] = []

    def life(
        self, each: Mapping[int, tuple[str, ...]] = _NOBODY, *options: str, kill_at: int = KILL_AT
    ) -> Life:
        """The next one, with these further options of single ranks."""
        number = len(self.lives)
        traces = [self.jobs.folder / f"trace-{self.run}-{number}-{r}" for r in range(self.ranks)]
        own: dict[int, tuple[str, ...]] = {}
        for rank, trace in enumerate(traces):
            here = ("--daemon", self.endpoints[rank]) if self.endpoints else ()
            own[rank] = ("--trace", str(trace), *here, *each.get(rank, ()))
        # The seed is another in each life: nothing right can come from the initialisation.
        usual = ("--patient-until", str(kill_at), "--seed", str(1 + number))
        ranks = Ranks(
            self.jobs,
            self.run,
            *(*usual, *self.options, *options),
            case=self.case,
            world_size=self.ranks,
            total=TOTAL,
            each=own,
        )
        self.lives.append(Life(ranks, traces))
        return self.lives[-1]

    def close(self) -> None:
        """Nothing of it is left running."""
        for life in self.lives:
            life.ranks.kill()

    def lose(self, *victims: int, point: str = "top", kill_at: int = KILL_AT) -> Life:
        """A life in which these kill themselves there, when the others have come as far as they can
        without them.
        """
        deadly = ("--kill-at", str(kill_at), "--kill-point", point, "--kill-delay-ms", "500")
        sealed = ("--kill-sealed",) if point == "inside" else ()
        life = self.life(dict.fromkeys(victims, (*deadly, *sealed)), kill_at=kill_at)
        life.torn_down(*victims)
        return life

    def ends_exact(self, *options: str) -> Life:
        """The last life, which ends where a run without ckptd ends, on every rank."""
        life = self.life(_NOBODY, *options)
        outs = life.ranks.end()
        references = self._references.of(self.case, self.ranks)
        for rank, (reference, out) in enumerate(zip(references, outs, strict=True)):
            found = differences(reference, out)
            assert found == [], f"rank {rank} differs in {sorted(found)[:8]}{self.told}"
        return life

    def differs(self, life: Life) -> list[int]:
        """The ranks that end with other bits than in a run without ckptd."""
        outs = life.ranks.end()
        references = self._references.of(self.case, self.ranks)
        pairs = zip(references, outs, strict=True)
        return [rank for rank, (a, b) in enumerate(pairs) if differences(a, b)]

    @property
    def told(self) -> str:
        """What all ranks and the daemon have said, for the message of a test that fails."""
        return story(self.daemon, self.run, *(life.ranks for life in self.lives))

    def reasons(self, kind: str = "restored") -> list[str]:
        """What the daemon was told of this run, oldest first."""
        return self.daemon.events(kind, self.run)

    def again(self, rank: int) -> list[int]:
        """What this rank ran in the last life though it had completed it in one before."""
        before = self._before(rank)
        return [step for step in self.lives[-1].traces[rank].completed if step in before]

    def _before(self, rank: int) -> set[int]:
        return {step for life in self.lives[:-1] for step in life.traces[rank].completed}

    def assert_only(self, *replaying: int) -> None:
        """Only these ranks replayed in the last life; no other ran again what it had completed."""
        life = self.lives[-1]
        for rank, trace in enumerate(life.traces):
            again = self.again(rank)
            if rank in replaying:
                assert trace.replayed, f"rank {rank} did not replay{self.told}"
                assert again, f"rank {rank} ran nothing again{self.told}"
            else:
                assert trace.replayed == [], f"rank {rank} replayed{self.told}"
                assert again == [], f"rank {rank} ran {again} again{self.told}"
                assert trace.begun[0] == max(self._before(rank)) + 1, f"rank {rank}{self.told}"
                assert self._replayed_steps(life, rank) == 0, f"rank {rank}{self.told}"

    def _replayed_steps(self, life: Life, rank: int) -> int:
        """As the ``Checkpointer`` counts them."""
        return int(self.jobs.report(life.ranks.started[rank][1])["replayed_steps"])

    def assert_everybody_replayed(self) -> None:
        """In the last life, from one iteration on."""
        traces = self.lives[-1].traces
        assert all(trace.replayed for trace in traces), self.told
        assert len({trace.begun[0] for trace in traces}) == 1, self.told
