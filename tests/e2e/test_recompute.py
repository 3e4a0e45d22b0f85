"""Peers compute snapshots from gradients: a node is lost with its memory, and its rank goes on from what a
peer has computed, at the exact bits (docs/recompute.md).
"""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest

from ckptd.core.slots.slots import SlotState
from ckptd.memory.segment_file import open_segment
from tests.ckptd.nodes import Net, Node
from tests.ckptd.running import eventually
from tests.e2e.compare import differences
from tests.e2e.harness import Jobs
from tests.e2e.ranks import Ranks
from tests.long import long

FIRST, SECOND, TOTAL = 100, 250, 255  # the first two are killed before; a slow machine offers late
ENOUGH = 6  # snapshots that a peer has computed
_GRADIENTS = ("--set", 'policy="dense"', "--set", "window=null", "--set", 'to_peers="gradients"')
_OPTIONS = (*_GRADIENTS, "--set", "replicas=1")


def newest_of(node: Node, rank: int) -> tuple[int, int]:
    """The newest snapshot in the replica of a rank, and the bytes of its image."""
    found = (-1, 0)
    for path in node.replicas(rank):
        segment = open_segment(path, readonly=True)
        sealed = [(h.iteration, h.image_len) for _, h in segment.headers() if h.state is SlotState.SEALED]
        found = max([found, *sealed])
        segment.close()
    return found


class Lives:
    """Two ranks, each on a node of its own, whose last step waits until the test has seen enough."""

    def __init__(self, jobs: Jobs, case: str) -> None:
        self.jobs, self.case, self.run = jobs, case, uuid.uuid4().hex[:8]
        self.hold = jobs.folder / "hold"
        self.hold.touch()

    def begin(self, total: int, *nodes: Node) -> Ranks:
        each = {rank: ("--daemon", node.endpoint) for rank, node in enumerate(nodes)}
        return Ranks(
            self.jobs,
            self.run,
            *(*_OPTIONS, "--seed", str(total), "--hold", str(self.hold)),
            *("--step-ms", "100" if self.hold.exists() else "0"),
            case=self.case,
            total=total,
            each=each,
        )

    def undisturbed(self) -> list[Path]:
        return Ranks(
            self.jobs, self.run, "--seed", str(FIRST), case=self.case, total=TOTAL, daemon="none"
        ).end()


def count(node: Node, name: str) -> int:
    return node.counters().get(name, 0)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["plain", pytest.param("sgd", marks=long)])
def test_a_rank_goes_on_from_what_a_peer_has_computed(jobs: Jobs, case: str) -> None:
    """The first life, and the gap behind it, go whole: a process must start, then a recovery comes between.
    In the second one the node of rank 1 is lost, whose snapshots its peer has computed for a while.
    """
    lives = Lives(jobs, case)
    references = lives.undisturbed()
    with Net(3, peer_deadline_s="5").up() as net:
        kept, lost, spare = net.nodes
        first = lives.begin(FIRST, kept, lost)
        eventually(
            lambda: all(n.saw("recompute_started") for n in (kept, lost)),
            lambda: "\n".join(
                [first.logs, *(f"-- log of {node.name}\n{node.log_text()}" for node in net.nodes)]
            ),
            timeout_s=120,
        )
        first.kill()
        assert kept.saw("gradients_declined", "its process for this is starting")
        second = lives.begin(SECOND, kept, lost)
        eventually(lambda: count(kept, "replica.recomputed") >= ENOUGH, "computed snapshots", timeout_s=120)
        second.kill()
        assert count(kept, "replica.not_recomputed") == 0, kept.log_text()
        _, image_len = newest_of(kept, 1)
        puts, put_bytes = count(lost, "gradient_puts"), count(lost, "gradient_put_bytes")
        assert puts >= ENOUGH - 1  # the answer to the last one may not have arrived
        assert count(lost, "replicated_bytes") >= put_bytes
        if case == "plain":  # the weight, two moments and one gradient, all float32
            assert 3 * put_bytes <= puts * image_len, f"{put_bytes / puts} of {image_len}"
        lost.lose()
        newest, _ = newest_of(kept, 1)  # one more may be computed at this moment
        lives.hold.unlink()
        third = lives.begin(TOTAL, kept, spare)
        for reference, out in zip(references, third.end(), strict=True):
            assert newest - 2 <= jobs.report(out)["resumed_from"] <= newest + 1, third.logs
            assert differences(reference, out) == []
