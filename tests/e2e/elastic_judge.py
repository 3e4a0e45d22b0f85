"""Whether the worlds of an elastic run are what they have to be: looked at after each life."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from tests.e2e.elastic import Life, same
from tests.e2e.elastic_kills import NOTHING_WHOLE, Round
from tests.e2e.elastic_watch import Tail

__all__ = ["Judge", "Mark"]

# Of sums in double precision that are added up in another order, over all steps.
_CLOSE = 1e-7
Mark = tuple[int, int]  # world and iteration
_NOTHING: Mark = (-1, -1)
_NAMED = 5


@dataclass
class _World:
    """What its ranks told: the digests of each top by name, and which ranks told them."""

    number: int
    start: int
    reason: str
    ranks: int
    tops: dict[int, dict[str, str]] = field(default_factory=dict)
    told: dict[int, set[int]] = field(default_factory=dict)
    floor: int = -1


class Judge:
    """Knows all worlds of a run.

    Args:
        alone: the undisturbed reference, with its state at all tops.
        total: steps of the job.

    ``exposed``: the nodes that lost their memory since all of the job was last told to be
    replicated, without those of this life.
    """

    def __init__(
        self, found: Round, alone: Life, total: int, durable: Callable[[], Mark] | None = None
    ) -> None:
        self._found, self._alone, self._total = found, alone, total
        self._look_durable, self._durable = durable, _NOTHING
        self._worlds: dict[int, _World] = {}
        self._secure = -1, -1  # world and floor
        self._newest: _World | None = None
        self._reached = 0
        self._lost_since_start = False
        self.exposed: set[str] = set()
        self._lost_now: set[str] = set()
        # While a daemon is away no ring waits for it (docs/replication.md, section 6): what was
        # promised may be given away then.
        self._lapsed = self._lapses_now = False
        self._found_durable = _NOTHING  # before this life

    def daemon_away(self) -> None:
        """A daemon is killed while ranks go on."""
        self._lapses_now = True

    @property
    def is_durable(self) -> bool:
        """Whether anything is durable now."""
        return self._look_durable is not None and self._look_durable() > _NOTHING

    def durable(self) -> None:
        """See ``Looks``: what is durable when a life is over, the next one must find; it may be
        told a while later by a busy node.
        """
        self._found_durable = self._durable
        if self._look_durable is not None:
            self._durable = max(self._durable, self._look_durable())

    def lose(self, node: str) -> None:
        """A node's memory is lost while a life ends."""
        self._lost_now.add(node)

    def look(self, life: Life) -> bool:
        """See ``Looks``."""
        logs = life.logs
        worlds = self._read(life)
        if not worlds and NOTHING_WHOLE in logs:
            if self._found_durable > _NOTHING:
                self._fail(f"{self._found_durable} is durable, and was not found")
            if len(self.exposed) <= 1 and not (self.exposed and self._lapsed):
                self._fail(
                    f"what was promised was not found: {self._secure}, lost were {sorted(self.exposed)}"
                )
            self._found.lost = True
            return True
        if not worlds and "ElasticError" in logs:
            self._fail("a life was refused")
        for world in worlds:
            self._enter(world)
        self._first_tops(life, worlds)
        self._go_on(worlds)
        self._losses(life)
        if worlds and self._replicates(worlds[-1]):
            self.exposed.clear()  # whatever was lost before is replicated again
            self._lapsed = False
        self._lapsed |= self._lapses_now
        self._lapses_now = False
        self.exposed |= self._lost_now
        self._lost_since_start |= bool(self._lost_now)
        self._lost_now.clear()
        return False

    def _fail(self, text: str) -> None:
        self._found.failures.append(f"life {self._found.lives - 1}, after {self._found.kills[-1:]}: {text}")

    # -- reading ---------------------------------------------------------------------------------

    def _read(self, life: Life) -> list[_World]:
        worlds: dict[int, _World] = {}
        for part in life.parts:
            name = part.folder / f"{part.out}-{part.rank}"
            for told in Tail(name.with_name(f"{name.name}.jsonl")).new():
                if told["event"] == "world":
                    world = worlds.setdefault(
                        told["number"], _World(told["number"], told["start"], told["reason"], part.world_size)
                    )
                    if (world.start, world.reason) != (told["start"], told["reason"]):
                        self._fail(f"ranks are in other worlds: {world}, {told}")
                elif told["event"] == "top":
                    world = worlds[told["world"]]
                    world.floor = max(world.floor, told["floor"])
            for told in Tail(name.with_name(f"{name.name}.tops")).new():
                self._add_top(worlds[told["world"]], part.rank, told["step"], told["of"])
        return [worlds[number] for number in sorted(worlds)]

    def _add_top(self, world: _World, rank: int, step: int, of: dict[str, str]) -> None:
        known = world.tops.setdefault(step, {})
        world.told.setdefault(step, set()).add(rank)
        for name, digest in of.items():
            if known.setdefault(name, digest) != digest:
                self._fail(f"world {world.number}: replicas of {name} differ at step {step}, on rank {rank}")

    # -- what has to be --------------------------------------------------------------------------

    def _enter(self, world: _World) -> None:
        """A world that was planned."""
        self._found.starts.append(world.start)
        if world.number in self._worlds or world.number <= max(self._worlds, default=-1):
            self._fail(f"world {world.number} came after {max(self._worlds)}")
        where = re.search(r"goes on from iteration (\d+) of incarnation (\d+)", world.reason)
        came = (int(where[2]), int(where[1])) if where else (-1, -1)
        if where and came[1] != world.start:
            self._fail(f"it begins at {world.start}: {world.reason}")
        kept = len(self.exposed) <= 1 and not (self.exposed and self._lapsed)
        if came < self._found_durable:
            self._fail(f"it goes on from {came}, though {self._found_durable} is durable: {world.reason}")
        self._found.brought += "brought from storage" in world.reason
        if kept and came < self._secure:
            self._fail(
                f"it goes on from {came}, though {self._secure} was promised (exposed: {sorted(self.exposed)}): {world.reason}"
            )
        if self._newest is not None:
            if not self._lost_since_start and world.start < self._newest.start:
                self._fail(f"nothing was lost, and it goes back from {self._newest.start} to {world.start}")
            self._found.repeated.append(max(0, self._reached - world.start))
        if where and came[0] in self._worlds:
            self._same_bits(world, self._worlds[came[0]])
        elif where:
            self._fail(f"it goes on from a world that nobody knows: {world.reason}")
        self._worlds[world.number] = self._newest = world
        self._lost_since_start = False

    def _same_bits(self, world: _World, before: _World) -> None:
        """Its first top is what the ranks of the world before were there."""
        was, now = before.tops.get(world.start, {}), world.tops.get(world.start, {})
        if not now:
            return  # nobody came to the first step
        wrong = sorted(name for name in was.keys() & now.keys() if was[name] != now[name])
        if wrong:
            self._fail(
                f"world {world.number} begins at {world.start} with other bits than world {before.number} had: {wrong[:_NAMED]} of {len(wrong)}"
            )
        # A rank may have been killed before it told its top. It was not sealed then, unless just so.
        silent = before.ranks - len(before.told.get(world.start, set()))
        if now.keys() - was.keys() and not silent:
            self._fail(
                f"world {world.number} has what nobody had: {sorted(now.keys() - was.keys())[:_NAMED]}"
            )
        self._found.compared += len(was.keys() & now.keys())

    def _first_tops(self, life: Life, worlds: list[_World]) -> None:
        """What ranks were at the first step of a world, against the reference: within summation error."""
        for world in worlds:
            for part in life.parts:
                path = part.folder / f"{part.out}-{part.rank}-{world.start}.pt"
                if part.rank in world.told.get(world.start, set()) and path.exists():
                    self._close(world, torch.load(path, weights_only=False), part.rank)

    def _close(self, world: _World, state: dict[str, Any], rank: int) -> None:
        expected = self._alone.state(0, world.start)
        for name, value in state.items():
            if name == "rng":
                continue
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                fine = torch.allclose(value, expected[name], rtol=_CLOSE, atol=_CLOSE)
            else:
                fine = same(value, expected[name])
            if not fine:
                self._fail(
                    f"world {world.number}, rank {rank}: {name} is not the reference's at step {world.start}"
                )
                return

    def _go_on(self, worlds: list[_World]) -> None:
        for world in worlds:
            steps = sorted(world.tops)
            if steps and steps != list(range(world.start, steps[-1] + 1)):
                self._fail(f"world {world.number} began at {world.start} and did the steps {steps}")
            self._reached = max([self._reached, *steps])
            if self._replicates(world):
                self._secure = max(self._secure, (world.number, world.floor))

    def _replicates(self, world: _World) -> bool:
        """Whether it had a floor, and other nodes to hold it: of one node, the floor is in its own
        ring alone.
        """
        return world.floor >= 0 and world.ranks > self._found.ranks_per_node

    def _losses(self, life: Life) -> None:
        alone = self._alone.losses()
        for rank in range(len(life.parts)):
            for told in life.events("step", rank):
                if abs(told["loss"] - alone[told["step"]]) > _CLOSE * (1 + abs(alone[told["step"]])):
                    self._fail(
                        f"the loss of step {told['step']} is {told['loss']}, and the reference's {alone[told['step']]}"
                    )
                    return
