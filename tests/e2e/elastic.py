"""Lives of an elastic run: as many ranks as there are nodes, each with a daemon; what they told,
and what they were at which step.
"""

from __future__ import annotations

import contextlib
import json
import signal
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from tests.ckptd.nodes import Node
from tests.e2e.elastic_job import EXPERTS, Part, act
from tests.e2e.elastic_states import joined_shards, same
from tests.forked import FORKED

__all__ = ["ElasticRun", "Life", "same", "undisturbed_life"]

_GRACE_S = 30.0
_NOBODY: Mapping[int, dict[str, Any]] = MappingProxyType({})


class Life:
    """The ranks of one life."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = list(parts)
        self.processes: list[BaseProcess] = [FORKED.Process(target=act, args=(p,)) for p in parts]
        for process in self.processes:
            process.start()

    def ends(self, timeout_s: float = 150) -> None:
        """All end as they should; the first failure ends the others."""
        deadline = time.monotonic() + timeout_s
        while any(p.exitcode is None for p in self.processes) and time.monotonic() < deadline:
            if any(p.exitcode for p in self.processes):
                break
            wait([p.sentinel for p in self.processes if p.exitcode is None], timeout=1)
        codes = [process.exitcode for process in self.processes]
        self.kill()
        assert codes == [0] * len(codes), f"{codes}\n{self.logs}"

    def torn_down(self, timeout_s: float = 150) -> int:
        """Wait until a rank has killed itself, and tell which; the others get SIGTERM, as of
        torchrun, where they have not failed by then.
        """
        deadline = time.monotonic() + timeout_s
        while not (dead := [r for r, p in enumerate(self.processes) if p.exitcode == -signal.SIGKILL]):
            alive = [p.sentinel for p in self.processes if p.exitcode is None]
            if not alive or time.monotonic() > deadline:
                self.kill()
                raise AssertionError(f"nobody has killed itself\n{self.logs}")
            wait(alive, timeout=1)
        for process in self.processes:
            if process.is_alive():
                process.terminate()
        until = time.monotonic() + _GRACE_S
        for process in self.processes:
            process.join(max(0.0, until - time.monotonic()))
        self.kill()
        return dead[0]

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()

    @property
    def logs(self) -> str:
        paths = [p.folder / f"{p.out}-{p.rank}.log" for p in self.parts]
        return "\n".join(f"-- {p.name}\n{p.read_text()}" for p in paths if p.exists())

    # -- what they told --------------------------------------------------------------------------

    def events(self, event: str, rank: int = 0) -> list[dict[str, Any]]:
        part = self.parts[rank]
        path = part.folder / f"{part.out}-{rank}.jsonl"
        told = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return [one for one in told if one["event"] == event]

    def losses(self, what: str = "loss") -> dict[int, float]:
        """By step, as rank 0 told them; or the norm of all gradients."""
        return {one["step"]: one[what] for one in self.events("step")}

    def start(self) -> int:
        """The step at which the (last) world of this life began."""
        (found,) = {self.events("world", rank)[-1]["start"] for rank in range(len(self.parts))}
        return int(found)

    def state(self, rank: int, step: int) -> dict[str, Any]:
        """What a rank was at the top of a step."""
        part = self.parts[rank]
        found: dict[str, Any] = torch.load(part.folder / f"{part.out}-{rank}-{step}.pt", weights_only=False)
        return found

    def whole(self, step: int) -> dict[str, Any]:
        """What the job was at the top of a step: of each name one value, after a check that all
        ranks that have it have the same.

        Of random generators each rank's own; of shards what all of them are together, without padding.
        """
        states = [self.state(rank, step) for rank in range(len(self.parts))]
        shards = [state.pop("shards") for state in states if "shards" in state]
        found: dict[str, Any] = joined_shards(shards) if shards else {}
        for rank, state in enumerate(states):
            for name, value in state.items():
                if name == "rng":
                    found[f"rng of rank {rank}"] = value
                    continue
                assert same(found.setdefault(name, value), value), f"{name} differs on rank {rank}"
        return found


class ElasticRun:
    """Lives of one run on nodes."""

    def __init__(self, folder: Path, **usual: Any) -> None:
        self._folder, self._usual = folder, usual
        self.run = uuid.uuid4().hex[:8]
        self.lives: list[Life] = []

    def life(
        self, nodes: Sequence[Node | None], each: Mapping[int, dict[str, Any]] = _NOBODY, **more: Any
    ) -> Life:
        """The next one, with a rank on each of these nodes."""
        first = Part(
            folder=self._folder,
            out=f"life{len(self.lives)}",
            run=self.run,
            rank=0,
            world_size=len(nodes),
            seed=100 + len(self.lives),
            **{"total": 20, **self._usual, **more},
        )
        parts = [
            replace(
                first,
                rank=rank,
                daemon=None if node is None else node.endpoint,
                **each.get(rank, {}),
            )
            for rank, node in enumerate(nodes)
        ]
        self.lives.append(Life(parts))
        return self.lives[-1]

    @property
    def logs(self) -> str:
        return "\n".join(life.logs for life in self.lives)

    def close(self) -> None:
        for life in self.lives:
            life.kill()


@contextlib.contextmanager
def undisturbed_life(folder: Path, total: int) -> Iterator[Life]:
    """One rank with all experts and the whole batch, without ckptd."""
    folder.mkdir()
    with contextlib.closing(ElasticRun(folder)) as made:
        yield made.life([None], slots=EXPERTS, total=total)
