"""Exports of runs whose ranks share what they have in common: each image holds a share, and the
model is whole again.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ckptd.core.export_plan import DamagedSnapshot, ExportError
from ckptd.export.exports import ExportReport, export_file
from ckptd.export.memory_source import open_slot
from ckptd.export.store_source import open_stored
from ckptd.memory.segment_file import Segment
from ckptd.storage.checkpoints.manifest import RankManifest
from ckptd.storage.checkpoints.signing import ManifestSigner, create_signer
from ckptd.storage.stores.objects import ObjectStore, Range
from ckptd.storage.stores.open_store import open_store
from tests.ckptd.export.samples import (
    DENSE,
    as_replica,
    export,
    segment_folder,
    snapshot,
    stored_window,
)
from tests.ckptd.export.shared import Op, client_payload, rank_tensors
from tests.ckptd.forging import forge, plant

WORLD, WINDOW, AT = 3, 3, 30
State = dict[str, torch.Tensor]

# Under data parallelism: whole parameters, experts fused in one parameter, and experts that each
# rank has for itself.
OPERATORS = [
    Op("embed", None, 0),
    Op("gate", None, 1),
    Op("experts", (0, 2), 2),
    Op("experts", (2, 3), 0),
    Op("experts", (3, 6), 1),
    Op("own", None, -1),
]


def state_of(rank: int, at: int) -> State:
    """What a rank has at an iteration: all but its own experts and its buffers as the others have it."""
    torch.manual_seed(1000 + at)
    state = {
        "embed": torch.randn(70, 5),
        "gate": torch.randn(7),
        "experts": torch.randn(6, 30, 4),
        "optim/exp_avg/experts": torch.randn(6, 30, 4),
        "optim/exp_avg/gate": torch.randn(7),
    }
    torch.manual_seed(at * WORLD + rank)
    return state | {"own": torch.randn(20, 3), "buffer/seen": torch.tensor(10 * at + rank)}


def expected(rank: int, at: int, dtype: torch.dtype = torch.float32) -> State:
    state = {n: t for n, t in state_of(rank, at).items() if not n.startswith("optim/")}
    seen = state.pop("buffer/seen")
    return {n: t.to(dtype) for n, t in state.items()} | {"seen": seen}


def check(path: Path, wanted: State) -> None:
    loaded = load_file(path)
    assert loaded.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert loaded[name].dtype == tensor.dtype
        assert torch.equal(loaded[name], tensor), name


def anchored_at(at: int, index: int) -> bool:
    return index % WINDOW == at % WINDOW


# -- out of memory -------------------------------------------------------------------------------


@pytest.fixture
def folder() -> Iterator[Path]:
    with segment_folder() as path:
        yield path


@pytest.fixture
def elsewhere() -> Iterator[Path]:
    with segment_folder() as path:
        yield path


def dense(folder: Path, rank: int, at: int = AT, epoch: int = 0) -> Segment:
    tensors = rank_tensors(rank, OPERATORS, state_of(rank, at))
    told = client_payload(OPERATORS)
    return snapshot(folder, at, tensors, rank, anchors=DENSE, client=told, epoch=epoch)


def sparse(folder: Path, rank: int, at: int) -> Segment:
    tensors = rank_tensors(rank, OPERATORS, state_of(rank, at), lambda i: anchored_at(at, i), torch.bfloat16)
    return snapshot(folder, at, tensors, rank, client=client_payload(OPERATORS))


def flip(segment: Segment) -> None:
    header = segment.header(0)
    assert header is not None
    segment.buffer[segment.geometry.slot_offset(0) + header.image_len - 1] ^= 4


def test_each_ranks_model_is_whole_where_all_ranks_are(folder: Path, tmp_path: Path) -> None:
    for rank in range(WORLD):
        dense(folder, rank)
    for rank in range(WORLD):
        report = export(folder, AT, tmp_path / str(rank), rank=rank)
        assert (report.rank, report.tensors) == (rank, 5)
        assert report.joined_ranks == tuple(r for r in range(WORLD) if r != rank)
        check(tmp_path / str(rank), expected(rank, AT))


@pytest.mark.parametrize("at", range(AT, AT + WINDOW))
def test_a_sparse_model_is_in_compute_precision(folder: Path, tmp_path: Path, at: int) -> None:
    """What is anchored in fp32 by another rank computes in bf16, as that rank's other snapshots show."""
    for rank in range(WORLD):
        for each in range(AT, AT + WINDOW):
            sparse(folder, rank, each)
    report = export(folder, at, tmp_path / "m", rank=1)
    assert report.converted > 0
    check(tmp_path / "m", expected(1, at, torch.bfloat16))


def test_replicas_of_other_nodes_ranks_do_as_well(folder: Path, elsewhere: Path, tmp_path: Path) -> None:
    dense(folder, 0)
    dense(folder, 1)
    as_replica(dense(elsewhere, 2), folder)
    assert export(folder, AT, tmp_path / "m", rank=0).joined_ranks == (1, 2)
    check(tmp_path / "m", expected(0, AT))


def test_of_two_copies_the_whole_one_is_taken(folder: Path, elsewhere: Path, tmp_path: Path) -> None:
    dense(folder, 0)
    dense(folder, 2)
    flip(dense(folder, 1))
    with pytest.raises(DamagedSnapshot, match=r"rank 1's snapshot of iteration 30 is damaged"):
        export(folder, AT, tmp_path / "m", rank=0)
    assert os.listdir(tmp_path) == []
    as_replica(dense(elsewhere, 1), folder)
    export(folder, AT, tmp_path / "m", rank=0)
    check(tmp_path / "m", expected(0, AT))


def test_a_share_that_is_not_here_is_told_with_its_rank(folder: Path, tmp_path: Path) -> None:
    """Not that a window is aligned: that would send people to another iteration, which lacks the same."""
    dense(folder, 0)
    dense(folder, 1, AT - 1)
    with pytest.raises(ExportError) as caught:
        export(folder, AT, tmp_path / "m", rank=0)
    told = str(caught.value)
    assert "rank 0's snapshot of iteration 30 is not whole: ranks 1 to 2 captured gate, experts" in told
    assert "for all ranks that have them" in told
    assert "of rank 1 it holds 29" in told
    assert "this node does not know the nodes that hold those of ranks 1 to 2" in told
    assert "export from storage (--durable, or --store URL)" in told
    assert "aligned" not in told
    with (
        pytest.raises(
            ExportError,
            match=r"\(those of rank 2 may be on b or c; this node does not know the nodes that hold those of rank 1",
        ),
        open_slot(folder, AT, rank=0, whereabouts=lambda *run: {2: ["b", "c"], 0: ["a"]}),
    ):
        pass
    assert os.listdir(tmp_path) == []


def test_another_history_is_not_mixed_in(folder: Path, tmp_path: Path) -> None:
    """Before a recovery rank 1 recorded the same iteration, of what became another model."""
    for rank in (0, 2):
        dense(folder, rank, epoch=1)
    dense(folder, 1)
    with pytest.raises(ExportError, match=r"rank 1 captured gate, experts for all.*rank 1 it holds 30 "):
        export(folder, AT, tmp_path / "m", rank=0)


def test_without_an_iteration_the_newest_whole_one_is_meant(folder: Path, tmp_path: Path) -> None:
    """While a job trains, one rank is ahead of another."""
    for at in (AT, AT + 1):
        dense(folder, 0, at)
        dense(folder, 2, at)
    with pytest.raises(ExportError, match=r"snapshot of iteration 31 is not whole: rank 1 captured gate"):
        export(folder, None, tmp_path / "m", rank=0)
    dense(folder, 1, AT)
    assert export(folder, None, tmp_path / "m", rank=0).iteration == AT
    check(tmp_path / "m", expected(0, AT))


def test_groups_of_ranks_do_not_see_each_others_parameters(folder: Path, tmp_path: Path) -> None:
    """Two stages of a pipeline, two ranks each: what has the same name is not the same."""
    torch.manual_seed(0)
    weights = [{"w": torch.randn(9, 2), "v": torch.randn(4)} for _ in range(2)]
    for rank in range(4):
        first = 2 * (rank // 2)
        operators = [Op("w", None, first), Op("v", None, first + 1)]
        tensors = rank_tensors(rank, operators, weights[rank // 2])
        snapshot(folder, AT, tensors, rank, anchors=DENSE, client=client_payload(operators))
    for rank in range(4):
        report = export(folder, AT, tmp_path / str(rank), rank=rank)
        assert report.joined_ranks == (rank ^ 1,)
        check(tmp_path / str(rank), weights[rank // 2])


def test_an_aligned_window_is_still_told(folder: Path, tmp_path: Path) -> None:
    """The owner's image is here, and holds as little of it as that of any rank."""
    operators = [Op("a", None, 1), Op("b", None, 0)]
    state = {"b": torch.zeros(3)}
    for rank in range(2):
        tensors = rank_tensors(rank, operators, state | {"buffer/n": torch.zeros(1)})
        snapshot(folder, AT, tensors, rank, client=client_payload(operators))
    with pytest.raises(
        ExportError, match=r"contain a, and the tensors that rank 1 captured .* aligned window"
    ):
        export(folder, AT, tmp_path / "m", rank=0)


# -- out of storage ------------------------------------------------------------------------------


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ObjectStore]:
    opened = open_store(f"file://{tmp_path}/store")
    yield opened
    opened.close()


def store_rank(store: ObjectStore, rank: int, *, window: int = WINDOW) -> RankManifest:
    """A checkpoint that ends at AT + window - 1."""
    ends = range(AT, AT + window)
    low = torch.bfloat16 if window > 1 else None
    snapshots = {
        at: (
            rank_tensors(
                rank,
                OPERATORS,
                state_of(rank, at),
                lambda i, at=at: window == 1 or anchored_at(at, i),  # type: ignore[misc]
                low,
            ),
            DENSE if window == 1 else 1 << at % 2,
        )
        for at in ends
    }
    told = client_payload(OPERATORS)
    return stored_window(store, snapshots, rank=rank, world_size=WORLD, client=told)


def export_stored(store: ObjectStore, at: int | None, target: Path, rank: int = 0) -> ExportReport:
    with open_stored(store, "file://store", "job", "run", at, rank=rank) as source:
        return export_file(source, target)


@pytest.mark.parametrize("rank", range(WORLD))
def test_a_dense_checkpoint_is_the_model_of_each_rank(store: ObjectStore, tmp_path: Path, rank: int) -> None:
    for each in range(WORLD):
        store_rank(store, each, window=1)
    report = export_stored(store, None, tmp_path / "m", rank)
    assert report.joined_ranks == tuple(r for r in range(WORLD) if r != rank)
    check(tmp_path / "m", expected(rank, AT))


@pytest.mark.parametrize("at", range(AT, AT + WINDOW))
def test_every_snapshot_of_a_sparse_checkpoint_is_a_model(
    store: ObjectStore, tmp_path: Path, at: int
) -> None:
    for rank in range(WORLD):
        store_rank(store, rank)
    export_stored(store, at, tmp_path / "m", 2)
    check(tmp_path / "m", expected(2, at, torch.bfloat16))


@dataclass
class Reads:
    """A store that remembers what was read of which object."""

    store: ObjectStore

    def __post_init__(self) -> None:
        self.ranges: list[tuple[str, int, int]] = []

    def __getattr__(self, name: str) -> object:
        return getattr(self.store, name)

    def read_ranges(self, key: str, ranges: Sequence[Range]) -> None:
        self.ranges += [(key, r.offset, len(r.into)) for r in ranges]
        self.store.read_ranges(key, ranges)


def test_of_other_ranks_only_what_is_missing_is_read(store: ObjectStore, tmp_path: Path) -> None:
    """Another rank's image may be hundreds of times as large as what it captured for this one."""
    large = 3_000_000
    operators = [Op("w", None, 1), Op("own", None, -1)]
    for rank in range(2):
        own = torch.full((10 if rank == 0 else large,), float(rank))
        state = {"w": torch.arange(5.0), "own": own}
        tensors = rank_tensors(rank, operators, state)
        told = client_payload(operators)
        stored_window(store, {AT: (tensors, DENSE)}, rank=rank, world_size=2, client=told)
    counting = Reads(store)
    export_stored(counting, AT, tmp_path / "m")  # type: ignore[arg-type]
    check(tmp_path / "m", {"w": torch.arange(5.0), "own": torch.zeros(10)})
    read = [size for key, _, size in counting.ranges if "rank-00001" in key]
    assert read
    assert sum(read) < large


def test_a_forged_share_of_another_ranks_signed_image_is_refused(store: ObjectStore, tmp_path: Path) -> None:
    """Its xxh3 digest fits. Where manifests are signed, all of another rank's image is compared
    with the cryptographic digest in its manifest.
    """
    create_signer(tmp_path / "keys")
    data = bytearray(4000)
    plant(data)
    operators = [Op("w", None, 1), Op("own", None, -1)]
    for rank in range(2):
        shared = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        state = {"w": shared, "own": torch.full((10,), float(rank))}
        tensors = rank_tensors(rank, operators, state)
        told = client_payload(operators)
        manifest = stored_window(store, {AT: (tensors, DENSE)}, rank=rank, world_size=2, client=told)
        signed = manifest.signed_by(ManifestSigner.load(tmp_path / "keys"))
        (tmp_path / "store" / manifest.key).write_bytes(signed.to_bytes())
    (victim,) = objects_of(tmp_path, 1)
    content = bytearray(victim.read_bytes())
    forge(content, content.find(data))
    victim.write_bytes(content)
    with pytest.raises(DamagedSnapshot, match=r"of rank 1 is damaged: .*'the image'"):
        export_stored(store, AT, tmp_path / "m")


def objects_of(tmp_path: Path, rank: int) -> list[Path]:
    return sorted((tmp_path / "store").rglob(f"rank-{rank:05}/*.safetensors"))


@pytest.mark.parametrize("how", ["object", "bit", "manifest"])
def test_damage_to_another_ranks_share_is_told_as_such(store: ObjectStore, tmp_path: Path, how: str) -> None:
    manifests = [store_rank(store, rank, window=1) for rank in range(WORLD)]
    victim = objects_of(tmp_path, 1)[0]
    reason = r"iteration 30 of rank 1 is damaged: .*`ckptctl checkpoints verify`"
    if how == "object":
        victim.unlink()
    elif how == "bit":
        data = bytearray(victim.read_bytes())
        at = data.find(state_of(1, AT)["experts"][4].numpy().tobytes())
        data[at] ^= 1
        victim.write_bytes(data)
        reason = r"iteration 30 of rank 1 is damaged: 'experts\[3:6\]'"
    else:
        path = tmp_path / "store" / manifests[1].key
        path.write_bytes(path.read_bytes().replace(b'"window": 2', b'"window": 3'))
        reason = "a manifest is damaged: .*rank-00001-of-00003"
    (tmp_path / "out").mkdir()
    with pytest.raises(DamagedSnapshot, match=reason) as caught:
        export_stored(store, None, tmp_path / "out" / "m")
    assert "aligned" not in str(caught.value)
    assert os.listdir(tmp_path / "out") == []


def test_damage_to_what_is_not_needed_is_no_obstacle(store: ObjectStore, tmp_path: Path) -> None:
    """Rank 1's own expert is none of rank 0's."""
    for rank in range(WORLD):
        store_rank(store, rank, window=1)
    victim = objects_of(tmp_path, 1)[0]
    data = bytearray(victim.read_bytes())
    data[data.find(state_of(1, AT)["own"].numpy().tobytes())] ^= 1
    victim.write_bytes(data)
    export_stored(store, None, tmp_path / "m")
    check(tmp_path / "m", expected(0, AT))


def test_an_owner_that_the_checkpoint_does_not_have_is_named(store: ObjectStore, tmp_path: Path) -> None:
    operators = [Op("w", None, 5), Op("v", None, 0)]
    tensors = rank_tensors(0, operators, {"v": torch.zeros(3)})
    told = client_payload(operators)
    stored_window(store, {AT: (tensors, DENSE)}, client=told)
    with pytest.raises(ExportError, match=r"rank 5 captured a part of the model, but .* has ranks 0 to 0"):
        export_stored(store, None, tmp_path / "m")
