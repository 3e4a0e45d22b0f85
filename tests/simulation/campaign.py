"""Many schedules: each seed is played by `tests.simulation.swarm`, one in five by
`tests.simulation.replication_world`, too, one in twenty in each row, and the splits, of
`tests.simulation.special_worlds`, one in four with a store (`tests.simulation.storage_world`), and each as a
pipeline (`tests.simulation.parking_world`) and as a job that changes its schedule (`tests.simulation.switching_world`).

``python -m tests.simulation.campaign --schedules 10000 --seed 0 [--minutes 60] [--out FILE]`` prints a line per
thousand, and at the end which fault met which phase of the job, and what the oracle waived, by reason. A seed
that breaks a promise is printed with its trace, made small (`tests.simulation.shrinker`), and the rest is still
played. ``--schedules 1 --seed N`` replays seed N exactly. ``--mutations`` breaks one rule after another
(``mutations``, ``storage_mutations`` and ``parking_mutations`` here) and tells after how many seeds each is caught.
"""

from __future__ import annotations

import argparse
import gc
import logging
import sys
import time
import traceback
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

from ckptd.core.state_machine import validate_always
from tests.simulation import storage_world
from tests.simulation.mutations import LIMIT, MUTATIONS, caught_after
from tests.simulation.parking_mutations import PARKING_MUTATIONS
from tests.simulation.parking_world import play_parking
from tests.simulation.replication_world import play
from tests.simulation.shrinker import described, shrink
from tests.simulation.special_worlds import LOSSES, play_row, play_split
from tests.simulation.storage_mutations import STORAGE_MUTATIONS
from tests.simulation.storage_world import StorageWorld, play_storage
from tests.simulation.swarm import CONDITIONS, PHASES, STRIKES, coverage_key, play_swarm
from tests.simulation.switching_world import play as play_switching

__all__ = ["coverage_table", "main", "waivers"]


_WORLD_SHARE = 5
_STORE_SHARE = 4
_ROWS_SHARE = 20
_STORE = "storage: "
_PRICE = ("losses asked", "skipped", "snapshots")


class _Shown(NamedTuple):
    seed: int
    plays: int
    cpu_s: float
    seen: Counter[str]
    failure: str  # "": none


def _prepare() -> None:
    """What is the same for all seeds of a process, and what would only cost time."""
    validate_always()
    logging.disable()  # the oracle reads what is told; a terminal need not
    # Worlds are full of cycles, but small. What was imported is large, and need not be looked through for them.
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 50, 1000)


def _played(seed: int) -> _Shown:
    """The seed in each of its worlds, what that showed, and how it failed."""
    seen: Counter[str] = Counter()
    begun_s, plays = time.process_time(), 0
    try:
        for found in _worlds(seed):
            plays += 1
            seen.update(found)
    except Exception:  # noqa: BLE001 - whatever went wrong belongs to this seed, and is printed with it
        return _Shown(seed, plays + 1, time.process_time() - begun_s, seen, traceback.format_exc())
    return _Shown(seed, plays, time.process_time() - begun_s, seen, "")


def _worlds(seed: int) -> Iterator[Mapping[str, int]]:
    yield play_swarm(seed).seen
    if seed % _WORLD_SHARE == 0:
        yield play(seed // _WORLD_SHARE).seen
    if seed % _ROWS_SHARE == 0:
        yield play_split(seed // _ROWS_SHARE).seen
        for row, replicas in LOSSES:
            told = play_row(seed // _ROWS_SHARE, row, replicas=replicas).seen
            yield {f"{row}, {replicas} replicas: {what}": told[what] for what in _PRICE}
    yield {f"pipeline: {what}": count for what, count in play_parking(seed).seen.items()}
    yield {f"switching: {what}": count for what, count in play_switching(seed).seen.items()}
    if seed % _STORE_SHARE == 0:
        told = play_storage(seed // _STORE_SHARE).seen
        yield {f"{_STORE}{what}": count for what, count in told.items()}


def coverage_table(
    seen: Mapping[str, int],
    faults: Collection[str] = (*STRIKES, *CONDITIONS),
    phases: Collection[str] = PHASES,
    world: str = "",
) -> str:
    """How often each fault met each phase."""
    lines = [f"{'fault':<24}" + "".join(f"{phase:>11}" for phase in phases)]
    for fault in faults:
        counts = [seen.get(world + coverage_key(fault, phase), 0) for phase in phases]
        lines.append(f"{fault:<24}" + "".join(f"{count:>11}" for count in counts))
    met = sum(seen.get(world + coverage_key(f, p), 0) > 0 for f in faults for p in phases)
    return "\n".join([*lines, f"{met} of {len(faults) * len(phases)} (fault, phase) were met"])


def waivers(seen: Mapping[str, int]) -> str:
    """What the oracle asked, and what it waived, by reason."""
    asked = f"{seen.get('losses asked', 0)} losses of one machine asked"
    waived = [f"{seen[what]} {what}" for what in sorted(seen) if what.startswith("waived")]
    return "; ".join([asked, *waived, f"{seen.get('drawn away', 0)} drawn to another history"])


def _small(seed: int) -> str:
    """The least of a seed that fails in the same way; "" if another of its worlds failed."""
    try:
        config, failure = shrink(seed)
        return f"{failure.notes}\nseed {seed} made small: {described(seed, config)}\n"
    except ValueError:
        seed //= _STORE_SHARE
    try:
        config, failure = shrink(seed, play=play_storage, make=StorageWorld)
    except ValueError:
        return ""
    return f"{failure.notes}\nmade small: {described(seed, config, 'play_storage')}\n"


def _tell(text: str, out: Path | None) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
    if out is not None:
        with out.open("a", encoding="utf-8") as file:
            file.write(text + "\n")


_ALL_MUTATIONS = MUTATIONS | STORAGE_MUTATIONS | PARKING_MUTATIONS


def _caught(task: tuple[str, int]) -> tuple[str, int, str]:
    name, first = task
    return name, *caught_after(_ALL_MUTATIONS[name], first=first)


def _break_rules(first: int, processes: int, out: Path | None) -> int:
    """Every mutation, one after another; 1 if one is not caught."""
    missed = []
    with get_context("spawn").Pool(processes, _prepare) as pool:
        for name, seeds, why in pool.imap(_caught, [(name, first) for name in _ALL_MUTATIONS]):
            told = f"after {seeds} seeds: {why}" if seeds > 0 else f"not caught in {LIMIT} seeds"
            _tell(f"{name} ({_ALL_MUTATIONS[name].rule}): {told}", out)
            missed += [name] if seeds < 0 else []
    _tell(f"{len(_ALL_MUTATIONS) - len(missed)} of {len(_ALL_MUTATIONS)} broken rules were caught", out)
    return 1 if missed else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Play them; 1 if a promise was broken."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schedules", type=int, default=10_000, help="the number of seeds")
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop after that long")
    parser.add_argument("--mutations", action="store_true", help="break one rule after another instead")
    parser.add_argument("--out", type=Path, help="a file to which all that is printed is added")
    options = parser.parse_args(arguments)
    if options.mutations:
        return _break_rules(options.seed, options.processes, options.out)
    seeds = range(options.seed, options.seed + options.schedules)
    validate_always()
    seen: Counter[str] = Counter()
    broken: list[int] = []
    plays, cpu_s, until_s = 0, 0.0, time.monotonic() + 60.0 * options.minutes
    with get_context("spawn").Pool(options.processes, _prepare) as pool:
        for number, shown in enumerate(pool.imap(_played, seeds, 8), start=1):
            plays, cpu_s = plays + shown.plays, cpu_s + shown.cpu_s
            seen.update(shown.seen)
            if shown.failure:
                broken.append(shown.seed)
                _tell(f"{shown.failure}\nseed {shown.seed} breaks a promise", options.out)
                _tell(_small(shown.seed), options.out)  # here: the pool has its next seeds already
            late = time.monotonic() > until_s
            if number % 1000 == 0 or number == len(seeds) or late:
                rate = plays / cpu_s if cpu_s else 0.0
                text = f"{number} seeds, {plays} schedules, {rate:.1f} per CPU second, {len(broken)} broken"
                _tell(f"{text}; seed {shown.seed}", options.out)
            if late:
                break
    counts = ", ".join(f"{n} {what}" for what, n in sorted(seen.items()) if " x " not in what)
    stored = coverage_table(seen, storage_world.STRIKES, storage_world.PHASES, _STORE)
    _tell(f"{counts}\n\n{coverage_table(seen)}\n{waivers(seen)}\n\n{stored}", options.out)
    if broken:
        _tell(f"{len(broken)} seeds break a promise: {broken}", options.out)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
