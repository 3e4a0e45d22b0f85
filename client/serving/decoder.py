"""The forward of a decoder model on one of n devices: its units' parts of each layer, summed over devices.

**Bits do not depend on n.** A device computes the output of each of its units by itself: of a KV head with
its query heads and their columns of ``o_proj``, of a block of MLP columns, of an expert for the tokens that
chose it. All devices get all of these *parts* and sum them in the order of the units, whoever computed them.
And nothing that is computed depends on what else is in the batch: each request's piece of tokens is computed
by itself, always from the same position on and equally long (`ServingDevice`). So a request has the same
tokens on eight devices, on seven, and after a part of it was computed again.

The price is traffic: a layer sends as many rows as it has units, and not one. With ``ordered=False`` each
device sums its own parts first. Then logits differ by rounding where units are grouped in another way.

Shapes: T tokens of a piece, H the width of the residual stream, D a head's, G query heads of a KV head.

Source: the models' own papers, and their implementations in transformers, with which tests compare.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ckptd.client.serving.device_group import DeviceGroup
from ckptd.client.serving.kv_cache import KvCache
from ckptd.client.serving.weight_files import DeviceWeights, ModelFiles
from ckptd.core.serving.served_model import ServedModel, UnitKind
from ckptd.core.serving.server_layout import ServerLayout

_ROUTERS = {"mixtral": "block_sparse_moe.gate.weight", "qwen3_moe": "mlp.gate.weight"}


@dataclass(frozen=True, slots=True)
class Piece:
    """Neighbouring tokens of a request that are computed together.

    Attributes:
        start: position of the first one; KV of all before it is there.
        homes: the request's devices for shared heads.
    """

    request: str
    start: int
    tokens: tuple[int, ...]
    homes: tuple[int, ...] = ()

    @property
    def end(self) -> int:
        """Position behind the last one."""
        return self.start + len(self.tokens)


@dataclass(frozen=True, slots=True)
class DecoderFacts:
    """What of a model's configuration is no size.

    Attributes:
        window: each token sees so many, itself among them; 0: all before it.
        chosen: experts of each token.
        normed: the weights of a token's experts are divided by their sum.
        head_norms: queries and keys of each head are normed.
    """

    eps: float
    theta: float
    window: int = 0
    chosen: int = 0
    normed: bool = False
    head_norms: bool = False

    @classmethod
    def of_config(cls, config: Mapping[str, Any]) -> DecoderFacts:
        """Read a Hugging Face ``config.json``.

        Raises:
            ValueError: it has what is not computed here.
        """
        family = str(config["model_type"])
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        if (kind := rope.get("rope_type", rope.get("type", "default"))) != "default":
            raise ValueError(f"rotary positions of type {kind!r} are not computed here, only 'default'")
        if rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0)) != 1.0:
            raise ValueError("partial rotary positions are not computed here")
        if config.get("hidden_act", "silu") != "silu":
            raise ValueError(f"hidden_act is {config['hidden_act']!r}: only 'silu' is computed here")
        if config.get("use_sliding_window"):
            raise ValueError("use_sliding_window: layers with different windows are not computed here")
        windowed = family in ("mistral", "mixtral")
        return cls(
            eps=float(config.get("rms_norm_eps", 1e-6)),
            theta=float(rope.get("rope_theta", config.get("rope_theta", 10_000.0))),
            window=int(config.get("sliding_window") or 0) if windowed else 0,
            chosen=int(config.get("num_experts_per_tok") or 0),
            normed=family == "mixtral" or bool(config.get("norm_topk_prob")),
            head_norms=family.startswith("qwen3"),
        )


class Decoder:
    """A model on one device.

    Args:
        device: its number.
        ordered: sums do not depend on the number of devices.
        unit_s: how long a unit of one token lasts at least, as if on a slower device (for demos and
            benchmarks on shared processors; 0: as long as it takes).
    """

    def __init__(
        self,
        device: int,
        weights: DeviceWeights,
        cache: KvCache,
        *,
        ordered: bool = True,
        unit_s: float = 0.0,
    ) -> None:
        files: ModelFiles = weights.files
        self._me, self._weights, self._cache, self._ordered = device, weights, cache, ordered
        self._model: ServedModel = files.model
        self._facts = DecoderFacts.of_config(files.config)
        half = torch.arange(0, self._model.head_dim, 2, dtype=torch.float32) / self._model.head_dim
        self._frequencies = (1.0 / self._facts.theta**half).to(weights.device)
        self._head = "lm_head.weight" if files.has("lm_head.weight") else "model.embed_tokens.weight"
        self._unit_s, self._units = unit_s, 0

    @torch.inference_mode()
    def forward(self, pieces: Sequence[Piece], layout: ServerLayout, group: DeviceGroup) -> list[Tensor]:
        """Compute pieces of different requests, and add their KV to the cache.

        Returns:
            Of each piece, the logits of its last token: float32, on the CPU, alike on all devices.
        """
        embedding = self._weights.whole("model.embed_tokens.weight")
        hidden = [
            F.embedding(torch.tensor(each.tokens, device=embedding.device), embedding) for each in pieces
        ]
        turns = [self._turn(each) for each in pieces]
        for layer in range(self._model.layers):
            prefix = f"model.layers.{layer}."
            normed = [self._norm(each, prefix + "input_layernorm.weight") for each in hidden]
            parts = self._attention(layer, layout, pieces, normed, turns)
            hidden = self._added(hidden, parts, group)
            normed = [self._norm(each, prefix + "post_attention_layernorm.weight") for each in hidden]
            sparse = layer in self._model.expert_layers
            parts = (self._experts if sparse else self._columns)(layer, layout, normed)
            hidden = self._added(hidden, parts, group)
        last = [self._norm(each[-1:], "model.norm.weight") for each in hidden]
        return [F.linear(each, self._weights.whole(self._head))[0].float().cpu() for each in last]

    # -- units -----------------------------------------------------------------------------------

    def _attention(
        self,
        layer: int,
        layout: ServerLayout,
        pieces: Sequence[Piece],
        normed: Sequence[Tensor],
        turns: Sequence[tuple[Tensor, Tensor]],
    ) -> list[_Part]:
        parts = []
        for at, (piece, x, turn) in enumerate(zip(pieces, normed, turns, strict=True)):
            for head in range(self._model.kv_heads):
                holder = layout.heads.holder(layer, head, piece.homes)
                output = self._head_output(layer, head, piece, x, turn) if holder == self._me else None
                parts.append(_Part(at, head, holder, None, x.shape[0], output))
        return parts

    def _head_output(
        self, layer: int, head: int, piece: Piece, x: Tensor, turn: tuple[Tensor, Tensor]
    ) -> Tensor:
        """``[T, H]`` of a KV head with its query heads."""
        self._units += len(piece.tokens)
        tensors = self._weights.unit(UnitKind.HEAD, layer, head)
        *projections, out = tensors
        if self._model.attention_bias:
            wq, bq, wk, bk, wv, bv = projections
        else:
            (wq, wk, wv), bq, bk, bv = projections, None, None, None
        size, dim = x.shape[0], self._model.head_dim
        q = F.linear(x, wq, bq).view(size, -1, dim)  # [T, G, D]
        k = F.linear(x, wk, bk).view(size, 1, dim)
        if self._facts.head_norms:
            prefix = f"model.layers.{layer}.self_attn."
            q, k = self._norm(q, prefix + "q_norm.weight"), self._norm(k, prefix + "k_norm.weight")
        kv = self._cache.head(piece.request, layer, head)
        kv[0, piece.start : piece.end] = _turned(k, turn)[:, 0]
        kv[1, piece.start : piece.end] = F.linear(x, wv, bv)
        keys, values = kv[0, : piece.end], kv[1, : piece.end]
        scores = _turned(q, turn).transpose(0, 1) @ keys.T / math.sqrt(dim)  # [G, T, end]
        if (hidden := self._hidden_from(piece, x.device)) is not None:
            scores = scores.masked_fill(hidden, -torch.inf)
        seen = torch.softmax(scores, -1, dtype=torch.float32).to(values.dtype) @ values
        return F.linear(seen.transpose(0, 1).reshape(size, -1), out)

    def _hidden_from(self, piece: Piece, device: torch.device) -> Tensor | None:
        """``[T, end]``: which tokens are not seen from which; None: each is seen."""
        window = self._facts.window
        if len(piece.tokens) == 1 and not 0 < window < piece.end:
            return None
        here = torch.arange(piece.start, piece.end, device=device)[:, None]
        there = torch.arange(piece.end, device=device)[None]
        hidden = there > here
        return hidden | (there <= here - window) if window else hidden

    def _columns(self, layer: int, layout: ServerLayout, normed: Sequence[Tensor]) -> list[_Part]:
        placed = layout.placements[UnitKind.COLUMNS]
        owners = placed.owners[self._model.layers_of(UnitKind.COLUMNS).index(layer)]
        parts = []
        for at, x in enumerate(normed):
            for unit, owner in enumerate(owners):
                output = self._mlp(UnitKind.COLUMNS, layer, unit, x) if owner == self._me else None
                parts.append(_Part(at, unit, owner, None, x.shape[0], output))
        return parts

    def _experts(self, layer: int, layout: ServerLayout, normed: Sequence[Tensor]) -> list[_Part]:
        owners = layout.placements[UnitKind.EXPERT].owners[self._model.expert_layers.index(layer)]
        router = self._weights.whole(f"model.layers.{layer}.{_ROUTERS[self._model.family]}")
        parts = []
        for at, x in enumerate(normed):
            odds = torch.softmax(F.linear(x, router), -1, dtype=torch.float32)
            odds, chosen = torch.topk(odds, self._facts.chosen, -1)  # [T, chosen]
            if self._facts.normed:
                odds = odds / odds.sum(-1, keepdim=True)
            odds = odds.to(x.dtype)
            for unit in sorted(set(chosen.flatten().tolist())):
                rows, places = torch.where(chosen == unit)
                output = None
                if owners[unit] == self._me:
                    output = self._mlp(UnitKind.EXPERT, layer, unit, x[rows]) * odds[rows, places, None]
                parts.append(_Part(at, unit, owners[unit], rows, len(rows), output))
        return parts

    def _mlp(self, kind: UnitKind, layer: int, unit: int, x: Tensor) -> Tensor:
        self._units += x.shape[0]
        gate, up, down = self._weights.unit(kind, layer, unit)
        return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)

    # -- sums ------------------------------------------------------------------------------------

    def _added(self, hidden: Sequence[Tensor], parts: Sequence[_Part], group: DeviceGroup) -> list[Tensor]:
        """The residual stream with the sum of all parts."""
        if self._unit_s:
            time.sleep(self._unit_s * self._units)
        self._units = 0
        width, like = self._model.hidden, hidden[0]
        sums = [torch.zeros(each.shape, dtype=torch.float32) for each in hidden]
        if self._ordered:
            rows = {d: sum(p.rows for p in parts if p.holder == d) for d in group.devices}
            own = torch.zeros((max(rows.values()), width), dtype=like.dtype)
            cursor = 0
            for part in parts:
                if part.output is not None:
                    own[cursor : cursor + part.rows] = part.output
                    cursor += part.rows
            gathered = dict(zip(group.devices, group.gather(own), strict=True))
            cursors = dict.fromkeys(group.devices, 0)
            for part in parts:
                begin = cursors[part.holder]
                cursors[part.holder] = end = begin + part.rows
                _add(sums[part.piece], part.tokens, gathered[part.holder][begin:end])
        else:
            for part in parts:
                if part.output is not None:
                    _add(sums[part.piece], part.tokens, part.output.cpu())
            ends = list(accumulate((each.shape[0] for each in sums), initial=0))
            everyone = group.gather(torch.cat(sums))
            total = everyone[0].clone()
            for each in everyone[1:]:
                total += each
            sums = [total[a:b] for a, b in pairwise(ends)]
        return [h + s.to(like.dtype).to(like.device) for h, s in zip(hidden, sums, strict=True)]

    def _norm(self, x: Tensor, name: str) -> Tensor:
        exact = x.float()
        exact = exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + self._facts.eps)
        return self._weights.whole(name) * exact.to(x.dtype)

    def _turn(self, piece: Piece) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the rotary positions, ``[T, 1, D]``."""
        at = torch.arange(piece.start, piece.end, dtype=torch.float32, device=self._frequencies.device)
        angles = torch.cat([torch.outer(at, self._frequencies)] * 2, -1)[:, None]
        dtype = self._weights.files.dtype
        return angles.cos().to(dtype), angles.sin().to(dtype)


@dataclass(slots=True)
class _Part:
    """The output of a unit for a piece.

    Attributes:
        holder: the device that has computed it.
        tokens: of the piece, to which it is added; None: to all of them.
        output: None on other devices.
    """

    piece: int
    unit: int
    holder: int
    tokens: Tensor | None
    rows: int
    output: Tensor | None


def _add(total: Tensor, tokens: Tensor | None, rows: Tensor) -> None:
    if tokens is None:
        total += rows
    else:
        total.index_add_(0, tokens.cpu(), rows.float())


def _turned(x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary positions: each pair of a head's halves is turned by its token's angle."""
    cos, sin = turn
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin
