"""Makes a failing seed of `tests.simulation.swarm` small: without the faults, machines, strikes and time that
its failure does not need.

``python -m tests.simulation.shrinker SEED`` prints what is left, with the trace of the failure.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

from ckptd.core.state_machine import validate_always
from tests.simulation.model import WorldConfig
from tests.simulation.swarm import Strike, Swarm, play_swarm

__all__ = ["Failure", "failure_of", "main", "shrink"]

_TRIES = 400  # plays at most

Play = Callable[[int, WorldConfig], object]


class Struck(Protocol):
    """A world whose faults are drawn before it begins."""

    config: WorldConfig
    faults: set[str]
    fates: list[Strike]

    @property
    def nodes(self) -> Mapping[str, object]: ...


Make = Callable[[int, WorldConfig | None], Struck]


class Failure(str):
    """What a play ended with: the promise that it broke, or the kind of the error; and the rest as notes."""

    notes: str = ""


def failure_of(seed: int, config: WorldConfig, play: Play = play_swarm) -> Failure | None:
    """How the play of a seed fails; None: it does not."""
    try:
        play(seed, config)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is what has to stay
        text = str(error)
        found = Failure(text[:3] if text.startswith("(") else type(error).__name__)
        found.notes = "\n".join([f"{type(error).__name__}: {text}", *getattr(error, "__notes__", ())])
        return found
    return None


def shrink(
    seed: int, config: WorldConfig | None = None, play: Play = play_swarm, make: Make = Swarm
) -> tuple[WorldConfig, Failure]:
    """The least that still fails in the same way, as far as leaving out one thing after another finds it.

    Raises:
        ValueError: the seed does not fail.
    """
    world = make(seed, config)
    small = dataclasses.replace(
        world.config,
        faults=frozenset(world.faults),
        strikes=frozenset(s.number for s in world.fates if s.fault in world.faults),
    )
    failure = failure_of(seed, small, play)
    if failure is None:
        raise ValueError(f"seed {seed} does not fail")
    left, smaller = _TRIES, True
    while smaller and left > 0:
        smaller = False
        for candidate in _smaller(world, small):
            left -= 1
            again = failure_of(seed, candidate, play)
            if again == failure:
                small, failure, smaller = candidate, again, True
                break
            if left <= 0:
                break
    return small, failure


def _smaller(world: Struck, config: WorldConfig) -> Iterator[WorldConfig]:
    """Each without one thing more: first what takes much away."""
    faults, strikes = config.faults or frozenset(), config.strikes or frozenset()
    times = {strike.number: strike.at_s for strike in world.fates}
    kinds = {strike.number: strike.fault for strike in world.fates}
    ordered = sorted(strikes)
    for half in (ordered[: len(ordered) // 2], ordered[len(ordered) // 2 :]):
        if len(ordered) > 1:
            yield dataclasses.replace(config, strikes=strikes - set(half))
    for fault in sorted(faults):
        left = frozenset(number for number in strikes if kinds[number] != fault)
        yield dataclasses.replace(config, faults=faults - {fault}, strikes=left)
    for number in ordered:
        yield dataclasses.replace(config, strikes=strikes - {number})
    if config.most_nodes > 2:
        fewer = min(config.most_nodes, len(world.nodes)) - 1
        yield dataclasses.replace(config, most_nodes=fewer)
    last_s = max((times[number] for number in strikes), default=0.0)
    for chaos_s in (last_s + 0.5, (last_s + config.chaos_s) / 2):
        if chaos_s < config.chaos_s - 0.5:
            yield dataclasses.replace(config, chaos_s=chaos_s)


def described(seed: int, config: WorldConfig, play: str = "play_swarm") -> str:
    """How to play it again."""
    faults, strikes = sorted(config.faults or ()), sorted(config.strikes or ())
    return (
        f"{play}({seed}, WorldConfig(faults=frozenset({faults}), strikes=frozenset({strikes}), "
        f"most_nodes={config.most_nodes}, chaos_s={config.chaos_s:.1f}))"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Shrink one seed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("seed", type=int)
    options = parser.parse_args(arguments)
    validate_always()
    small, failure = shrink(options.seed)
    sys.stdout.write(f"{failure.notes}\n{described(options.seed, small)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
