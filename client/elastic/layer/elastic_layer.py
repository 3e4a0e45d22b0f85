"""A mixture layer whose experts have any number of replicas on any ranks, equal to one with all
experts in one place.

Every rank has routed tokens and holds some experts. In a forward

1. the ranks exchange their number of tokens for each expert (``layer_check``), and each plans which
   rank computes which (``token_routing``);
2. tokens go to the ranks that compute them, all of them, without padding;
3. each expert computes its rows in one call, the results go back the same way, and are added up by weight.

Backward takes the same ways in the other direction. It leaves parts of an expert's gradient on the
ranks that hold the expert: ``sync_gradients`` adds them up (``replica_gradients``).

Shapes: ``T`` tokens of this rank, ``K`` choices of each, ``H`` their width, ``R`` ranks, ``E`` experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, Self

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn

from ckptd.client.elastic.layer.layer_check import (
    Inputs,
    LayerAgreement,
    agree,
    differing_replicas,
    digests_of,
    exchange_inputs,
)
from ckptd.client.elastic.layer.replica_gradients import ReplicaGradients
from ckptd.client.elastic.layer.token_routing import (
    Dispatcher,
    Route,
    RowExchange,
    plan_route,
    reorder,
    spread,
    swap_rows,
)
from ckptd.client.ranks.collectives import Collectives
from ckptd.errors import CorruptionError


class ElasticExperts(nn.Module):
    """The experts of one layer, spread over the ranks of a process group; making it is a collective call.

    ``layer(tokens, experts, weights)`` is, for each token of this rank, the sum over its choices of
    weight times the expert's output. All ranks call it, those without tokens with ``T = 0``, and
    all run backward through what it returns.

    Args:
        experts: the modules of this rank by the expert's number, or a ``ModuleList`` of all
            experts. Each maps ``[n, H]`` to ``[n, H]``, row by row; several replicas of an expert
            on one rank are one module. Their names are ``experts.<number>``.
        replicas_RE: replicas of each expert on every rank: a layer of ``split_over_ranks``.
        group: the process group, of gloo, NCCL or another backend with ``all_to_all_single``;
            default: that of all ranks.
        nodes: the number of each rank's node; tokens then leave a node only if it has no room for them.
        reduce: ``"mean"``: ``sync_gradients`` makes gradients of the mean over the ranks of their
            losses, as DDP does for the rest of the model; ``"sum"``: of the sum of the losses.
    Raises:
        ValueError: on all ranks, if on any of them: an expert has no holder; modules and
            ``replicas_RE`` do not fit; ranks have different placements, or replicas of an expert
            different parameters or weights (not checked on the meta device). On this rank alone, if
            there is no process group or the rank is not in it.
    """

    experts: nn.ModuleDict

    def __init__(
        self,
        experts: Mapping[int, nn.Module] | nn.ModuleList,
        replicas_RE: ArrayLike,
        *,
        group: Any = None,
        nodes: ArrayLike | None = None,
        reduce: Literal["mean", "sum"] = "mean",
    ) -> None:
        super().__init__()
        if not dist.is_available() or not dist.is_initialized():
            raise ValueError("no process group: call init_process_group() before ElasticExperts")
        if dist.get_rank(group) < 0:
            raise ValueError("this rank is not in group: only its ranks make the layer")
        if isinstance(experts, nn.ModuleList):
            experts = dict(enumerate(experts))
        self._agreed = agree(experts, replicas_RE, nodes, reduce, group)
        self._group = group
        self._rank = dist.get_rank(group)
        self._mean = reduce == "mean"
        # True if a state dict of the whole model has the experts as rows of tensors (``full_state_dict``).
        self.fused = False
        self._sharded = False
        self._hold(experts)
        self._loads_E = np.zeros(self.num_experts, dtype=np.int64)
        self._device = torch.device("cpu")

    @property
    def num_experts(self) -> int:
        """Of the layer, on all ranks."""
        return len(self._agreed.shapes_E)

    @property
    def group(self) -> Any:
        """The process group; None: that of all ranks."""
        return self._group

    @property
    def is_sharded(self) -> bool:
        """True if ``ExpertShards`` train the experts."""
        return self._sharded

    @property
    def agreed(self) -> LayerAgreement:
        """Placement, nodes, and the parameters of each expert: equal on all ranks."""
        return self._agreed

    @property
    def replicas_RE(self) -> NDArray[np.int64]:
        """``[R, E]``: the placement; read-only."""
        return self._agreed.replicas_RE

    def forward(self, tokens_TH: Tensor, experts_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """``[T, H]``: for every token the sum of its experts' outputs by weight; a collective call
        that waits for the device.

        Rows travel in the dtype of the tokens, and the sum is rounded to it. An expert computes its
        rows in one call: those of rank 0 first, those of one rank in the order of its batch.

        Args:
            tokens_TH: of the same dtype and width on all ranks; ``T`` may be 0.
            experts_TK: the numbers of the experts to which each token is routed.
            weights_TK: the weight of each.
        Raises:
            ValueError: on all ranks, if the input of any cannot be computed, or one has changed an
                expert's weights by gradients that were not summed.
        """
        inputs = exchange_inputs(
            tokens_TH,
            experts_TK,
            weights_TK,
            num_experts=self.num_experts,
            trained=self._gradients.trained,
            unsummed=self._gradients.changed_unsummed,
            group=self._group,
        )
        self._device = tokens_TH.device
        if self.training:
            self._loads_E += inputs.counts_RE.sum(axis=0)
        route = plan_route(experts_TK, self._dispatcher.share(inputs.counts))
        rows = spread(tokens_TH, route.sent, experts_TK.shape[1])
        by_pair = reorder(self._computed(rows, route, inputs), route.sent.undone())
        weighted = by_pair.view(*experts_TK.shape, tokens_TH.shape[1]) * weights_TK.unsqueeze(-1)
        return weighted.sum(1).to(tokens_TH.dtype)

    def sync_gradients(self) -> None:
        """Sum the gradients of every expert over its holders; a collective call, for all layers in
        the same order.

        Call it once before the optimizer's step (and before gradients are clipped), after the last
        backward if several add up. Until the next backward a second call does nothing. An expert
        without a gradient on any rank stays without.

        Raises:
            ValueError: the layer's gradients go to ``ExpertShards``.
        """
        if self._sharded:
            raise ValueError(
                "the gradients of this layer go to its ExpertShards: call step() of these instead "
                "of sync_gradients()"
            )
        self._gradients.sum(self._device)

    def take_loads(self) -> NDArray[np.int64]:
        """``[E]``: tokens of all ranks routed to each expert since the last call, while training; the
        same on all ranks.

        No collective call: forwards have counted. A recomputed forward (activation checkpointing)
        counts again.
        """
        taken, self._loads_E = self._loads_E, np.zeros_like(self._loads_E)
        return taken

    def check_replicas(self) -> None:
        """Compare the weights of all replicas, bit for bit; a collective call that reads all of them.

        Raises:
            CorruptionError: on all ranks, if replicas of an expert differ; names experts and ranks.
        """
        mine = {int(expert): digests_of(module) for expert, module in self.experts.items()}
        ranks = Collectives.of_group(self._group)
        found = differing_replicas(ranks.gather(mine, dict[int, str]))
        if found:
            raise CorruptionError(
                "replicas of experts have different weights",
                operation="check replicas",
                ids={f"expert {expert}": f"ranks {holders}" for expert, holders in found.items()},
                hint=(
                    "call sync_gradients() after each backward, and give every replica the same "
                    "optimizer and step"
                ),
            )

    # -- for ``ExpertShards`` ----------------------------------------------------------------------------

    def held_experts(self) -> dict[int, nn.Module]:
        """The experts of this rank by number."""
        return {int(number): module for number, module in self.experts.items()}

    def agree_anew(self) -> LayerAgreement:
        """Compare the layer again, after a possible conversion; a collective call that reads all weights.

        Raises:
            ValueError: on all ranks, if replicas differ by now.
        """
        nodes_R = self._agreed.nodes_R
        return agree(self.held_experts(), self.replicas_RE, nodes_R, "mean", self._group)

    def hide_experts(self, agreed: LayerAgreement) -> None:
        """Take the experts out of the module tree, and leave their gradients to ``reduce_to_owners``.

        The shards are trained; the weights here are copies of them, which come and go with the
        placement. So no optimizer of the model's parameters, DDP or checkpoint of the model sees them.

        Args:
            agreed: of ``agree_anew``.
        """
        experts = self.held_experts()
        self._agreed, self._sharded = agreed, True
        del self._modules["experts"]
        self._hold(experts)

    def show_experts(self) -> None:
        """Undo ``hide_experts``."""
        experts = self.held_experts()
        self._sharded = False
        del self.__dict__["experts"]
        self._hold(experts)

    def adopt(self, experts: Mapping[int, nn.Module], replicas_RE: NDArray[np.int64]) -> None:
        """Change to another placement, the same on all ranks, with this rank's experts of it."""
        self._agreed = LayerAgreement(replicas_RE, self._agreed.nodes_R, self._agreed.shapes_E)
        self._hold(experts)
        self.experts.train(self.training)

    def reduce_to_owners(self, device: torch.device) -> dict[tuple[int, int], Tensor]:
        """See ``ReplicaGradients.to_owners``."""
        return self._gradients.to_owners(device)

    def _hold(self, experts: Mapping[int, nn.Module]) -> None:
        experts = {expert: experts[expert] for expert in sorted(experts)}
        named = nn.ModuleDict({str(expert): one for expert, one in experts.items()})
        if self._sharded:
            self.__dict__["experts"] = named  # past ``nn.Module``, which would register it
        else:
            self.experts = named
        self._gradients = ReplicaGradients(experts, self._agreed, mean=self._mean, group=self._group)
        self._dispatcher = Dispatcher(self.replicas_RE, self._agreed.nodes_R, self._rank)

    def train(self, mode: bool = True) -> Self:
        """Also for experts that are not in the module tree."""
        super().train(mode)
        self.experts.train(mode)
        return self

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """``to()``, ``double()``, ``cuda()`` and the like."""
        for param in self.experts.parameters() if self._sharded else ():
            converted = fn(param.detach().reshape(-1)[:0])
            if (converted.dtype, converted.device) != (param.dtype, param.device):
                raise ValueError(
                    "this layer has ExpertShards, which would stay as they are: convert or move "
                    "the model before they are made"
                )
        super()._apply(fn, recurse)
        return self

    def extra_repr(self) -> str:
        ranks = len(self.replicas_RE)
        return f"num_experts={self.num_experts}, replicas={self.replicas_RE.sum()}, ranks={ranks}"

    def _computed(self, rows: Tensor, route: Route, inputs: Inputs) -> Tensor:
        """The experts' outputs of the rows that this rank sends, in the same order."""
        ticket = torch.zeros((), device=rows.device, requires_grad=inputs.tokens_learn)
        received, ticket = swap_rows(rows, ticket, RowExchange(route.sends, route.receives, self._group))
        outputs = reorder(
            self._by_experts(reorder(received, route.by_expert), route),
            route.by_expert.undone(),
        )
        if inputs.experts_learn and not inputs.tokens_learn:
            ticket = torch.zeros((), device=rows.device, requires_grad=True)
        back = RowExchange(route.receives, route.sends, self._group, self._gradients.backward_begins)
        returned, _ = swap_rows(outputs, ticket, back)
        return returned

    def _by_experts(self, rows: Tensor, route: Route) -> Tensor:
        if not route.computes:
            return rows
        parts = rows.split([count for _, count in route.computes])
        outputs = []
        for (expert, _), part in zip(route.computes, parts, strict=True):
            output = self.experts[str(expert)](part)
            if output.shape != part.shape:
                raise ValueError(
                    f"expert {expert} made {tuple(output.shape)} of {tuple(part.shape)}: an "
                    "expert's output is as wide as its input"
                )
            outputs.append(output.to(part.dtype))
        return torch.cat(outputs)


def common_device(layers: Iterable[ElasticExperts], group: Any, *, what: str) -> torch.device:
    """The device of this rank's experts; on a rank without any, one of the same kind; a collective call.

    Args:
        what: the beginning of the error message.
    Raises:
        ValueError: on all ranks: a rank has experts on several devices, or ranks on several kinds of
            devices.
    """
    own = sorted({str(p.device) for layer in layers for p in layer.experts.parameters()})

    def own_device() -> str:
        if len(own) > 1:
            raise ValueError(f"experts are on several devices: {', '.join(own)}")
        return own[0] if own else ""

    devices = Collectives.of_group(group).check(own_device, str, what=what)
    kinds = {device.split(":")[0] for device in devices} - {""}
    if len(kinds) > 1:
        raise ValueError(f"{what}: experts are on devices of several kinds: {sorted(kinds)}")
    if own:
        return torch.device(own[0])
    kind = kinds.pop()
    index = None if kind == "cpu" else torch.accelerator.current_device_index()
    return torch.device(kind) if index is None else torch.device(kind, index)
