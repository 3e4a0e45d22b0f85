"""A model out of storage: read in the order of its bytes, verified as it passes, refused where it is damaged."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from ckptd.core.export_plan import DamagedSnapshot, ExportError
from ckptd.export.exports import ExportReport, export_file
from ckptd.export.store_source import open_stored, plan_spans
from ckptd.storage.image_format import ImageTensor
from ckptd.storage.stores.objects import ObjectStore
from ckptd.storage.stores.open_store import open_store
from tests.ckptd.export.samples import DENSE, client_part, entries, stored_window
from tests.ckptd.forging import forge, plant

MIB = 1 << 20


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ObjectStore]:
    opened = open_store(f"file://{tmp_path}/store")
    yield opened
    opened.close()


def export(store: ObjectStore, iteration: int | None, target: Path, rank: int | None = None) -> ExportReport:
    with open_stored(store, "file://store", "job", "run", iteration, rank=rank) as source:
        return export_file(source, target)


def window(end: int, seed: int = 0) -> dict[int, Any]:
    """Two snapshots of a model of three tensors; at each, one of two operators is anchored in fp32."""
    torch.manual_seed(seed)
    weights = {name: torch.randn(300, 50) for name in ("a", "b", "same")}
    low = {name: w.bfloat16() for name, w in weights.items()}
    one = entries(a=weights["a"], b=low["b"], same=low["same"])
    other = entries(b=weights["b"], a=low["a"], same=low["same"])
    return {end - 1: (one, 0b01), end: (other, 0b10)}


def test_every_snapshot_of_a_checkpoint_is_a_model(store: ObjectStore, tmp_path: Path) -> None:
    """What was not uploaded again lies in the object of an older snapshot."""
    stored_window(store, window(20))
    torch.manual_seed(0)
    expected = {name: torch.randn(300, 50).bfloat16() for name in ("a", "b", "same")}
    for iteration, name in ((20, "e"), (19, "m"), (None, "n")):
        report = export(store, iteration, tmp_path / name)
        assert (report.place, report.iteration) == ("file://store", iteration or 20)
        loaded = load_file(tmp_path / name)
        assert set(loaded) == set(expected)
        for tensor, value in expected.items():
            assert torch.equal(loaded[tensor], value), (iteration, tensor)


def test_older_partial_snapshots_are_exported_if_they_are_whole(store: ObjectStore, tmp_path: Path) -> None:
    """Of the images that a checkpoint lists, 20 was the newest of an earlier one; 29 is stored reduced."""
    torch.manual_seed(0)
    a, b, same = torch.randn(30, 5), torch.randn(30, 5), torch.randn(30, 5)
    client = client_part({"a": None, "b": None, "same": None}, policy="partial")
    whole = {
        20: (entries(a=a, b=b, same=same), 0b01),
        29: (entries(b=b), 0b10),
        30: (entries(a=a + 1, b=b, same=same + 1), 0b01),
    }
    stored_window(store, whole, client=client)
    for iteration, more in ((20, 0), (30, 1), (None, 1)):
        export(store, iteration, tmp_path / f"{iteration}")
        loaded = load_file(tmp_path / f"{iteration}")
        assert torch.equal(loaded["a"], a + more)
        assert torch.equal(loaded["same"], same + more)
    text = "does not contain a, same: of an older partial snapshot storage has only .* choose iteration 30"
    with pytest.raises(ExportError, match=text):
        export(store, 29, tmp_path / "29")
    assert not (tmp_path / "29").exists()


def test_experts_that_a_partial_snapshot_lacks_are_taken_from_older_ones(
    store: ObjectStore, tmp_path: Path
) -> None:
    """A checkpoint of three images, of which the older ones are stored reduced; each tensor says what it is of.

    The second image's state of the optimizer, and what newer images have as well, is of no use.
    """
    same = torch.randn(30, 5)
    client = client_part({"same": None, "e": (0, 3)}, policy="partial")
    rows = {n: torch.full((1, 4), float(n)) for n in range(3)}
    images = {
        20: entries(**{"e[0:1]": rows[0]}),
        29: entries(**{"e[0:1]": rows[0] + 9, "e[1:2]": rows[1], "optim/exp_avg/e[1:2]": rows[1]}),
        30: entries(**{"same": same, "e[2:3]": rows[2]}),
    }
    anchors = {20: 0b01, 29: 0b10, 30: 0b01}
    stored_window(store, {i: (tensors, anchors[i]) for i, tensors in images.items()}, client=client)
    with pytest.raises(ExportError, match="pass --older-experts"):
        export(store, 30, tmp_path / "none")
    with open_stored(store, "file://store", "job", "run", 30, older_experts=True) as source:
        report = export_file(source, tmp_path / "mixed")
    loaded = load_file(tmp_path / "mixed")
    assert set(loaded) == {"same", "e"}
    assert torch.equal(loaded["same"], same)
    assert torch.equal(loaded["e"], torch.cat([rows[0] + 9, rows[1], rows[2]]))
    assert report.older_tensors == 2
    [note] = report.notes
    assert note == (
        "2 tensors or ranges of rows are those of older snapshots, of iterations 29 to 29: this is not the "
        "model of one iteration. The metadata has them as ckptd.older_experts"
    )
    with safe_open(tmp_path / "mixed", "pt") as exported:
        assert json.loads(exported.metadata()["ckptd.older_experts"]) == {"29": ["e[0:1]", "e[1:2]"]}


def test_an_older_image_is_verified_too(store: ObjectStore, tmp_path: Path) -> None:
    client = client_part({"a": None, "b": None}, policy="partial")
    a, b = torch.randn(30, 5), torch.randn(30, 5)
    manifest = stored_window(store, {1: (entries(a=a), 0b01), 2: (entries(b=b), 0b10)}, client=client)
    [victim] = [tmp_path / "store" / each.key for each in manifest.snapshots[0].objects]
    data = bytearray(victim.read_bytes())
    data[-1] ^= 1
    victim.write_bytes(data)
    with (
        pytest.raises(DamagedSnapshot, match="the stored snapshot of iteration 1 of rank 0 is damaged"),
        open_stored(store, "file://store", "job", "run", 2, older_experts=True) as source,
    ):
        export_file(source, tmp_path / "mixed")
    assert not (tmp_path / "mixed").exists()


def test_large_tensors_and_many_small_ones_come_whole(store: ObjectStore, tmp_path: Path) -> None:
    """Beyond the size of one read, with an odd number of rows, and with neighbours of other dtypes."""
    torch.manual_seed(1)
    tensors: dict[str, torch.Tensor] = {
        "large": torch.randn(4_300_001),
        "steps": torch.arange(7),
        "empty": torch.zeros(0, 3),
        "optim/exp_avg/large": torch.randn(1000),
    }
    for i in range(40):
        tensors[f"w{i}[0:1]"] = torch.randn(1, 5, 5)
        tensors[f"w{i}[1:3]"] = torch.randn(2, 5, 5)
    stored_window(store, {7: (entries(**tensors), DENSE)})
    export(store, 7, tmp_path / "m")
    loaded = load_file(tmp_path / "m")
    assert torch.equal(loaded["large"], tensors["large"])
    assert torch.equal(loaded["steps"], tensors["steps"])
    for i in range(40):
        assert torch.equal(loaded[f"w{i}"], torch.cat([tensors[f"w{i}[0:1]"], tensors[f"w{i}[1:3]"]]))


def test_a_flipped_bit_in_an_object_is_found_and_nothing_is_left(store: ObjectStore, tmp_path: Path) -> None:
    stored_window(store, window(20))
    victim = max((tmp_path / "store").rglob("*.safetensors"))
    data = bytearray(victim.read_bytes())
    data[-9] ^= 16
    victim.write_bytes(data)
    (tmp_path / "out").mkdir()
    with pytest.raises(DamagedSnapshot, match=r"iteration 20 is damaged: '\w+' in"):
        export(store, 20, tmp_path / "out" / "m")
    assert os.listdir(tmp_path / "out") == []


def stored_forgeable(store: ObjectStore, folder: Path) -> Callable[[], None]:
    """Store iteration 7 with one tensor; what is returned gives that tensor other bytes with the
    same xxh3 digest.
    """
    data = bytearray(os.urandom(60_000))
    plant(data)
    tensors: dict[int, Any] = {7: ([("w", "U8", (len(data),), bytes(data))], DENSE)}
    stored_window(store, tensors)
    (victim,) = (folder / "store").rglob("*.safetensors")

    def forge_stored() -> None:
        content = bytearray(victim.read_bytes())
        forge(content, content.find(data))
        victim.write_bytes(content)

    return forge_stored


def test_a_tensor_that_was_forged_is_found_and_nothing_is_left(store: ObjectStore, tmp_path: Path) -> None:
    """Its xxh3 digest fits. The cryptographic digest of the whole image, in the manifest, does not;
    before, the forgery was exported.
    """
    stored_forgeable(store, tmp_path)()
    (tmp_path / "out").mkdir()
    with pytest.raises(DamagedSnapshot, match=r"iteration 7 .* 'the image'"):
        export(store, 7, tmp_path / "out" / "m")
    assert os.listdir(tmp_path / "out") == []


def test_a_tensor_that_is_forged_after_the_image_was_compared_is_found(
    store: ObjectStore, tmp_path: Path
) -> None:
    """The export reads the image twice. What is changed in between is seen by the digests that were
    made of the tensors the first time.
    """
    forge_stored = stored_forgeable(store, tmp_path)
    with open_stored(store, "file://store", "job", "run", 7) as source:
        forge_stored()
        with pytest.raises(DamagedSnapshot, match="'w'"):
            export_file(source, tmp_path / "m")


def test_a_damaged_header_or_manifest_is_told_as_such(store: ObjectStore, tmp_path: Path) -> None:
    manifest = stored_window(store, window(20))
    objects = sorted((tmp_path / "store").rglob("*.safetensors"))
    whole = objects[0].read_bytes()
    objects[0].write_bytes(whole[:50] + b"!" + whole[51:])
    with pytest.raises(DamagedSnapshot, match="damaged"):
        export(store, 19, tmp_path / "m")
    objects[0].write_bytes(whole)
    path = tmp_path / "store" / manifest.key
    path.write_bytes(path.read_bytes().replace(b'"window": 2', b'"window": 3'))
    with pytest.raises(DamagedSnapshot, match="a manifest is damaged"):
        export(store, 19, tmp_path / "m")


def test_what_is_not_there_is_said(store: ObjectStore, tmp_path: Path) -> None:
    target = tmp_path / "m"
    with pytest.raises(ExportError, match=r"no checkpoint in .*no checkpoint is committed"):
        export(store, None, target)
    stored_window(store, window(20))
    stored_window(store, window(30))
    stored_window(store, window(40), rank=1, world_size=2)
    for iteration in (18, 21, 40):
        with pytest.raises(ExportError, match=rf"iteration {iteration} in .*committed checkpoints: 30, 20$"):
            export(store, iteration, target)
    stored_window(store, window(40), world_size=2)
    with pytest.raises(ExportError, match=r"has 2 ranks: pass --rank"):
        export(store, None, target)
    with pytest.raises(ExportError, match=r"has ranks 0 to 1, not 2"):
        export(store, None, target, rank=2)
    assert export(store, None, target, rank=1).rank == 1


def test_the_descriptor_says_what_a_whole_model_is(store: ObjectStore, tmp_path: Path) -> None:
    told = client_part({"a": None, "b": None, "same": None, "lost": None})
    stored_window(store, window(20), client=told)
    with pytest.raises(ExportError, match="does not contain lost"):
        export(store, 20, tmp_path / "m")


# -- spans ---------------------------------------------------------------------------------------


def tensor(offset: int, nbytes: int) -> ImageTensor:
    return ImageTensor(f"t{offset}", "U8", (nbytes,), offset, nbytes)


def test_neighbours_are_read_together_up_to_a_limit() -> None:
    order = [tensor(64, 100), tensor(164, 0), tensor(164, 50), tensor(300_000, 10), tensor(20, 8)]
    assert plan_spans(order, MIB) == [(64, 214), (300_000, 300_010), (20, 28)]
    order = [tensor(0, MIB - 1), tensor(MIB - 1, 2), tensor(MIB + 1, 3)]
    assert plan_spans(order, MIB) == [(0, MIB - 1), (MIB - 1, MIB + 4)]


def test_large_tensors_are_read_in_parts() -> None:
    order = [tensor(8, 10), tensor(18, 2 * MIB + 5), tensor(18 + 2 * MIB + 5, 7)]
    begin = 18 + 2 * MIB
    assert plan_spans(order, MIB) == [
        (8, 18),
        (18, 18 + MIB),
        (18 + MIB, begin),
        (begin, begin + 12),
    ]
