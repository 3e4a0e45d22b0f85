"""Tiny models of transformers, and what each of some ranks does with one."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ckptd.client.elastic import ElasticExperts, replace_moe_blocks

__all__ = [
    "FAMILIES",
    "OTHERS",
    "UNKNOWN",
    "fused_again",
    "is_experts",
    "losses",
    "model_of",
    "run_hf",
]

_COMMON = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "output_router_logits": True,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3_moe": ("Qwen3Moe", {**_EXPERTS, "head_dim": 8, "norm_topk_prob": True}),
}
# Found by form, too.
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2_moe": ("Qwen2Moe", {**_EXPERTS, "shared_expert_intermediate_size": 8}),
    "olmoe": ("Olmoe", {"num_experts": 4, "num_experts_per_tok": 2}),
    "deepseek_v3": (
        "DeepseekV3",
        {
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
            "moe_intermediate_size": 8,
            "first_k_dense_replace": 0,
            "q_lora_rank": 8,
            "kv_lora_rank": 8,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 4,
            "v_head_dim": 8,
        },
    ),
}
# Of other forms: not to be taken for the one that is known.
UNKNOWN: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt_oss": ("GptOss", {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}),
    "llama4": (
        "Llama4",
        {"num_local_experts": 4, "interleave_moe_layer_step": 1, "intermediate_size_mlp": 24},
    ),
}
_PLACEMENT = [
    [[1, 0, 2, 0], [1, 1, 0, 0], [0, 1, 0, 1]],
    [[1, 1, 1, 1], [0, 0, 1, 0], [0, 0, 0, 1]],
]


def model_of(family: str, dtype: torch.dtype, seed: int = 0) -> Any:
    """Its weights follow from the seed."""
    with warnings.catch_warnings():
        # transformers' own, at import.
        warnings.simplefilter("ignore")
        import transformers

    name, options = {**FAMILIES, **OTHERS, **UNKNOWN}[family]
    kind = "Llama4TextConfig" if family == "llama4" else f"{name}Config"
    config = getattr(transformers, kind)(**_COMMON, **options)
    if dtype is torch.float64:
        config._experts_implementation = "eager"  # torch's grouped_mm has no float64
    torch.manual_seed(seed)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    with torch.no_grad():
        for param in model.parameters():
            if param.ndim > 1:
                param.mul_(10)  # so that experts matter
    return model.to(dtype)


def is_experts(module: nn.Module) -> bool:
    """Whether it is the module with all experts of a block."""
    return "gate_up_proj" in module._parameters


def losses(model: Any, rank: int) -> dict[str, Tensor]:
    """What a batch of this rank gives, after its backward."""
    generator = torch.Generator().manual_seed(30 + rank)
    ids = torch.randint(0, 32, (2, (9, 2, 6)[rank]), generator=generator)
    out = model(input_ids=ids, labels=ids)
    out.loss.backward()
    found = {"loss": out.loss.detach(), "logits": out.logits.detach()}
    if getattr(out, "aux_loss", None) is not None:
        found["aux_loss"] = out.aux_loss.detach()
    for number, logits in enumerate(getattr(out, "router_logits", None) or ()):
        found[f"router_logits.{number}"] = logits.detach()
    return found


def fused_again(
    grads: Mapping[str, Tensor | None], layers: Mapping[str, ElasticExperts]
) -> dict[str, Tensor | None]:
    """Gradients by the names of the model that was not replaced; one rank holds all experts."""
    found = {n: g for n, g in grads.items() if not n.startswith(tuple(f"{n}.experts." for n in layers))}
    for name, layer in layers.items():
        for leaf in ("gate_up_proj", "down_proj"):
            rows = []
            for expert, shapes in enumerate(layer.agreed.shapes_E):
                row = grads[f"{name}.experts.{expert}.{leaf}"]
                size = next(shape.size for shape in shapes if shape.name == leaf)
                rows.append(torch.zeros(size) if row is None else row)
            dtype = next((row.dtype for row in rows), torch.float32)
            found[f"{name}.{leaf}"] = torch.stack([row.to(dtype) for row in rows])
    return found


def run_hf(rank: int, family: str, folder: str) -> None:
    """A rank's batch through an elastic model."""
    model = model_of(family, torch.float64)
    layers = replace_moe_blocks(model, _PLACEMENT)
    found = losses(model, rank)
    for layer in layers.values():
        layer.sync_gradients()
    grads = {name: param.grad for name, param in model.named_parameters()}
    # An expert that no token of any rank asked for has none.
    kept = {name: grad for name, grad in grads.items() if grad is not None}
    torch.save({"losses": found, "grads": kept}, Path(folder) / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
