"""A small pre-norm transformer over bytes. It knows nothing of parallelism: that is applied to it
from outside (parallelize.py).

Shapes: B batch, T positions, H heads, D model width, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from examples.torchtitan_style.config import Model as ModelArgs

__all__ = ["Transformer"]


class Block(nn.Module):
    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.n_heads = args.n_heads
        self.attention_norm, self.ffn_norm = nn.RMSNorm(args.dim), nn.RMSNorm(args.dim)
        self.qkv = nn.Linear(args.dim, 3 * args.dim, bias=False)
        self.out = nn.Linear(args.dim, args.dim, bias=False)
        self.up = nn.Linear(args.dim, 4 * args.dim, bias=False)
        self.down = nn.Linear(4 * args.dim, args.dim, bias=False)
        self.dropout = nn.Dropout(args.dropout)

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_BTD = x_BTD + self.dropout(self.attention(self.attention_norm(x_BTD)))
        hidden = nn.functional.silu(self.up(self.ffn_norm(x_BTD)))
        out: Tensor = x_BTD + self.dropout(self.down(hidden))
        return out

    def attention(self, x_BTD: Tensor) -> Tensor:
        B, T, D = x_BTD.shape
        heads = self.qkv(x_BTD).view(B, T, 3, self.n_heads, D // self.n_heads)
        q_BHTd, k_BHTd, v_BHTd = heads.permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(q_BHTd, k_BHTd, v_BHTd, is_causal=True)
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(B, T, D))
        return out


class Transformer(nn.Module):
    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(args.vocab_size, args.dim)
        self.positions = nn.Embedding(args.max_seq_len, args.dim)
        self.layers = nn.ModuleList(Block(args) for _ in range(args.n_layers))
        self.norm = nn.RMSNorm(args.dim)
        self.output = nn.Linear(args.dim, args.vocab_size, bias=False)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        places_T = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
        x_BTD = self.tok_embeddings(tokens_BT) + self.positions(places_T)
        for layer in self.layers:
            x_BTD = layer(x_BTD)
        logits_BTV: Tensor = self.output(self.norm(x_BTD))
        return logits_BTV
