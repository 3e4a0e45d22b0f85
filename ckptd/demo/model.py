"""A small byte-level transformer whose feed-forward layers are mixtures of experts.

Everything that makes a bit-exact repeat hard is switched on: dropout, noisy top-2 gates, tied
embeddings, experts that get no token in some iterations, bf16 weights where the CPU has them.

Shapes: B batch, T positions, D width, E experts, K experts per token, N = B * T tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

PRECISIONS = {"bf16": "bf16 with fp32 masters", "fp32": "fp32"}
# In /proc/cpuinfo: AVX-512 and AMX on x86-64, Neon and SVE on arm64.
_BF16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16", "svebf16"})

# bf16 kernels on CPU are generated for each shape: without rounding up, every iteration would pay for
# new ones (measured on two cores: 265 ms an iteration without, 150 ms with it).
PAD_TOKENS = 64


@dataclass(frozen=True, slots=True)
class MoEConfig:
    vocab_size: int = 256
    context: int = 128
    width: int = 160
    num_layers: int = 4
    num_heads: int = 5
    num_experts: int = 8
    experts_per_token: int = 2
    expert_hidden: int = 320
    dropout: float = 0.1
    balance_weight: float = 0.01


def native_precision(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """``"bf16"`` if the CPU multiplies it, and oneDNN may use that (``ONEDNN_MAX_CPU_ISA`` can forbid it).

    Elsewhere bf16 is emulated, and takes ten times as long.
    """
    try:
        text = cpuinfo.read_text()
    except OSError:
        return "fp32"
    built = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    native = built and _BF16_FLAGS.intersection(text.split())
    return "bf16" if native and torch.ops.mkldnn._is_mkldnn_bf16_supported() else "fp32"


class Expert(nn.Module):
    """One feed-forward expert; a token is computed by it only when its gate says so."""

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.width, config.expert_hidden)
        self.down = nn.Linear(config.expert_hidden, config.width)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x_ND: Tensor) -> Tensor:
        out: Tensor = self.down(self.dropout(F.gelu(self.up(x_ND))))
        return out


class MoELayer(nn.Module):
    """Top-k of E experts with a noisy gate; returns its output and the load-balancing loss."""

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.num_experts = config.num_experts
        self.experts_per_token = config.experts_per_token
        self.gate = nn.Linear(config.width, config.num_experts, bias=False)
        self.gate_noise = nn.Linear(config.width, config.num_experts, bias=False)
        self.experts = nn.ModuleList(Expert(config) for _ in range(config.num_experts))

    def forward(self, x_ND: Tensor) -> tuple[Tensor, Tensor]:
        logits_NE = self.gate(x_ND).float()
        noise_NE = F.softplus(self.gate_noise(x_ND).float())
        logits_NE = logits_NE + torch.randn_like(logits_NE) * noise_NE * 0.1
        probs_NE = logits_NE.softmax(dim=-1)
        weight_NK, chosen_NK = probs_NE.topk(self.experts_per_token, dim=-1)
        weight_NK = (weight_NK / weight_NK.sum(dim=-1, keepdim=True)).to(x_ND.dtype)
        out_ND = torch.zeros_like(x_ND)
        for index, expert in enumerate(self.experts):
            token, rank = (chosen_NK == index).nonzero(as_tuple=True)
            num_tokens = token.numel()
            if num_tokens == 0:
                continue
            padded_ND = F.pad(x_ND[token], (0, 0, 0, -num_tokens % PAD_TOKENS))
            contribution = expert(padded_ND)[:num_tokens] * weight_NK[token, rank, None]
            out_ND = out_ND.index_add(0, token, contribution)
        return out_ND, self._balance_loss(probs_NE, chosen_NK)

    def _balance_loss(self, probs_NE: Tensor, chosen_NK: Tensor) -> Tensor:
        """The usual product of token share and gate probability: 1 when the load is even."""
        share_E = F.one_hot(chosen_NK, self.num_experts).float().mean(dim=(0, 1))
        return self.num_experts * (share_E * probs_NE.mean(dim=0)).sum()


class Block(nn.Module):
    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.attention_norm = nn.LayerNorm(config.width)
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.projection = nn.Linear(config.width, config.width)
        self.moe_norm = nn.LayerNorm(config.width)
        self.moe = MoELayer(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
        x_BTD = x_BTD + self.dropout(self._attend(self.attention_norm(x_BTD)))
        out_ND, balance = self.moe(self.moe_norm(x_BTD).flatten(0, 1))
        return x_BTD + self.dropout(out_ND.view_as(x_BTD)), balance

    def _attend(self, x_BTD: Tensor) -> Tensor:
        batch, length, width = x_BTD.shape
        heads = self.qkv(x_BTD).view(batch, length, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True)
        out: Tensor = self.projection(mixed.transpose(1, 2).reshape(batch, length, width))
        return out


class MoETransformer(nn.Module):
    """Next-byte prediction; `forward` returns the training loss, balance term included."""

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocab_size, bias=False)
        for embedding in (self.embedding, self.positions):
            nn.init.normal_(embedding.weight, std=0.05)
        self.head.weight = self.embedding.weight

    def forward(self, inputs_BT: Tensor, targets_BT: Tensor) -> Tensor:
        positions_T = torch.arange(inputs_BT.shape[1], device=inputs_BT.device)
        x_BTD = self.dropout(self.embedding(inputs_BT) + self.positions(positions_T))
        balances = []
        for layer in self.layers:
            x_BTD, balance = layer(x_BTD)
            balances.append(balance)
        logits = self.head(self.norm(x_BTD)).float()
        loss = F.cross_entropy(logits.flatten(0, 1), targets_BT.flatten())
        return loss + self.config.balance_weight * torch.stack(balances).mean()
