"""Tiny random-weight models of Hugging Face transformers, unmodified, as jobs: imported by
``job.py`` for ``hf_…`` only.

All of these keep a layer's experts fused in ``[num_experts, …]`` parameters, so an expert is a set of rows.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import transformers
from torch.nn.utils import clip_grad_norm_

from tests.e2e.cases import LENGTH, VOCAB, Data, Job

__all__ = ["HF_CASES"]

_LAYERS, _EXPERTS, _WIDTH = 2, 4, 16
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": _WIDTH,
    "intermediate_size": 24,
    "num_hidden_layers": _LAYERS,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2 * LENGTH,
    "num_experts_per_tok": 2,
    "attention_dropout": 0.1,
    "output_router_logits": True,
    "router_aux_loss_coef": 0.02,
    "use_cache": False,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}


def _mixtral() -> Any:
    # The jitter multiplies by random numbers in training: one more consumer of the generators.
    config = transformers.MixtralConfig(**_SIZES, num_local_experts=_EXPERTS, router_jitter_noise=0.1)
    return transformers.MixtralForCausalLM(config)


def _qwen3_moe() -> Any:
    config = transformers.Qwen3MoeConfig(
        **_SIZES, num_experts=_EXPERTS, moe_intermediate_size=12, norm_topk_prob=True
    )
    return transformers.Qwen3MoeForCausalLM(config)


def _olmoe() -> Any:
    return transformers.OlmoeForCausalLM(transformers.OlmoeConfig(**_SIZES, num_experts=_EXPERTS))


def _deepseek_v3() -> Any:
    """One dense layer first, multi-head latent attention, shared experts, and a bias in the gate
    that is a buffer.
    """
    sizes = {k: v for k, v in _SIZES.items() if not k.startswith(("output_router", "router_aux"))}
    config = transformers.DeepseekV3Config(
        **{**sizes, "num_hidden_layers": _LAYERS + 1},
        moe_intermediate_size=12,
        n_routed_experts=_EXPERTS,
        n_shared_experts=1,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        kv_lora_rank=8,
        q_lora_rank=8,
        qk_rope_head_dim=4,
        qk_nope_head_dim=4,
        v_head_dim=8,
    )
    return transformers.DeepseekV3ForCausalLM(config)


def _gpt_oss() -> Any:
    """Biases per expert, transposed weights, attention sinks, alternating sliding windows."""
    config = transformers.GptOssConfig(**_SIZES, num_local_experts=_EXPERTS, head_dim=8, sliding_window=4)
    return transformers.GptOssForCausalLM(config)


def _body(autocast: bool) -> Callable[[Job, int, Callable[[str], None]], None]:
    def body(job: Job, step: int, at: Callable[[str], None]) -> None:
        tokens = next(job.state["data"])
        with torch.autocast("cpu", dtype=torch.bfloat16) if autocast else nullcontext():
            out = job.model(input_ids=tokens, labels=tokens)
        out.loss.backward()
        at("backward")
        clip_grad_norm_(job.model.parameters(), 0.5)
        job.optimizers[0].step()
        at("step")
        job.state["sched"].step()
        for gate in job.extra["gates"]:
            # Auxiliary-loss-free balancing, as DeepSeek-V3 is trained: the bias is a buffer that
            # user code updates.
            gate.e_score_correction_bias += 0.01 * torch.sign(torch.arange(_EXPERTS) - step % 4)
        job.optimizers[0].zero_grad()

    return body


def _case(model_of: Callable[[], Any], *, autocast: bool = False) -> Callable[[int], Job]:
    def build(seed: int) -> Job:
        torch.manual_seed(seed)
        model = model_of().train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
        job = Job(model, [optimizer], {"data": Data(), "sched": scheduler}, _body(autocast))
        job.extra["gates"] = [m for m in model.modules() if hasattr(m, "e_score_correction_bias")]
        torch.manual_seed(99)
        return job

    return build


HF_CASES: dict[str, Callable[[int], Job]] = {
    "hf_mixtral": _case(_mixtral),
    "hf_mixtral_autocast": _case(_mixtral, autocast=True),
    "hf_qwen3_moe": _case(_qwen3_moe),
    "hf_olmoe": _case(_olmoe),
    "hf_deepseek_v3": _case(_deepseek_v3),
    "hf_gpt_oss": _case(_gpt_oss),
}
