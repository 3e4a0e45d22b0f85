"""A model file out of a snapshot: whole, in compute precision, or not at all."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from ckptd.core.export_plan import DamagedSnapshot, ExportError
from ckptd.core.slots.segment_format import slot_lock_byte
from ckptd.export.exports import convert, export_file, export_hf
from ckptd.export.memory_source import open_slot
from ckptd.memory import locks
from tests.ckptd.export.samples import (
    DENSE,
    client_part,
    entries,
    export,
    segment_folder,
    snapshot,
)
from tests.ckptd.running import running_daemon, small_tmpfs


@pytest.fixture
def folder() -> Iterator[Path]:
    with segment_folder() as path:
        yield path


def model() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "embed": torch.randn(7, 5),
        "experts.w1[0:2]": torch.randn(2, 3, 4).bfloat16(),
        "experts.w1[2:3]": torch.randn(1, 3, 4).bfloat16(),
        "head": torch.randn(5, 7).bfloat16(),
        "buffer/steps": torch.tensor(12345),
        "buffer/empty": torch.zeros(0, 4),
        "master/head": torch.randn(5, 7),
        "optim/exp_avg/head": torch.randn(5, 7),
        "ckptd.scalars": torch.zeros(64, dtype=torch.int64),
    }


def test_the_model_comes_back_whole_and_nothing_else_does(folder: Path, tmp_path: Path) -> None:
    tensors = model()
    snapshot(folder, 12, entries(**tensors))
    target = tmp_path / "m.safetensors"
    report = export(folder, 12, target)
    loaded = load_file(target)
    joined = torch.cat([tensors["experts.w1[0:2]"], tensors["experts.w1[2:3]"]])
    expected = {
        "embed": tensors["embed"],
        "experts.w1": joined,
        "head": tensors["head"],
        "steps": tensors["buffer/steps"],
        "empty": tensors["buffer/empty"],
    }
    assert set(loaded) == set(expected)
    for name, tensor in expected.items():
        assert loaded[name].dtype == tensor.dtype
        assert torch.equal(loaded[name], tensor)
    with safe_open(target, "pt") as file:
        assert file.metadata()["ckptd.iteration"] == "12"
    assert report.size_bytes == target.stat().st_size
    assert os.listdir(tmp_path) == ["m.safetensors"]


def test_an_anchored_tensor_is_exported_as_it_computes(folder: Path, tmp_path: Path) -> None:
    """Here w is anchored in fp32; the snapshot before it shows that it computes in bf16."""
    weights = torch.randn(64, 16)
    weights[0, :6] = torch.tensor([float("nan"), float("inf"), -0.0, 3.4e38, 1e-40, 1.00390625])
    snapshot(folder, 11, entries(w=weights.bfloat16()))
    snapshot(folder, 12, entries(w=weights))
    report = export(folder, 12, tmp_path / "m.safetensors")
    assert report.converted == 1
    loaded = load_file(tmp_path / "m.safetensors")["w"]
    assert loaded.dtype is torch.bfloat16
    assert torch.equal(loaded.view(torch.int16)[0, 1:], weights.bfloat16().view(torch.int16)[0, 1:])
    assert torch.equal(loaded[1:], weights.bfloat16()[1:])
    assert loaded[0, 0].isnan()


def test_mixed_slices_are_joined_in_compute_precision(folder: Path, tmp_path: Path) -> None:
    low, high = torch.randn(2, 4).bfloat16(), torch.randn(3, 4)
    snapshot(folder, 3, entries(**{"w[2:5]": high, "w[0:2]": low}))
    export(folder, 3, tmp_path / "m.safetensors")
    loaded = load_file(tmp_path / "m.safetensors")["w"]
    assert torch.equal(loaded, torch.cat([low, high.bfloat16()]))


@pytest.mark.parametrize(("source", "target"), [("F32", "F16"), ("F64", "F32"), ("F16", "F32")])
def test_conversions_round_as_torch_does(source: str, target: str) -> None:
    kinds = {"F16": torch.float16, "F32": torch.float32, "F64": torch.float64}
    values = torch.randn(1000, dtype=torch.float64).to(kinds[source])
    data = memoryview(values.numpy().tobytes())
    assert bytes(convert(data, source, target)) == values.to(kinds[target]).numpy().tobytes()
    assert convert(data, source, source) is data


def test_a_conversion_nobody_asked_for_is_refused() -> None:
    with pytest.raises(ExportError, match="I64 and computes in BF16"):
        convert(memoryview(bytes(8)), "I64", "BF16")


@pytest.mark.parametrize(
    ("names", "reason"),
    [
        (("w[0:1]", "w[2:3]"), "leave a gap or overlap at row 1"),
        (("w[1:2]",), "leave a gap or overlap at row 0"),
        (("w[0:1]", "w"), "both whole and in slices"),
        (("w", "buffer/w"), "have the same name: w"),
    ],
)
def test_slices_that_make_no_whole_are_refused(
    folder: Path, tmp_path: Path, names: tuple[str, ...], reason: str
) -> None:
    snapshot(folder, 3, entries(**{name: torch.zeros(1, 4) for name in names}))
    with pytest.raises(ExportError, match=reason):
        export(folder, 3, tmp_path / "m.safetensors")
    assert os.listdir(tmp_path) == []


def test_a_damaged_snapshot_is_not_exported(folder: Path, tmp_path: Path) -> None:
    segment = snapshot(folder, 3, entries(w=torch.zeros(8)))
    header = segment.header(0)
    assert header is not None
    segment.buffer[segment.geometry.slot_offset(0) + header.image_len - 1] ^= 4
    with pytest.raises(DamagedSnapshot, match=r"iteration 3 is damaged.*w"):
        export(folder, 3, tmp_path / "m.safetensors")
    assert os.listdir(tmp_path) == []


def test_the_slot_is_locked_against_reuse_and_one_in_use_is_refused(folder: Path, tmp_path: Path) -> None:
    segment = snapshot(folder, 3, entries(w=torch.zeros(8)))
    with (
        locks.lock_file(segment.path, slot_lock_byte(0), exclusive=True),
        pytest.raises(ExportError, match="just been overwritten"),
    ):
        export(folder, 3, tmp_path / "m.safetensors")


def test_what_is_missing_or_ambiguous_is_said(folder: Path, tmp_path: Path) -> None:
    target = tmp_path / "m.safetensors"
    with pytest.raises(ExportError, match="the folder contains no segment"):
        export(folder, 3, target)
    snapshot(folder, 3, entries(w=torch.zeros(8)))
    snapshot(folder, 4, entries(w=torch.zeros(8)))
    with pytest.raises(
        ExportError, match=r"no sealed snapshot of iteration 9.*memory holds iterations 3 to 4"
    ):
        export(folder, 9, target)
    (folder / "job~run~r1~g0.seg").write_bytes(b"damaged")  # is passed over
    snapshot(folder, 3, entries(w=torch.ones(8)), rank=2)
    with pytest.raises(ExportError, match="choose one with --job, --run and --rank"):
        export(folder, 3, target)
    assert export(folder, 3, target, rank=2).rank == 2
    assert torch.equal(load_file(target)["w"], torch.ones(8))


def test_an_existing_file_is_replaced_only_by_force(folder: Path, tmp_path: Path) -> None:
    snapshot(folder, 3, entries(w=torch.zeros(8)))
    target = tmp_path / "m.safetensors"
    target.write_text("precious")
    with pytest.raises(ExportError, match="--force"):
        export(folder, 3, target)
    assert target.read_text() == "precious"
    export(folder, 3, target, force=True)
    assert set(load_file(target)) == {"w"}


def test_a_full_disk_is_an_error_with_numbers_and_leaves_nothing(folder: Path) -> None:
    snapshot(folder, 3, entries(w=torch.zeros(200_000)))
    with small_tmpfs("512k") as small:
        with pytest.raises(ExportError, match=r"needs 781\.\d KiB.*512 KiB left; nothing was kept"):
            export(folder, 3, small / "m.safetensors")
        assert os.listdir(small) == []


def test_a_folder_that_cannot_be_written_is_named(folder: Path, tmp_path: Path) -> None:
    snapshot(folder, 3, entries(w=torch.zeros(8)))
    with pytest.raises(ExportError, match=r"cannot write in .*none"):
        export(folder, 3, tmp_path / "none" / "m.safetensors")


def test_the_command_finds_the_segments_with_and_without_a_daemon(tmp_path: Path) -> None:
    with running_daemon() as daemon:
        weights = torch.randn(4, 4)
        snapshot(daemon.segment_dir, 3, entries(w=weights))
        target = tmp_path / "m.safetensors"
        arguments = ("export", "--iteration", "3", "--to", str(target))
        report = json.loads(daemon.ctl(*arguments, "--json").stdout)
        assert report["tensors"] == 1
        assert torch.equal(load_file(target)["w"], weights)
        assert daemon.ctl(*arguments, check=False).returncode == 4
        daemon.kill()
        assert "1 tensors" in daemon.ctl(*arguments, "--force").stdout


def test_a_dense_snapshot_keeps_the_precision_of_training(folder: Path, tmp_path: Path) -> None:
    """What computes in bf16 is trained in fp32, and whoever goes on from it needs all of that."""
    weights = torch.randn(8, 4)
    snapshot(folder, 11, entries(w=weights.bfloat16()))
    snapshot(folder, 12, entries(w=weights), anchors=DENSE)
    assert export(folder, 12, tmp_path / "m.safetensors").converted == 0
    assert torch.equal(load_file(tmp_path / "m.safetensors")["w"], weights)


def test_without_an_iteration_the_newest_is_meant(folder: Path, tmp_path: Path) -> None:
    snapshot(folder, 3, entries(w=torch.zeros(8)))
    snapshot(folder, 4, entries(w=torch.ones(8)))
    report = export(folder, None, tmp_path / "m.safetensors")
    assert report.iteration == 4
    snapshot(folder, 3, entries(w=torch.zeros(8)), rank=1)
    with pytest.raises(ExportError, match=r" have snapshots: choose one with --job, --run and --rank"):
        export(folder, None, tmp_path / "n.safetensors")


def test_a_model_that_is_not_whole_is_refused(folder: Path, tmp_path: Path) -> None:
    """A later snapshot of an aligned window holds no operator that an earlier one anchored."""
    told = client_part({"a": None, "b": None})
    snapshot(folder, 3, entries(b=torch.zeros(8)), client=told)
    with pytest.raises(ExportError, match="does not contain a: only the first snapshot of an aligned"):
        export(folder, 3, tmp_path / "m.safetensors")
    told = client_part({"w": (0, 4)})
    snapshot(folder, 4, entries(**{"w[0:2]": torch.zeros(2, 3)}), client=told)
    with pytest.raises(ExportError, match="does not contain w"):
        export(folder, 4, tmp_path / "m.safetensors")
    assert os.listdir(tmp_path) == []


def test_buffers_that_no_state_dict_has_are_left_out(folder: Path, tmp_path: Path) -> None:
    told = client_part({"w": None}, transient_buffers=["cache"])
    tensors = {"w": torch.zeros(8), "buffer/cache": torch.zeros(3), "buffer/mean": torch.ones(3)}
    snapshot(folder, 3, entries(**tensors), client=told)
    export(folder, 3, tmp_path / "m.safetensors")
    assert set(load_file(tmp_path / "m.safetensors")) == {"w", "mean"}


def test_the_prefix_of_data_parallelism_is_not_the_models(folder: Path, tmp_path: Path) -> None:
    tensors = {"module.a._orig_mod.w": torch.zeros(8), "buffer/module.mean": torch.ones(3)}
    snapshot(folder, 3, entries(**tensors))
    export(folder, 3, tmp_path / "m.safetensors")
    assert set(load_file(tmp_path / "m.safetensors")) == {"a.w", "mean"}
    export(folder, 3, tmp_path / "n.safetensors", keep_prefix=True)
    assert set(load_file(tmp_path / "n.safetensors")) == {"module.a._orig_mod.w", "module.mean"}


# -- folders of Hugging Face ---------------------------------------------------------------------


def test_a_folder_has_files_of_bounded_size_and_their_index(folder: Path, tmp_path: Path) -> None:
    tensors = {f"w{i}": torch.randn(100) for i in range(5)} | {"large": torch.randn(1000)}
    snapshot(folder, 3, entries(**tensors))
    config = tmp_path / "config"
    config.mkdir()
    for name in (
        "config.json",
        "tokenizer.json",
        "model.safetensors.index.json",
        "old.safetensors",
    ):
        (config / name).write_text(name)
    target = tmp_path / "model"
    with open_slot(folder, 3) as source:
        report = export_hf(source, target, config=config, max_shard_bytes=900)
    index = json.loads((target / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 4 * 1500
    assert report.files == len(set(index["weight_map"].values())) == 4
    for name, tensor in tensors.items():
        assert torch.equal(load_file(target / index["weight_map"][name])[name], tensor)
    listed = {path.name for path in target.iterdir()} - set(index["weight_map"].values())
    assert listed == {"config.json", "tokenizer.json", "model.safetensors.index.json"}
    assert (target / "tokenizer.json").read_text() == "tokenizer.json"
    assert report.notes == ()


def test_a_small_model_is_one_file_and_a_missing_config_is_said(folder: Path, tmp_path: Path) -> None:
    snapshot(folder, 3, entries(w=torch.ones(8)))
    with open_slot(folder, 3) as source:
        report = export_hf(source, tmp_path / "model")
        with pytest.raises(ExportError, match=r"has no config\.json"):
            export_hf(source, tmp_path / "other", config=tmp_path)
    assert os.listdir(tmp_path / "model") == ["model.safetensors"]
    assert report.notes == ("the folder has no config.json: pass --config",)
    assert not (tmp_path / "other").exists()


def test_force_replaces_models_and_nothing_else(folder: Path, tmp_path: Path) -> None:
    """--force with a mistyped path must not remove somebody's files."""
    snapshot(folder, 3, entries(w=torch.ones(8)))
    target, home = tmp_path / "model", tmp_path / "home"
    home.mkdir()
    (home / "thesis.txt").write_text("precious")
    with open_slot(folder, 3) as source:
        export_hf(source, target)
        (target / "left.bin").write_text("old")
        with pytest.raises(ExportError, match="exists already; pass --force"):
            export_hf(source, target)
        export_hf(source, target, force=True)
        assert os.listdir(target) == ["model.safetensors"]
        with pytest.raises(ExportError, match="contains no model"):
            export_hf(source, home, force=True)
        (target / "below").mkdir()
        with pytest.raises(ExportError, match="contains no model"):
            export_hf(source, target, force=True)
        with pytest.raises(ExportError, match="is a file and is not replaced"):
            export_hf(source, home / "thesis.txt", force=True)
    assert (home / "thesis.txt").read_text() == "precious"
    assert sorted(os.listdir(tmp_path)) == ["home", "model"]


def test_a_full_disk_leaves_no_folder(folder: Path) -> None:
    snapshot(folder, 3, entries(a=torch.zeros(100_000), b=torch.zeros(100_000)))
    with small_tmpfs("512k") as small, open_slot(folder, 3) as source:
        with pytest.raises(ExportError, match=r"needs 781\.\d KiB.*512 KiB left; nothing was kept"):
            export_hf(source, small / "model", max_shard_bytes=400_000)
        assert os.listdir(small) == []


def test_a_failure_in_the_middle_leaves_no_folder(folder: Path, tmp_path: Path) -> None:
    """BF16 cannot be made of I64: found when the second file is written."""
    snapshot(folder, 2, entries(a=torch.zeros(100), b=torch.zeros(64).bfloat16()))
    snapshot(folder, 3, entries(a=torch.zeros(100), b=torch.zeros(64, dtype=torch.int64)))
    with (
        open_slot(folder, 3) as source,
        pytest.raises(ExportError, match="I64 and computes in BF16"),
    ):
        export_hf(source, tmp_path / "model", max_shard_bytes=400)
    assert os.listdir(tmp_path) == []


class TestOlderExperts:
    """Partial snapshots in memory: each has the dense tensor and some rows of the experts."""

    CLIENT = client_part({"head": None, "e": (0, 3)}, policy="partial")

    def taken(self, folder: Path, iteration: int, row: int, value: float, epoch: int = 0) -> None:
        tensors = {"head": torch.full((2, 2), value), f"e[{row}:{row + 1}]": torch.full((1, 4), value)}
        state = {f"optim/exp_avg/e[{row}:{row + 1}]": torch.zeros(1, 4)}
        snapshot(folder, iteration, entries(**tensors, **state), client=self.CLIENT, epoch=epoch)

    def test_each_is_of_the_newest_snapshot_that_has_it(self, folder: Path, tmp_path: Path) -> None:
        """The chain goes on with snapshots of an earlier epoch; what a recovery left behind is not in it."""
        self.taken(folder, 10, 0, 10.0)
        self.taken(folder, 11, 1, -1.0)
        self.taken(folder, 11, 1, 11.0, epoch=1)
        self.taken(folder, 12, 2, 12.0, epoch=1)
        self.taken(folder, 13, 0, -1.0, epoch=1)
        with pytest.raises(ExportError, match=r"leave a gap or overlap at row 0.*pass --older-experts"):
            export(folder, 12, tmp_path / "none")
        with open_slot(folder, 12, older_experts=True) as source:
            assert source.origin.older == {"e[1:2]": 11, "e[0:1]": 10}
            report = export_file(source, tmp_path / "m")
        loaded = load_file(tmp_path / "m")
        assert torch.equal(loaded["head"], torch.full((2, 2), 12.0))
        assert loaded["e"][:, 0].tolist() == [10.0, 11.0, 12.0]
        assert (report.older_tensors, report.iteration) == (2, 12)
        with safe_open(tmp_path / "m", "pt") as exported:
            older = json.loads(exported.metadata()["ckptd.older_experts"])
        assert older == {"10": ["e[0:1]"], "11": ["e[1:2]"]}

    def test_a_chain_that_is_not_whole_is_refused(self, folder: Path, tmp_path: Path) -> None:
        self.taken(folder, 10, 0, 10.0)
        self.taken(folder, 12, 1, 12.0)
        self.taken(folder, 13, 2, 13.0)
        target = tmp_path / "m"
        with open_slot(folder, 13, older_experts=True) as source, pytest.raises(ExportError, match="a gap"):
            export_file(source, target)
        assert not target.exists()

    def test_a_folder_has_it_in_its_metadata(self, folder: Path, tmp_path: Path) -> None:
        for row, iteration in enumerate((10, 11, 12)):
            self.taken(folder, iteration, row, float(iteration))
        with open_slot(folder, None, older_experts=True) as source:
            report = export_hf(source, tmp_path / "m")
        assert len(report.notes) == 2
        with safe_open(tmp_path / "m/model.safetensors", "pt") as exported:
            assert set(json.loads(exported.metadata()["ckptd.older_experts"])) == {"10", "11"}

    def test_older_images_are_verified(self, folder: Path, tmp_path: Path) -> None:
        for row, iteration in enumerate((10, 11)):
            self.taken(folder, iteration, row, float(iteration))
        tensors = entries(**{"head": torch.zeros(2, 2), "e[2:3]": torch.zeros(1, 4)})
        broken = snapshot(folder, 12, tensors, client=self.CLIENT)
        self.taken(folder, 13, 2, 13.0)
        header = broken.header(0)
        assert header is not None
        image = broken.image(0, header)
        image[-1] ^= 1
        with (
            pytest.raises(DamagedSnapshot, match="iteration 12 is damaged"),
            open_slot(folder, 13, older_experts=True),
        ):
            pass
