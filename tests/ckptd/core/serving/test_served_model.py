"""Ranges of bytes are exactly the rows and columns of units; what cannot be split is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ckptd.core.serving.served_model import ServedModel, UnitKind, byte_runs, model_of_config
from tests.ckptd.core.serving.models import decoder

MIXTURE: dict[str, Any] = {"family": "qwen3_moe", "experts": 5, "expert_columns": 6, "expert_layers": (1,)}
CONFIG = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "hidden_size": 32,
    "head_dim": 16,
    "intermediate_size": 48,
    "moe_intermediate_size": 12,
    "num_local_experts": 6,
    "mlp_only_layers": [1],
    "decoder_sparse_step": 1,
}


def header(model: ServedModel) -> dict[str, Any]:
    """Of a file with all its split tensors, one behind the other, after 100 bytes of others."""
    at, found = 100, {}
    for kind in UnitKind:
        for layer in model.layers_of(kind):
            for tensor in model.split_tensors(kind, layer):
                size = int(np.prod(tensor.shape)) * model.element_bytes
                found[tensor.name] = {"shape": list(tensor.shape), "data_offsets": [at, at + size]}
                at += size
    return found


@pytest.mark.parametrize("more", [{}, MIXTURE, {"attention_bias": True, "element_bytes": 4}])
def test_units_are_all_of_the_split_tensors_and_overlap_nowhere(more: dict[str, Any]) -> None:
    model = decoder(**more)
    stored = header(model)
    read = np.zeros(max(each["data_offsets"][1] for each in stored.values()), dtype=int)
    for kind in UnitKind:
        for layer in model.layers_of(kind):
            for unit in range(model.units_of(kind)):
                runs = byte_runs(model, kind, layer, [unit], stored)
                for offset, size in (each for run in runs for each in run):
                    read[offset : offset + size] += 1
                assert sum(run.total for run in runs) == model.unit_bytes(kind)
    assert not read[:100].any()
    assert (read[100:] == 1).all()


def test_ranges_are_what_slicing_a_tensor_gives() -> None:
    """Rows of a KV head's query heads in q, columns in o; neighbours are one range."""
    model, layer = decoder(), 1
    stored = header(model)
    data = np.random.default_rng(3).integers(0, 255, 10_000, dtype=np.uint8)
    runs = byte_runs(model, UnitKind.HEAD, layer, [2, 1], stored)
    parts = {run.name.split(".")[-2]: run for run in runs}
    assert list(parts) == ["q_proj", "k_proj", "v_proj", "o_proj"]
    for name, rows, columns in (
        ("q_proj", slice(8, 24), slice(0, 10)),
        ("k_proj", slice(4, 12), slice(0, 10)),
        ("o_proj", slice(0, 10), slice(8, 24)),
    ):
        shape, (begin, end) = stored[parts[name].name].values()
        tensor = data[begin:end].view(np.uint16).reshape(shape)
        got = b"".join(data[at : at + size].tobytes() for at, size in parts[name])
        assert got == tensor[rows, columns].tobytes()
    assert (parts["q_proj"].count, parts["o_proj"].count) == (1, 10)
    apart = [run.name for run in byte_runs(model, UnitKind.COLUMNS, 0, [0, 2], stored)]
    assert len(apart) == 6, "two ranges in each of gate, up and down"
    assert all(run.count == 1 for run in byte_runs(model, UnitKind.HEAD, 0, [0, 1, 2], stored))


def test_an_expert_is_three_tensors() -> None:
    model = decoder(**MIXTURE)
    names = [run.name for run in byte_runs(model, UnitKind.EXPERT, 1, [3], header(model))]
    assert names == [f"model.layers.1.mlp.experts.3.{part}_proj.weight" for part in ("gate", "up", "down")]
    assert (model.layers_of(UnitKind.COLUMNS), model.units_of(UnitKind.EXPERT)) == ((0,), 5)


def test_a_file_of_another_model_is_refused() -> None:
    model = decoder()
    other = header(decoder(hidden=20))
    with pytest.raises(ValueError, match=r"has shape \[24, 20\] and 960 bytes .* has \[24, 10\] and 480"):
        byte_runs(model, UnitKind.HEAD, 0, [0], other)
    with pytest.raises(ValueError, match=r"the file has no model\.layers\.0\.self_attn\.q_proj\.weight"):
        byte_runs(model, UnitKind.HEAD, 0, [0], {})
    with pytest.raises(ValueError, match="layer 0 has no expert units"):
        byte_runs(model, UnitKind.EXPERT, 0, [0], {})
    with pytest.raises(ValueError, match=r"head units \[-1, 3\] of layer 0: it has 3"):
        byte_runs(model, UnitKind.HEAD, 0, [-1, 0, 3], header(model))


def test_configurations() -> None:
    model = model_of_config(CONFIG, element_bytes=4)
    assert (model.kv_heads, model.query_heads, model.head_dim) == (2, 8, 16)
    assert (model.expert_layers, model.dense_layers, model.experts) == ((0, 2, 3), (1,), 6)
    mixtral = model_of_config(CONFIG | {"model_type": "mixtral"})
    assert (mixtral.columns, mixtral.expert_columns, mixtral.dense_layers) == (0, 48, ())
    name = mixtral.split_tensors(UnitKind.EXPERT, 2)[1].name
    assert name == "model.layers.2.block_sparse_moe.experts.0.w3.weight"
    assert model_of_config(CONFIG | {"model_type": "qwen2"}).attention_bias


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"model_type": "deepseek_v3", "kv_lora_rank": 512}, "heads of 'deepseek_v3' cannot be split"),
        ({"model_type": "gpt2"}, "the tensors of 'gpt2' are not known: llama, "),
        ({"model_type": "llama", "mlp_bias": True}, "has biases"),
        ({"num_key_value_heads": 3}, "8 query heads do not divide among 3 KV heads"),
        ({"num_hidden_layers": 0}, "layers is 0: it must be at least 1"),
    ],
)
def test_configurations_that_cannot_be_split(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        model_of_config(CONFIG | wrong)


def test_configurations_and_sizes_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="of 'llama' has no hidden_size"):
        model_of_config({"model_type": "llama", "num_hidden_layers": 1, "num_attention_heads": 1})
    with pytest.raises(ValueError, match="12 columns of the MLP are not a multiple of column_block 5"):
        decoder(column_block=5)
    with pytest.raises(ValueError, match=r"expert_layers \(2,\): pass numbers of the 2 layers"):
        decoder(**(MIXTURE | {"expert_layers": (2,)}))
    with pytest.raises(ValueError, match="columns is 0: it must be at least 1"):
        decoder(columns=0)
