"""Seeded kills of ranks, daemons and whole nodes of elastic jobs, most of all while a world starts.

``python -m tests.e2e.elastic_campaign --kills 60 --seed 7`` prints progress and a table, and fails
if a world begins with other bits than the ranks before had there, if replicas differ, if a step is
left out, if a state that was promised is not found, or if anything hangs.

A *round* is one run on two to four nodes, each with a daemon of its own. Life after life is hurt at
a moment drawn by lot; the others are told to end, as torchrun does, and sometimes another is killed
meanwhile. Lost nodes come back empty, at once or later; killed ones with their memory. Drawn by lot
are also the experts' optimizer on shards, and a store that all nodes share: then all of them are
lost at times, with all memory, and what was durable before must be found.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from ckptd.core.elastic.rebalance_policy import TimesConfig
from tests.ckptd.nodes import Net
from tests.e2e.campaigns import play
from tests.e2e.elastic import ElasticRun, Life
from tests.e2e.elastic_job import EXPERTS
from tests.e2e.elastic_judge import Judge
from tests.e2e.elastic_kills import Kill, Killer, Moment, Round, Target
from tests.e2e.world_store import WorldStore

__all__ = ["Moment", "Target", "campaign", "run_round", "table"]

TOTAL = 60
_STEP_MS = 30.0
_PHASE_MS = 150.0


class References:
    """One rank with all experts and the whole batch, without ckptd: what it was at every top; once
    each with and without shards.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: dict[bool, Life] = {}

    def of(self, sharded: bool) -> Life:
        if sharded not in self._known:
            folder = self._folder / f"alone-{sharded}"
            folder.mkdir()
            run = ElasticRun(folder, total=TOTAL, slots=EXPERTS, sharded=sharded, joined=sharded)
            self._known[sharded] = run.life([None], keep=frozenset(range(TOTAL + 1)))
            self._known[sharded].ends()
        return self._known[sharded]


def run_round(seed: int, kills: int, folder: Path, ends: References) -> Round:
    """Hurt one run up to ``kills`` times, let it end, and look at every life of it."""
    rng = random.Random(f"elastic {seed}")
    nodes = rng.choice((2, 3, 3, 4))
    found = Round(seed, nodes, rng.choice((1, 1, 2)) if nodes == 2 else 1)
    least = 1 if nodes == 2 else 2
    slots = EXPERTS // least // found.ranks_per_node
    eager = TimesConfig(threshold=1, every_steps=15, check_steps=15, margin=0.0)
    options = {"when": eager} if rng.random() < 0.25 else {}
    threshold = rng.choice((1, 2))
    found.sharded, found.stored = rng.random() < 0.5, rng.random() < 0.5
    folder.mkdir()
    run = ElasticRun(
        folder,
        total=TOTAL,
        slots=slots,
        threshold=threshold,
        step_ms=_STEP_MS,
        watched=True,
        phase_ms=_PHASE_MS,
        sharded=found.sharded,
        joined=found.sharded,
        place_every=rng.choice((0, 7)) if found.sharded else 0,
        options=options,
    )
    store = WorldStore.folder(folder / "store") if found.stored else None
    settings = {} if store is None else store.settings
    with Net(nodes, replicas="1", **settings).up() as net:
        durable = None if store is None else partial(store.newest, run.run)
        judge = Judge(found, ends.of(found.sharded), TOTAL, durable)
        try:
            Killer(found, net, run, judge, rng, least=least).play(kills)
        except AssertionError as error:  # something hung, or ended as it should not
            found.failures.append(str(error))
        finally:
            run.close()
            if found.failures:
                found.failures.append(run.logs)
    return found


def campaign(
    kills: int, seed: int, folder: Path, say: Callable[[str], object], *, per_round: int = 5
) -> list[Round]:
    """Rounds until at least ``kills`` kills were made."""
    rounds: list[Round] = []
    done = 0
    ends = References(folder)
    while done < kills:
        number = seed + len(rounds)
        found = run_round(number, min(per_round, kills - done), folder / f"round-{number}", ends)
        rounds.append(found)
        done += max(1, len(found.kills))
        outcome = "as it has to be" if not found.failures else f"FAILED: {found.failures[0]}"
        lost = ", lost more than was replicated" if found.lost else ""
        say(
            f"[{done}/{kills}] seed {number}: {found.nodes} nodes{_drawn(found)}, {len(found.kills)} kills, worlds began at {found.starts}{lost}, {outcome}\n"
        )
    return rounds


def _drawn(found: Round) -> str:
    return ", shards" * found.sharded + ", storage" * found.stored


def table(rounds: Sequence[Round]) -> str:
    """Kills by moment and target, and the failures."""
    kills: list[Kill] = [kill for found in rounds for kill in found.kills]
    counts = Counter((kill.moment, kill.target) for kill in kills)
    lines = [f"{'killed while':36}" + "".join(f"{target:>9}" for target in Target)]
    lines += [
        f"{moment:36}" + "".join(f"{counts[moment, target]:9}" for target in Target) for moment in Moment
    ]
    failed = [found for found in rounds if found.failures]
    repeated = [n for found in rounds for n in found.repeated]
    lines.append(
        f"{len(kills)} kills in {len(rounds)} runs, {sum(f.lives for f in rounds)} lives, {sum(len(f.starts) for f in rounds)} worlds; "
        f"{sum(f.refused_starts for f in rounds)} starts refused for want of a daemon; "
        f"{sum(f.sharded for f in rounds)} runs with shards, {sum(f.stored for f in rounds)} with storage, from which {sum(f.brought for f in rounds)} worlds began; "
        f"{sum(f.lost for f in rounds)} runs lost more nodes than they had replicas; "
        f"{sum(f.compared for f in rounds)} tensors compared; steps done again: {sum(repeated)}, at most {max(repeated, default=0)}; "
        f"{len(failed)} failed runs"
    )
    lines += [f"FAILED seed {f.seed}: {text}" for f in failed for text in f.failures]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a campaign; 1 if anything was not as it has to be."""
    return play("tests.e2e.elastic_campaign", campaign, table, argv, kills=60)


if __name__ == "__main__":
    raise SystemExit(main())
