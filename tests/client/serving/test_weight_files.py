"""Each device reads its units, and nothing else; files that cannot be served are refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load, load_file, save_file

from ckptd.client.serving.weight_files import DeviceWeights, ModelFiles
from ckptd.core.serving.loss_plan import WeightFetch
from ckptd.core.serving.served_model import UnitKind
from ckptd.core.serving.server_layout import place_server
from tests.client.serving.tiny_models import save_tiny

Models = Callable[[str], Path]


def copied(folder: Path, into: Path) -> Path:
    shutil.copytree(folder, into)
    return into / "model.safetensors"


def test_units_are_the_rows_and_columns_of_whole_tensors(tiny_model: Models) -> None:
    files = ModelFiles(tiny_model("qwen2"))
    whole = load_file(tiny_model("qwen2") / "model.safetensors")
    prefix = "model.layers.1.self_attn."
    q, bq, k, bk, v, bv, o = files.unit(UnitKind.HEAD, 1, 2)
    assert torch.equal(q, whole[prefix + "q_proj.weight"][32:48])
    assert torch.equal(bq, whole[prefix + "q_proj.bias"][32:48])
    assert torch.equal(k, whole[prefix + "k_proj.weight"][16:24])
    assert torch.equal(bk, whole[prefix + "k_proj.bias"][16:24])
    assert torch.equal(v, whole[prefix + "v_proj.weight"][16:24])
    assert torch.equal(bv, whole[prefix + "v_proj.bias"][16:24])
    assert torch.equal(o, whole[prefix + "o_proj.weight"][:, 32:48])
    block = files.model.column_block
    gate, _, down = files.unit(UnitKind.COLUMNS, 0, 3)
    assert torch.equal(gate, whole["model.layers.0.mlp.gate_proj.weight"][3 * block : 4 * block])
    assert torch.equal(down, whole["model.layers.0.mlp.down_proj.weight"][:, 3 * block : 4 * block])
    assert torch.equal(files.tensor("model.norm.weight"), whole["model.norm.weight"])


def test_an_expert_is_read_as_a_whole(tiny_model: Models) -> None:
    files = ModelFiles(tiny_model("mixtral"))
    whole = load_file(tiny_model("mixtral") / "model.safetensors")
    before = files.read_bytes
    gate, up, down = files.unit(UnitKind.EXPERT, 1, 4)
    prefix = "model.layers.1.block_sparse_moe.experts.4."
    for found, name in ((gate, "w1"), (up, "w3"), (down, "w2")):
        assert torch.equal(found, whole[f"{prefix}{name}.weight"])
    assert files.read_bytes - before == files.model.unit_bytes(UnitKind.EXPERT)


def test_the_identity_is_that_of_the_weights(tiny_model: Models, tmp_path: Path) -> None:
    first = ModelFiles(tiny_model("llama")).identity
    copied(tiny_model("llama"), tmp_path / "same")
    assert ModelFiles(tmp_path / "same").identity == first
    save_tiny("llama", tmp_path / "other", seed=4)
    assert ModelFiles(tmp_path / "other").identity != first


def test_a_model_in_several_files_is_read_from_all(tiny_model: Models, tmp_path: Path) -> None:
    path = copied(tiny_model("llama"), tmp_path / "split")
    whole = load_file(path)
    path.unlink()
    names = sorted(whole)
    for number, part in enumerate((names[::2], names[1::2])):
        save_file({name: whole[name] for name in part}, path.with_name(f"part{number}.safetensors"))
    one, two = ModelFiles(tiny_model("llama")), ModelFiles(tmp_path / "split")
    for unit in range(4):
        for a, b in zip(one.unit(UnitKind.HEAD, 0, unit), two.unit(UnitKind.HEAD, 0, unit), strict=True):
            assert torch.equal(a, b)


def test_files_that_cannot_be_served_are_refused(tiny_model: Models, tmp_path: Path) -> None:
    path = copied(tiny_model("llama"), tmp_path / "bad")
    content, whole = path.read_bytes(), load(path.read_bytes())
    served = ModelFiles(path.parent)
    with pytest.raises(ValueError, match="has no nothing: it is of another model"):
        ModelFiles(path.parent).tensor("nothing")
    path.write_bytes(content[:-4])
    with pytest.raises(ValueError, match="is cut"):
        ModelFiles(path.parent)
    with pytest.raises(ValueError, match="was cut: "):
        served.tensor(max(whole, key=lambda name: served._header[name]["data_offsets"][1]))
    path.write_bytes(b"no such file at all")
    with pytest.raises(ValueError, match="is no safetensors file"):
        ModelFiles(path.parent)
    first = next(iter(whole))
    save_file(whole | {first: whole[first].bfloat16()}, path)
    with pytest.raises(ValueError, match="all must be of one kind"):
        ModelFiles(path.parent)
    path.unlink()
    with pytest.raises(ValueError, match="save the model with save_pretrained first"):
        ModelFiles(path.parent)


def test_a_model_whose_heads_cannot_be_split_is_refused(tiny_model: Models, tmp_path: Path) -> None:
    path = copied(tiny_model("llama"), tmp_path / "bad").with_name("config.json")
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"num_key_value_heads": 3}))
    with pytest.raises(ValueError, match="the heads of this model cannot be split"):
        ModelFiles(path.parent)
    path.write_text(json.dumps(config | {"kv_lora_rank": 16}))
    with pytest.raises(ValueError, match="cannot be split: all read one compressed KV"):
        ModelFiles(path.parent)


def test_a_device_reads_its_units_ahead_and_gives_up_others(tiny_model: Models) -> None:
    files = ModelFiles(tiny_model("llama"))
    weights, layout = DeviceWeights(files), place_server(files.model, [0, 1])
    weights.begin_reading([WeightFetch(0, UnitKind.HEAD, 0, (0, 1)), WeightFetch(0, UnitKind.HEAD, 1, (3,))])
    q, *_ = weights.unit(UnitKind.HEAD, 1, 3)  # whether or not the thread has come to it
    assert weights.unit(UnitKind.HEAD, 1, 3)[0] is q
    for unit in (0, 1):
        weights.unit(UnitKind.HEAD, 0, unit)
    size = files.model.unit_bytes(UnitKind.HEAD)
    assert weights.held_bytes == 3 * size
    weights.keep(layout, 0)  # the second device has head 3
    assert weights.held_bytes == 2 * size
    files.load_ahead()
