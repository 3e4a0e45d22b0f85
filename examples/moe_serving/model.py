"""A decoder model with random weights, written as transformers would save it; bytes are its tokens."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

__all__ = ["VOCABULARY", "Sizes", "save_model"]

VOCABULARY = 256


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of a Qwen3 mixture of experts; without ``experts`` its MLPs are dense, with ``columns``."""

    layers: int = 4
    hidden: int = 64
    kv_heads: int = 8
    head_dim: int = 16
    experts: int = 8
    columns: int = 64


def save_model(folder: Path, sizes: Sizes, *, seed: int = 0) -> Path:
    """Write the model into a new folder."""
    folder.mkdir(parents=True)
    heads, width = 2 * sizes.kv_heads, sizes.hidden
    config = {
        "model_type": "qwen3_moe" if sizes.experts else "qwen3",
        "vocab_size": VOCABULARY,
        "hidden_size": width,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": heads,
        "num_key_value_heads": sizes.kv_heads,
        "head_dim": sizes.head_dim,
        "intermediate_size": sizes.columns,
        "moe_intermediate_size": sizes.columns,
        "num_experts": sizes.experts,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "rms_norm_eps": 1e-6,
    }
    (folder / "config.json").write_text(json.dumps(config))
    draw, tensors = torch.Generator().manual_seed(seed), dict[str, Tensor]()

    def add(name: str, *shape: int) -> None:
        if len(shape) == 1:
            tensors[name] = 1 + 0.1 * torch.randn(shape, generator=draw)
        else:
            tensors[name] = torch.randn(shape, generator=draw) * (2 / shape[1]) ** 0.5

    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        add(name, VOCABULARY, width)
    add("model.norm.weight", width)
    for layer in range(sizes.layers):
        prefix = f"model.layers.{layer}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            add(f"{prefix}{name}.weight", width)
        attention = f"{prefix}self_attn."
        for name, count in (("q", heads), ("k", sizes.kv_heads), ("v", sizes.kv_heads)):
            add(f"{attention}{name}_proj.weight", count * sizes.head_dim, width)
        add(f"{attention}o_proj.weight", width, heads * sizes.head_dim)
        for name in ("q_norm", "k_norm"):
            add(f"{attention}{name}.weight", sizes.head_dim)
        if sizes.experts:
            add(f"{prefix}mlp.gate.weight", sizes.experts, width)
        for expert in [f"experts.{e}." for e in range(sizes.experts)] or [""]:
            for name in ("gate", "up"):
                add(f"{prefix}mlp.{expert}{name}_proj.weight", sizes.columns, width)
            add(f"{prefix}mlp.{expert}down_proj.weight", width, sizes.columns)
    _write(folder / "model.safetensors", tensors)
    return folder


def _write(path: Path, tensors: dict[str, Tensor]) -> None:
    """A file of safetensors: the length of a header of JSON, the header, and all bytes."""
    header, end = {}, 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with path.open("wb") as sink:
        sink.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors.values():
            sink.write(tensor.contiguous().numpy().tobytes())
