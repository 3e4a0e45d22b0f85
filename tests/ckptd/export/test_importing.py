"""A model from elsewhere as a starting point: whole and with digests, or none."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ckptd.core.export_plan import DamagedSnapshot, ExportError
from ckptd.export.importing import ImportReport, import_to_folder, import_to_store, open_import
from ckptd.storage.model_set import MANIFEST, FolderFiles, StoreFiles, open_set
from ckptd.storage.stores.objects import NoSpace, ObjectInfo
from ckptd.storage.stores.open_store import open_store
from tests.ckptd.running import small_tmpfs
from tests.storage.memory_store import MemoryStore


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder as Hugging Face has it, with small tensors before large ones and an odd number of bytes."""
    torch.manual_seed(0)
    folder = tmp_path / "model"
    folder.mkdir()
    tensors = {"a": torch.randn(3).bfloat16(), "b": torch.randn(4, 5), "c": torch.zeros(0)}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    return folder


def to_folder(source: Path, target: Path, *, force: bool = False) -> ImportReport:
    with open_import(source, model_key="model", optimizer_key="optim") as found:
        return import_to_folder(found, target, force=force)


def test_a_folder_of_safetensors_becomes_a_set_with_digests(model: Path, tmp_path: Path) -> None:
    report = to_folder(model, tmp_path / "set")
    assert (report.format, report.tensors, report.size_bytes) == ("hf", 3, 86)
    assert report.start_from == str(tmp_path / "set")
    assert sorted(os.listdir(tmp_path / "set")) == [MANIFEST, "model.safetensors"]
    before, after = (load_file(p / "model.safetensors") for p in (model, tmp_path / "set"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    found = open_set(FolderFiles(tmp_path / "set"), complete=True)
    assert all(tensor.digest for tensor in found.model.values())


def test_a_set_is_imported_again_with_its_digests_checked(model: Path, tmp_path: Path) -> None:
    to_folder(model, tmp_path / "set")
    file = tmp_path / "set" / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(data)
    with pytest.raises(DamagedSnapshot, match=r"a in .* is damaged"):
        to_folder(tmp_path / "set", tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_a_single_file_and_what_is_no_model(model: Path, tmp_path: Path) -> None:
    assert to_folder(model / "model.safetensors", tmp_path / "set").tensors == 3
    with pytest.raises(ExportError, match="exists already"):
        to_folder(model, tmp_path / "set")
    assert to_folder(model, tmp_path / "set", force=True).tensors == 3
    with pytest.raises(ExportError, match=r"holds no model\.safetensors"):
        to_folder(tmp_path, tmp_path / "none")
    (model / "model.safetensors").write_bytes(b"\x20" + bytes(40))
    with pytest.raises(ExportError, match="no whole safetensors file"):
        to_folder(model, tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_a_full_disk_leaves_nothing(tmp_path: Path) -> None:
    save_file({"w": torch.zeros(200_000)}, tmp_path / "w.safetensors")
    with small_tmpfs("512k") as small:
        with pytest.raises(ExportError, match="nothing was kept"):
            to_folder(tmp_path / "w.safetensors", small / "set")
        assert os.listdir(small) == []


def test_what_is_no_checkpoint_of_torch_is_told_in_its_words(tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(b"nonsense")
    with (
        pytest.raises(
            ExportError, match=r"dcp_import ended with status 1: .* is no metadata of a checkpoint"
        ),
        open_import(tmp_path, kind="dcp", model_key="model", optimizer_key="optim"),
    ):
        pass


# -- stores --------------------------------------------------------------------------------------


def test_the_manifest_is_stored_last(model: Path) -> None:
    """An import that fails in the middle is none, and the next one takes its place."""

    class Full(MemoryStore):
        full = True

        def put(self, key: str, parts: object, *, if_absent: bool = False) -> ObjectInfo:
            if self.full and key.endswith(MANIFEST):
                raise NoSpace(key, "it is full")
            return super().put(key, parts, if_absent=if_absent)  # type: ignore[arg-type]

    store = Full()
    with open_import(model, model_key="", optimizer_key="") as found:
        with pytest.raises(NoSpace):
            import_to_store(found, store, "memory://", "job", "run")
        files = StoreFiles(store, "job/run/import/", "memory://job/run/import")
        with pytest.raises(ValueError, match=r"has no import\.json"):
            open_set(files, complete=True)
        store.full = False
        report = import_to_store(found, store, "memory://x/", "job", "run")
        assert report.start_from == "memory://x/job/run/import"
        with pytest.raises(ExportError, match="holds an import already"):
            import_to_store(found, store, "memory://x/", "job", "run")
        import_to_store(found, store, "memory://x/", "job", "run", force=True)
    assert set(open_set(files, complete=True).model) == {"a", "b", "c"}


def test_the_bytes_are_those_of_the_source(model: Path, tmp_path: Path) -> None:
    store = open_store(f"file://{tmp_path}/store")
    with open_import(model, model_key="", optimizer_key="") as found:
        import_to_store(found, store, "file://store", "job", "run")
    store.close()
    stored = load_file(tmp_path / "store/job/run/import/model.safetensors")
    assert torch.equal(stored["b"], load_file(model / "model.safetensors")["b"])
