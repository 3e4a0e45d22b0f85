"""Tiny decoder models with random weights, saved as transformers saves them; and its own answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

__all__ = ["KINDS", "VOCABULARY", "greedy", "save_tiny"]

VOCABULARY = 61
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.4,
    "tie_word_embeddings": False,
}
_MIXTURE = {"num_experts_per_tok": 2}
_MORE: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": False, "tie_word_embeddings": True},
    "qwen2": {},
    "qwen3": {},
    "mistral": {"sliding_window": 11},
    "mixtral": {**_MIXTURE, "num_local_experts": 5, "sliding_window": None},
    "qwen3_moe": {
        **_MIXTURE,
        "num_experts": 6,
        "moe_intermediate_size": 20,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
        "num_hidden_layers": 3,
    },
}
KINDS = tuple(_MORE)


def save_tiny(kind: str, folder: Path, *, seed: int = 3, **more: Any) -> Path:
    """Make a model of a family, with these sizes changed, and save it."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(kind, **(_SIZES | _MORE[kind] | more))
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, each in model.named_parameters():  # biases and norms begin as zeros and ones
        if each.dim() == 1:
            torch.nn.init.uniform_(each, 0.5, 1.5) if "norm" in name else torch.nn.init.normal_(each, std=0.3)
    model.save_pretrained(folder)
    return folder


def greedy(folder: Path, prompt: tuple[int, ...], most: int) -> tuple[list[int], torch.Tensor]:
    """What transformers generates, and the logits of each new token."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    tokens, logits = list(prompt), []
    with torch.inference_mode():
        for _ in range(most):
            last = model(torch.tensor([tokens]), use_cache=False).logits[0, -1]
            logits.append(last)
            tokens.append(int(last.argmax()))
    return tokens[len(prompt) :], torch.stack(logits)
