"""Checkpoints that stock torch wrote, as an import reads them."""

from __future__ import annotations

import io
import os
import pickle
import subprocess
import sys
import warnings
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_saver import save

from ckptd.client.interchange.dcp_import import MetadataRefused, StoredState, read_dcp_metadata
from ckptd.ctl.main import main
from ckptd.export.dcp_wire import ReadJob
from tests.client.exporting import MoE, make_model, step_once


def saved(folder: Path, state: dict[str, Any]) -> str:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        save(state, checkpoint_id=folder, no_dist=True)
    return str(folder)


def trained() -> tuple[MoE, torch.optim.Optimizer]:
    model = make_model(0)
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    groups: list[dict[str, Any]] = [
        {"params": decayed, "lr": torch.tensor(0.25)},
        {"params": others, "betas": (0.5, 0.9)},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.125)
    step_once(model, optimizer, 0)
    return model, optimizer


@pytest.mark.parametrize("flat", [True, False])
def test_both_layouts_of_an_optimizer_give_the_same(tmp_path: Path, flat: bool) -> None:
    model, optimizer = trained()
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    state = get_optimizer_state_dict(model, optimizer, options=options)
    folder = saved(tmp_path / "ckpt", {"model": model.state_dict(), "optim": state, "step": 3})
    stored = StoredState(ReadJob(folder, "model", "optim"))
    found = stored.contents()
    assert found.notes == ["skipped: step"]
    kinds = [tensor.kind for tensor in found.tensors]
    assert (kinds.count("model"), kinds.count("optim")) == (8, 18)
    assert found.groups["embed.weight"]["lr"] == 0.25
    assert found.groups["gate.bias"]["lr"] == 0.125
    assert found.groups["gate.bias"]["betas"] == [0.5, 0.9]
    at = {tensor.name: index for index, tensor in enumerate(found.tensors)}
    assert torch.equal(stored.tensor(at["embed.weight"]), model.embed.weight)
    moment = optimizer.state[model.gate.bias]["exp_avg"]
    assert torch.equal(stored.tensor(at["state.gate.bias.exp_avg"]), moment)


def test_a_model_at_the_root_or_under_another_key(tmp_path: Path) -> None:
    model, _ = trained()
    folder = saved(tmp_path / "root", dict(model.state_dict()))
    names = {t.name for t in StoredState(ReadJob(folder, "", "")).contents().tensors}
    assert names == set(model.state_dict())
    folder = saved(tmp_path / "app", {"app": {"net": model.state_dict()}})
    found = StoredState(ReadJob(folder, "app.net", "")).contents()
    assert {t.name for t in found.tensors} == names
    with pytest.raises(ValueError, match=r"no tensor under the key 'model\.'; keys are like app"):
        StoredState(ReadJob(folder, "model", "optim")).contents()


def test_a_dtype_that_safetensors_cannot_hold_is_named(tmp_path: Path) -> None:
    folder = saved(tmp_path / "ckpt", {"model": {"w": torch.zeros(2, dtype=torch.complex128)}})
    with pytest.raises(ValueError, match=r"model\.w is torch\.complex128"):
        StoredState(ReadJob(folder, "model", "")).contents()


class Runs:
    """Unpickled, it leaves a file behind."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.system, (f"touch {self.marker}",)


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    return tmp_path / "it-ran"


def stored(folder: Path, state: dict[str, Any]) -> Path:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        save(state, checkpoint_id=folder, no_dist=True)
    return folder


def checkpoint(folder: Path, **more: Any) -> Path:
    return stored(folder, {"model": {"w": torch.arange(6.0).reshape(2, 3)}, **more})


def imported(source: Path, target: Path, *more: str) -> int:
    return main(["import", "--from", str(source), "--to", str(target), *more])


def test_the_marker_tells_that_a_pickle_was_run(marker: Path) -> None:
    pickle.loads(pickle.dumps(Runs(marker)))
    assert marker.exists()


def test_a_folder_of_safetensors_is_never_taken_for_pickles(tmp_path: Path, marker: Path) -> None:
    folder = tmp_path / "downloaded"
    folder.mkdir()
    save_file({"w": torch.ones(3)}, folder / "model.safetensors")
    (folder / ".metadata").write_bytes(pickle.dumps(Runs(marker)))
    assert imported(folder, tmp_path / "set") == 0
    assert (tmp_path / "set" / "model.safetensors").exists()
    assert not marker.exists()


@pytest.mark.usefixtures("forked_child")
def test_a_checkpoint_of_torch_must_be_named_as_one(
    tmp_path: Path, marker: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "downloaded"
    folder.mkdir()
    (folder / ".metadata").write_bytes(pickle.dumps(Runs(marker)))
    assert imported(folder, tmp_path / "set") == 4
    assert "`ckptctl import --format dcp` makes one of" in capsys.readouterr().err
    assert imported(folder, tmp_path / "set", "--format", "dcp") == 4
    told = capsys.readouterr().err
    assert "it names posix.system, which may run anything. Nothing of it was run" in told
    assert not marker.exists()
    assert not (tmp_path / "set").exists()


def test_metadata_is_what_torch_itself_reads(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "ckpt", optim={"lr": 0.5, "deep": [{"m": torch.zeros(3)}]})
    ours = read_dcp_metadata(folder)
    theirs = pickle.loads((folder / ".metadata").read_bytes())
    assert ours.state_dict_metadata == theirs.state_dict_metadata
    assert ours.storage_data == theirs.storage_data
    found = StoredState(ReadJob(str(folder), "model", ""))
    found.contents()
    assert torch.equal(found.tensor(0), torch.arange(6.0).reshape(2, 3))


class Forged:
    """Pickled as an object of that name with that state."""

    def __init__(self, module: str, name: str, *, args: tuple[Any, ...] = (), state: Any = None):
        self.module, self.name, self.args, self.state = module, name, args, state


class _Forger(pickle._Pickler):  # in Python, so that it can be told what to write
    write: Callable[[bytes], None]

    def save(self, obj: Any, save_persistent_id: bool = True) -> None:
        if not isinstance(obj, Forged):
            super().save(obj, save_persistent_id)  # type: ignore[misc]
            return
        self.write(f"c{obj.module}\n{obj.name}\n".encode())
        if obj.args:
            self.save(obj.args)
            self.write(pickle.REDUCE)
        elif obj.args is not None:
            self.write(pickle.EMPTY_TUPLE + pickle.NEWOBJ)
        if obj.state is not None:
            self.save(obj.state)
            self.write(pickle.BUILD)


def forged(folder: Path, told: Any) -> Path:
    folder.mkdir()
    out = io.BytesIO()
    _Forger(out, 2).dump(told)
    (folder / ".metadata").write_bytes(out.getvalue())
    return folder


DCP = "torch.distributed.checkpoint.metadata"


def whole(entries: dict[str, Any], storage: Any = None) -> Forged:
    state = {"state_dict_metadata": entries, "storage_data": storage or {}, "planner_data": None}
    return Forged(DCP, "Metadata", state=state)


def test_metadata_of_older_torch_is_read(tmp_path: Path) -> None:
    """Before 2.3 properties were of another module; a member of an enumeration was named by getattr."""
    module = "torch.distributed._shard.sharded_tensor.metadata"
    member = Forged(
        "builtins",
        "getattr",
        args=(Forged(module, "MEM_FORMAT_ENCODING", args=(0,)), "TORCH_CONTIGUOUS_FORMAT"),
    )
    layout = Forged("torch.serialization", "_get_layout", args=("torch.strided",))
    tensor = Forged(
        DCP,
        "TensorStorageMetadata",
        state={
            "properties": Forged(
                module, "TensorProperties", state=(torch.bfloat16, layout, False, member, False)
            ),
            "size": torch.Size([2]),
            "chunks": [
                Forged(
                    DCP,
                    "ChunkStorageMetadata",
                    state={"offsets": torch.Size([0]), "sizes": torch.Size([2])},
                )
            ],
        },
    )
    told = read_dcp_metadata(forged(tmp_path / "c", whole({"w": tensor}))).state_dict_metadata["w"]
    assert told.properties.dtype is torch.bfloat16  # type: ignore[union-attr]
    assert told.size == torch.Size([2])  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("told", "why"),
    [
        (Forged("subprocess", "Popen", args=(["true"],)), "names subprocess.Popen"),
        (Forged("torch", "load", args=("x",)), "names torch.load"),
        (Forged("torch.nn", "Linear", args=(1, 1)), "names torch.nn.Linear"),
        (Forged("builtins", "getattr", args=(OrderedDict(), "clear")), "there is _Ignored where"),
        (Forged(DCP, "Metadata", args=None, state=(None, {"told": 1})), "no metadata|sets told"),  # type: ignore[arg-type]
        (Forged(DCP, "Metadata", state={"state_dict_metadata": {}}), "KeyError.*storage_data"),
        (whole({"w": 7}), "there is int where _Tensor belongs"),
        (
            whole(
                {},
                {
                    Forged(DCP, "MetadataIndex", state={"fqn": "w"}): Forged(
                        "torch.distributed.checkpoint.filesystem",
                        "_StorageInfo",
                        state={"relative_path": "../secret", "offset": 0, "length": 1},
                    )
                },
            ),
            r"names '\.\./secret', which is not in",
        ),
        ({"state_dict_metadata": {}}, "there is dict where _Meta belongs"),
        (7, "there is int where"),
    ],
)
def test_what_torch_does_not_write_is_refused(tmp_path: Path, told: Any, why: str) -> None:
    with pytest.raises(MetadataRefused, match=why):
        read_dcp_metadata(forged(tmp_path / "c", told))


def test_a_file_that_is_no_pickle_is_refused(tmp_path: Path) -> None:
    for content in (b"", b"hello", b"\x80\x04", b"\x80\x05" + b"(" * 100_000):
        (tmp_path / ".metadata").write_bytes(content)
        with pytest.raises(MetadataRefused, match="is no metadata of a checkpoint"):
            read_dcp_metadata(tmp_path)


def test_a_pickle_that_numbers_its_values_as_it_likes_takes_no_memory(tmp_path: Path) -> None:
    """Fuzzing found that eight bytes took gigabytes: an unpickler has room for all lower numbers."""
    for number in (0x0A000000, 0xFFFFFFFF):
        (tmp_path / ".metadata").write_bytes(b"\x80\x02Nr" + number.to_bytes(4, "little") + b".")
        with pytest.raises(MetadataRefused, match=f"its value number 0 has the number {number}"):
            read_dcp_metadata(tmp_path)


def test_values_are_not_run_either(tmp_path: Path, marker: Path) -> None:
    """The metadata is torch's own; the option of a parameter group is not."""
    groups = {"param_groups": {"w": {"lr": Runs(marker)}}}
    folder = checkpoint(tmp_path / "ckpt", optim=groups)
    found = StoredState(ReadJob(str(folder), "model", "optim"))
    with pytest.raises(ValueError, match=r"optim\.param_groups.*more than numbers.*was run"):
        found.contents()
    assert not marker.exists()
    assert StoredState(ReadJob(str(folder), "model", "")).contents().groups == {}


def test_what_lies_in_the_current_folder_is_not_imported(tmp_path: Path, marker: Path) -> None:
    """Whoever stands in the downloaded folder runs nothing of it: the child imported its torch.py."""
    folder = checkpoint(tmp_path / "ckpt")
    for name in ("torch.py", "msgspec.py", "ckptd.py"):
        (folder / name).write_text(f"open({str(marker)!r}, 'w')\nraise SystemExit(9)\n")
    command = [sys.executable, "-P", "-m", "ckptd.ctl", "import", "--from", "."]
    ended = subprocess.run(
        [*command, "--format", "dcp", "--to", str(tmp_path / "set")],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert not marker.exists()
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "set" / "model.safetensors").exists()
