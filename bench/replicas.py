"""What the daemons' comparison of replicas costs for each snapshot.

The training thread does nothing for it. The daemon of a node reads the digests of each rank's image behind
its seal (``digests``, on a worker), and the daemon that compares decodes and notes those of all ranks
(``compared``, on its loop thread; here of a group whose other ranks are on other nodes). Times are processor
time, since other programs disturb it least. ``audit_overhead_fraction`` is their sum for one rank, as a
fraction of an iteration of ``--iteration-s`` of one core, for the most tensors.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import msgspec

from bench.common import emit, median, parser
from ckptd.core.replication.replica_comparison import Equal, RankDigests, ReplicaComparison
from ckptd.core.slots.segment_format import ReplicaGroup, SegmentDescriptor
from ckptd.memory.replicated_digests import ReplicatedSets, replicated_digests
from ckptd.storage.image import ImageLayout, seal
from ckptd.storage.image_format import TensorEntry
from ckptd.transport.peer_messages import TellDigests, decode_peer, encode_peer

__all__ = ["main", "measure"]

ITERATIONS = 20


def cpu_ms(work: Callable[[], object]) -> float:
    """Processor time of one call in this thread."""
    begun = time.thread_time()
    work()
    return 1e3 * (time.thread_time() - begun)


def measure(num_tensors: int, num_ranks: int) -> tuple[float, float, int]:
    """Milliseconds to read the digests of one image and to compare those of all ranks; bytes of a rank."""
    params = tuple(f"layers.{i // 12}.block.{i % 12}.weight" for i in range(num_tensors // 3))
    names = [name for p in params for name in (p, f"optim/exp_avg/{p}", f"optim/exp_avg_sq/{p}")]
    layout = ImageLayout.build(
        [TensorEntry(name, "F32", (16,)) for name in names], identity={"job": "b"}, num_operators=1, anchors=1
    )
    image = memoryview(bytearray(layout.image_len))
    layout.write_header(image, iteration=1, previous=0, scalars_len=0)
    seal(image)
    ranks = tuple(range(num_ranks))
    told = SegmentDescriptor(
        job="b",
        run="b",
        rank=0,
        world_size=num_ranks,
        topology="",
        layout_version=1,
        generation=0,
        node_id="",
        created_at_ns=0,
        window=1,
        num_operators=1,
        replica_groups=(ReplicaGroup(ranks, params),),
    )
    known: ReplicatedSets = {}
    (found,) = replicated_digests(told, image, known)  # what is known of a layout is found once
    digests_ms = median([cpu_ms(lambda: replicated_digests(told, image, known)) for _ in range(ITERATIONS)])
    comparison = ReplicaComparison()
    comparison.name(found.of.number, found.of.names, found.of.dtypes)

    def compare(iteration: int) -> None:
        results = []
        for rank in ranks:
            wire = TellDigests("b", "b", rank, "g", num_ranks, 0, iteration, found.of.number, found.digests)
            heard = decode_peer(encode_peer(wire))
            assert isinstance(heard, TellDigests)
            fields = msgspec.structs.astuple(heard)
            results += comparison.note(RankDigests(heard.rank, *fields[4:]))
        assert [type(each) for each in results] == [Equal]

    compared_ms = median([cpu_ms(partial(compare, iteration)) for iteration in range(ITERATIONS)])
    return digests_ms, compared_ms, len(found.digests)


def main() -> None:
    """Measure, and print the numbers."""
    options = parser(__doc__)
    options.add_argument("--tensors", type=int, nargs="*", default=[300, 2_000, 6_000])
    options.add_argument("--ranks", type=int, default=8, help="of one group")
    options.add_argument("--iteration-s", type=float, default=1.0)
    args = options.parse_args()
    metrics: dict[str, float | int | str] = {"ranks": args.ranks, "iteration_s": args.iteration_s}
    for num_tensors in args.tensors:
        rounds = [measure(num_tensors, args.ranks) for _ in range(args.rounds)]
        digests_ms, compared_ms = (median([each[i] for each in rounds]) for i in (0, 1))
        fraction = (digests_ms + compared_ms / args.ranks) / 1e3 / args.iteration_s
        metrics |= {
            f"digests_ms_{num_tensors}": digests_ms,
            f"compared_ms_{num_tensors}": compared_ms,
            f"sent_bytes_{num_tensors}": rounds[0][2],
            f"fraction_{num_tensors}": fraction,
            "audit_overhead_fraction": fraction,
        }
    emit("replicas", metrics, as_json=args.json)


if __name__ == "__main__":
    main()
