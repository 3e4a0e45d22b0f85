"""Rules of the product, each broken by itself: the simulation must notice every one of them.

A mutation that no seed of its world notices is a rule that nothing shows to be needed, or a hole in the
simulation. `caught_after` plays seeds until one breaks a promise.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

from ckptd.core.recovery.held import History, history_of
from ckptd.core.replication import floor, replicas
from ckptd.core.replication.copies import NO_INTERVAL, Copies, Interval
from ckptd.core.replication.floor import FloorMessage, FloorTree
from ckptd.core.replication.replicas import Promise
from ckptd.core.replication.replicator import Replicator
from ckptd.core.slots import ring
from tests.simulation import checks, hosts, recovering, training
from tests.simulation.model import Content, WorldConfig, digest_of
from tests.simulation.replication_world import World
from tests.simulation.special_worlds import play_fall_back, play_own_copies, play_row, play_split
from tests.simulation.swarm import Swarm, play_swarm

__all__ = ["LIMIT", "MUTATIONS", "QUICK", "Mutation", "caught_after"]

LIMIT = 2000
"""Seeds within which every mutation is to be caught."""

Play = Callable[[int, WorldConfig], object]
_ALL_PROMISED = Promise(1 << 40, 1 << 40)


class Mutation(NamedTuple):
    """One broken rule: how to break it, and the world in which it is to be missed."""

    rule: str
    patches: tuple[tuple[Any, str, Any], ...] = ()
    config: WorldConfig = WorldConfig()
    play: Play = play_swarm

    @contextmanager
    def broken(self) -> Iterator[None]:
        """The rule does not hold meanwhile."""
        with ExitStack() as stack:
            for owner, name, value in self.patches:
                stack.enter_context(patch.object(owner, name, value))
            yield


def caught_after(mutation: Mutation, limit: int = LIMIT, first: int = 0) -> tuple[int, str]:
    """How many seeds it takes, and what is broken then; -1: it is not caught."""
    with mutation.broken():
        for number, seed in enumerate(range(first, first + limit), start=1):
            try:
                mutation.play(seed, mutation.config)
            except Exception as error:  # noqa: BLE001 - an assertion of the product catches it, too
                return number, f"{type(error).__name__}: {error}"[:160]
    return -1, ""


def _with(function: Callable[..., Any], **fixed: object) -> Callable[..., Any]:
    """The function, which gets these arguments whatever the caller says."""

    @functools.wraps(function)
    def careless(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **{**kwargs, **fixed})

    return careless


def _any_bits(content: Content) -> bytes:
    return digest_of(content[1:] if content[:1] == ("flipped",) else content)


def _history_without_others(*args: Any, **kwargs: Any) -> History:
    return History(frozenset(), history_of(*args, **kwargs).begun)


def _settle_early(self: FloorTree) -> list[FloorMessage]:
    """Before every child has reported."""
    for child in self.children:
        self._reports.setdefault(child, (-1, floor._Standing(floor.NO_RANKS, -1, 1)))
    return _settle(self)


_settle = FloorTree._settle


def _settle_over_gaps(self: FloorTree) -> list[FloorMessage]:
    """The smallest last, also where it is before the largest first."""
    standing = self._standing()
    if standing is None or self.parent is not None:
        return _settle(self)
    counts = standing.below != floor.NO_RANKS
    below = standing.below if counts else self.floor
    return self._raise_floor(max(below, standing.carried.floor), standing.above, standing.span)


def _promises_what_the_target_has(self: Replicator) -> Interval:
    return self.replicated


def _promises_what_two_targets_have(self: Replicator) -> Interval:
    return self.replicated if len(self._counted()) > 1 else _promisable(self)


_promisable = Replicator._promisable


def _promises_while_one_is_away(self: Replicator) -> Interval:
    if self._agreed is None:
        return self.replicated
    return self._copies.in_aim([target.copies for target in self._counted()])


def _promises_what_the_best_has(self: Replicator) -> Interval:
    """The best target's ends, not those of all."""
    counted = self._counted()
    if self._agreed is None or len(counted) < 2:
        return _promisable(self)
    best = max(counted, key=lambda target: target.copies.run.last)
    return self._copies.in_aim([best.copies])


def _new_aim_each_time(self: Copies, *args: Any, **kwargs: Any) -> None:
    self.aim = NO_INTERVAL
    _take_aim(self, *args, **kwargs)


_take_aim = Copies.take_aim


def _no_restart(self: World, name: str, peer: str) -> None:
    return None


def _by_clock(world: Swarm) -> Callable[[int, int], int]:
    return lambda highest, drawn: int(world.clock(world.homes[0]) * 100) << 12 | drawn


def _play_with_epochs_by_clock(seed: int, config: WorldConfig) -> None:
    world = Swarm(seed, config)
    with patch.object(recovering, "epoch_after", _by_clock(world)):
        world.play()


def _play_with_boots_by_clock(seed: int, config: WorldConfig) -> None:
    """The newer of two boots is the one that began later by its own clock, which starts with the machine."""
    world = Swarm(seed, config)
    started: dict[int, float] = {}
    look = world.look

    def look_at_clocks(a: str, b: str) -> None:
        boot, daemon = world.boot_of(a, b), world.nodes[a].daemon
        if boot != -1 and daemon is not None:
            started.setdefault(boot, world.clock(b) - world.rng.choice((0.0, 50.0)))
            known = daemon.peers.get(b, boot)
            if started[boot] < started.get(known, started[boot]):
                return
        look(a, b)

    with patch.object(world, "look", look_at_clocks):
        world.play()


def _row(row: str, replicas: int = 1) -> Play:
    return lambda seed, config: play_row(seed, row, config, replicas=replicas)


MUTATIONS: dict[str, Mutation] = {
    "host knows no promise": Mutation(
        "a host gives no slot away that the floor needs",
        ((hosts, "admit", _with(replicas.admit, promise=_ALL_PROMISED)),),
    ),
    "host forgets the span": Mutation(
        "a host keeps suffixes as long as the longest of all ranks",
        ((hosts, "admit", _with(replicas.admit, span=1)),),
    ),
    "host removes what is promised": Mutation(
        "a replica goes only if no promise needs it",
        ((hosts, "removable", lambda group, *_, **__: [(name, "whatever") for name in group]),),
    ),
    "host seals without a digest": Mutation(
        "a host verifies an image before it seals it", ((hosts, "digest_of", _any_bits),)
    ),
    "slot is reused while it is read": Mutation(
        "a trainer does not fill a slot that a reader holds",
        ((training, "choose_slot", _with(ring.choose_slot, busy=())),),
    ),
    "ring gives away what is promised": Mutation(
        "a ring leaves a snapshot out rather than give away what is promised",
        ((training, "choose_slot", _with(ring.choose_slot, protected=())),),
        play=_row("slow"),
    ),
    "ring keeps only the newest": Mutation(
        "a generation goes only if no promise needs it",
        ((training, "droppable_generations", _with(ring.droppable_generations, protected=())),),
    ),
    "floor is the best target's": Mutation(
        "a rank promises what all its targets hold",
        ((Replicator, "_promisable", _promises_what_the_best_has),),
    ),
    "rank promises without its ring": Mutation(
        "the ring must hold the suffix, too",
        ((Replicator, "_promisable", _promises_what_the_target_has),),
    ),
    "rank promises while a target is away": Mutation(
        "a rank vouches for nothing while its only target is away",
        ((Replicator, "_promisable", _promises_while_one_is_away),),
    ),
    "aim is given up": Mutation(
        "an aim stands until the floor has reached it",
        ((Copies, "take_aim", _new_aim_each_time),),
        play=play_own_copies,
    ),
    "floor before all have reported": Mutation(
        "no floor before every child has reported", ((FloorTree, "_settle", _settle_early),)
    ),
    "floor in a gap": Mutation(
        "no floor before the largest first", ((FloorTree, "_settle", _settle_over_gaps),)
    ),
    "restart of a child is missed": Mutation(
        "the reports of a new boot are numbered anew", ((World, "peer_restarted", _no_restart),)
    ),
    "epochs by lot": Mutation(
        "an epoch has a higher number than all that are known",
        ((recovering, "epoch_after", lambda highest, drawn: drawn),),
    ),
    "epochs by the clock": Mutation(
        "no clock decides which history is the newer one",
        play=_play_with_epochs_by_clock,
    ),
    "boots by the clock": Mutation(
        "no clock decides which boot of a daemon is the newer one", play=_play_with_boots_by_clock
    ),
    "histories are mixed": Mutation(
        "nothing of another history counts",
        ((checks, "history_of", _history_without_others),),
        play=play_split,
    ),
    "floor is not carried": Mutation(
        "a new epoch, and a restarted root, know the floor of before",
        config=WorldConfig(carries=False),
        play=_row("away"),
    ),
    "two other nodes are enough": Mutation(
        "the ring must hold the suffix also where two targets do",
        ((Replicator, "_promisable", _promises_what_two_targets_have),),
        play=_row("slow", replicas=2),
    ),
    "a missing target is forgotten": Mutation(
        "the floor waits for a target that is away", config=WorldConfig(withholds=False), play=_row("cut")
    ),
    "slots are not read anew": Mutation(
        "a daemon reads the slots after it has written the hints",
        config=WorldConfig(reads_anew=False),
        play=play_own_copies,
    ),
    "tip is given away": Mutation(
        "what a recovery went back to stays until there is a floor",
        config=WorldConfig(keeps_tip=False),
        play=play_fall_back,
    ),
    "short counts are believed": Mutation(
        "what was counted with a shorter span does not count",
        config=WorldConfig(counts_span=False),
        play=play_own_copies,
    ),
}

QUICK = ("host knows no promise", "floor before all have reported", "host seals without a digest")
"""Those that few seeds catch, for every run of the tests."""
