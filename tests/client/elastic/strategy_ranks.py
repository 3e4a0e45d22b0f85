"""What each of some ranks does with blocks that were made elastic, and with either strategy;
results go to files, which the tests read.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any, Literal
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ckptd.client.elastic import (
    ElasticExperts,
    ExpertShards,
    full_state_dict,
    load_full_state_dict,
    recut,
    replace_moe_blocks,
)
from ckptd.client.elastic.layer import expert_tensors
from tests.client.elastic.block_models import HAND_WRITTEN, PLACEMENT, Model, batch, loss
from tests.client.elastic.mixtures import Case, batches, expert
from tests.client.elastic.ranks import Found, elastic_layer, told, work_through
from tests.long import LONG

__all__ = ["OPTIMIZERS", "PLACEMENTS", "RANKS", "TRAINED", "optimizer_of", "run_all"]

RANKS = 3
Replicas = list[list[int]]

_A = [[2, 1, 0, 1, 0], [0, 1, 1, 1, 0], [1, 0, 0, 1, 1]]
_B = [[0, 0, 1, 1, 1], [1, 1, 0, 0, 1], [0, 1, 0, 0, 2]]
_C = [[1, 1, 1, 1, 1], [0, 0, 0, 1, 0], [0, 1, 0, 0, 0]]
# After each step; the first stays for two.
PLACEMENTS = [_A, _B, _B, _C, _A]

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.01, weight_decay=0.1),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=0.01),
}

# By name: what is trained, and with what.
TRAINED: dict[str, tuple[Case, str]] = {
    "AdamW": (Case(_A, [7, 0, 9]), "AdamW"),
    "SGD with momentum": (Case(_A, [7, 5, 9], reduce="mean"), "SGD"),
    "bfloat16": (Case(_A, [7, 5, 9], dtype=torch.bfloat16, reduce="mean"), "AdamW"),
    "an expert without tokens": (Case(_A, [7, 5, 9], shares=[1, 1, 0, 1, 1]), "AdamW"),
}
if LONG:
    TRAINED |= {
        "float32": (Case(_A, [7, 5, 9], dtype=torch.float32), "AdamW"),
        "micro-batches": (Case(_A, [7, 5, 9], micro_batches=2), "AdamW"),
    }


def optimizer_of(name: str, params: Iterable[Any]) -> torch.optim.Optimizer | None:
    """None of nothing."""
    given = list(params)
    return OPTIMIZERS[name](given) if given else None


def run_all(rank: int, folder: str) -> None:
    """Everything, one after the other; the results of this rank go to ``<folder>/<rank>.pt``."""
    found: Found = {}
    for name, (case, optimizer) in TRAINED.items():
        found[name] = {
            "replicas": _train_replicas(case, optimizer),
            "shards": _train_shards(case, optimizer),
        }
    works = (
        _rounds,
        _masters,
        _norm,
        _parts,
        _modes,
        _saved,
        _refused,
        _blocks,
        _blocks_refused,
    )
    work_through(rank, folder, found, works)


def _backward(case: Case, layer: ElasticExperts, step: int) -> None:
    for micro_batch in range(case.micro_batches):
        one = batches(case, 10 * step + micro_batch)[dist.get_rank()]
        (layer(one.tokens, one.experts, one.weights) * one.target).sum().backward()


def _weights(layer: ElasticExperts) -> dict[int, list[Tensor]]:
    return {
        number: [param.detach().clone() for param in module.parameters()]
        for number, module in layer.held_experts().items()
    }


# -- the two strategies --------------------------------------------------------------------------------


def _train_shards(case: Case, optimizer: str) -> list[dict[int, list[Tensor]]]:
    """The weights of this rank's experts after each step and the new placement."""
    layer = elastic_layer(case)
    shards = ExpertShards(layer, OPTIMIZERS[optimizer])
    found = []
    for step, placement in enumerate(PLACEMENTS):
        _backward(case, layer, step)
        shards.step([placement])
        assert layer.replicas_RE.tolist() == placement
        layer.check_replicas()
        found.append(_weights(layer))
    return found


def _train_replicas(case: Case, name: str) -> list[dict[int, list[Tensor]]]:
    """The same with an optimizer on each replica, whose state is brought along by hand."""
    layer = elastic_layer(case)
    optimizer = optimizer_of(name, layer.parameters())
    found = []
    for step, placement in enumerate(PLACEMENTS):
        _backward(case, layer, step)
        layer.sync_gradients()
        if optimizer is not None:
            optimizer.step()
        layer, optimizer = _moved(case, name, layer, optimizer, placement)
        found.append(_weights(layer))
    return found


def _moved(
    case: Case,
    name: str,
    layer: ElasticExperts,
    optimizer: torch.optim.Optimizer | None,
    placement: Replicas,
) -> tuple[ElasticExperts, torch.optim.Optimizer | None]:
    mine = {
        number: [(p.detach(), optimizer.state.get(p, {})) for p in module.parameters()]
        for number, module in layer.held_experts().items()
        if optimizer is not None
    }
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, mine)
    state = {number: held for one in everywhere for number, held in one.items()}
    held = [number for number, count in enumerate(placement[dist.get_rank()]) if count]
    experts = {number: expert(number, case.dtype) for number in held}
    with torch.no_grad():
        for number, module in experts.items():
            for param, (weight, _) in zip(module.parameters(), state[number], strict=True):
                param.copy_(weight)
    moved = ElasticExperts(experts, placement, reduce=case.reduce)
    new = optimizer_of(name, moved.parameters())
    for number, module in experts.items():
        for param, (_, values) in zip(module.parameters(), state[number], strict=True):
            assert new is not None
            new.state[param] = copy.deepcopy(values)
    return moved, new


# -- shards --------------------------------------------------------------------------------------------


def _masters(rank: int) -> Found:
    """Shards in float32 under weights in bfloat16."""
    case, name = TRAINED["bfloat16"]
    layer = elastic_layer(case)
    shards = ExpertShards(layer, OPTIMIZERS[name], masters=torch.float32)
    for step in range(3):
        _backward(case, layer, step)
        shards.step([PLACEMENTS[step]])
    return {
        "weights": _weights(layer),
        "shards": {n: p.detach() for n, p in shards.named_parameters()},
    }


def _rounds(rank: int) -> Found:
    """As the first case, in as many rounds as there are tensors; and a full state."""
    with patch.object(expert_tensors, "_ROUND_BYTES", 1):
        trained = _train_shards(*TRAINED["AdamW"])
        model = Model(torch.float32)
        replace_moe_blocks(model, PLACEMENT, blocks=HAND_WRITTEN)
        return {"trained": trained, "full": full_state_dict(model)}


def _norm(rank: int) -> Tensor:
    """The square of the gradients' norm over all experts, from the shards."""
    case, name = TRAINED["SGD with momentum"]
    layer = elastic_layer(case)
    shards = ExpertShards(layer, OPTIMIZERS[name])
    _backward(case, layer, 0)
    shards.reduce_gradients()
    shards.reduce_gradients()  # changes nothing
    total = torch.zeros((), dtype=torch.float64)
    for param in shards.parameters():
        if param.grad is not None:
            total += param.grad.square().sum()
    dist.all_reduce(total)
    return total


def _parts(rank: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Gradients that were reduced after each backward, and those reduced once after both."""
    case, name = TRAINED["AdamW"]
    found = []
    for each in (True, False):
        layer = elastic_layer(case)
        shards = ExpertShards(layer, OPTIMIZERS[name])
        for step in range(2):
            _backward(case, layer, step)
            if each or step:
                shards.reduce_gradients()
        found.append({n: p.grad for n, p in shards.named_parameters() if p.grad is not None})
    return found[0], found[1]


def _modes(rank: int) -> list[set[bool]]:
    """Whether the experts here train: after each of ``eval()``, another placement, and ``train()``."""
    case, name = TRAINED["AdamW"]
    layer = elastic_layer(case)
    shards = ExpertShards(layer, OPTIMIZERS[name], make_expert=lambda _, n: expert(n, case.dtype))
    model = nn.Sequential(layer)
    found = []
    for change in (model.eval, lambda: shards.send_weights([_C]), model.train):
        change()
        found.append({module.training for module in layer.experts.modules()})
    return found


def _saved(rank: int) -> Found:
    """Saved after two steps, and gone on from there: by others, and by others from states cut anew, twice."""
    case, name = TRAINED["AdamW"]
    layer = elastic_layer(case)
    shards = ExpertShards({"moe.experts": layer}, OPTIMIZERS[name])
    for step in range(2):
        _backward(case, layer, step)
        shards.step([PLACEMENTS[step]])
    kept: list[Any] = [None] * RANKS
    dist.all_gather_object(kept, copy.deepcopy((shards.state_dict(), shards.optimizer.state_dict())))
    five = recut([one for one, _ in kept], [one for _, one in kept], 5)
    again = recut([one for one, _ in five], [one for _, one in five], RANKS)
    found: Found = {"kept": kept, "five": five, "again": again}
    placed = shards.placed.state_dict()
    found["on"] = _go_on(case, layer, shards)
    for key in ("kept", "again"):
        layer = elastic_layer(case, PLACEMENTS[1] if key == "kept" else None)
        shards = ExpertShards({"moe.experts": layer}, OPTIMIZERS[name])
        weights, state = copy.deepcopy(found[key][rank])
        shards.placed.load_state_dict(placed)
        shards.load_state_dict(weights)
        shards.optimizer.load_state_dict(state)
        shards.send_weights()
        assert layer.replicas_RE.tolist() == PLACEMENTS[1]
        found[f"on from {key}"] = _go_on(case, layer, shards)
    found["of another rank"] = told(lambda: shards.load_state_dict(kept[(rank + 1) % RANKS][0]))
    found["of five ranks"] = told(lambda: shards.load_state_dict(five[rank][0]))
    return found


def _go_on(case: Case, layer: ElasticExperts, shards: ExpertShards) -> dict[int, list[Tensor]]:
    for step in (2, 3):
        _backward(case, layer, step)
        shards.step([PLACEMENTS[step]])
    return _weights(layer)


class _Whole(torch.optim.Optimizer):
    """Divides a gradient by the norm of its whole tensor."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        with torch.no_grad():
            for group in self.param_groups:
                for param in group["params"]:
                    if param.grad is not None:
                        param.sub_(param.grad / (param.grad.norm() + 1))


class _Buffered(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)
        self.register_buffer("calls", torch.zeros(1))


def _refused(rank: int) -> dict[str, str]:
    """What cannot be done; all ranks are told, and afterwards all goes on."""
    case, name = TRAINED["AdamW"]
    make = OPTIMIZERS[name]
    found: dict[str, str] = {}

    def made(work: Callable[[ElasticExperts], object]) -> str:
        layer = elastic_layer(case)
        return told(lambda: work(layer))

    found["no layers"] = told(lambda: ExpertShards({}, make))
    found["other layers"] = made(lambda layer: ExpertShards({f"of {rank // 2}": layer}, make))
    found["not elementwise"] = made(lambda layer: ExpertShards(layer, _Whole))
    found["other options"] = made(
        lambda layer: ExpertShards(layer, lambda params: torch.optim.SGD(params, lr=0.1 if rank < 2 else 0.2))
    )
    found["no optimizer"] = made(
        lambda layer: ExpertShards(layer, lambda _: None if rank == 1 else make(_))  # type: ignore[arg-type,return-value]
    )
    found["a user's error"] = made(
        lambda layer: ExpertShards(layer, lambda params: make(params[: 1 // rank] or params))
    )
    found["strange parameters"] = made(
        lambda layer: ExpertShards(layer, lambda params: make([*layer.experts.parameters()]))
    )
    buffered = ElasticExperts(dict.fromkeys([0], nn.Identity()), [[1]] * RANKS)
    buffered.experts["0"].register_buffer("calls", torch.zeros(1))
    found["buffers"] = told(lambda: ExpertShards(buffered, make))

    def unused(layer: ElasticExperts) -> None:
        _backward(case, layer, 0)
        ExpertShards(layer, make)

    found["gradients"] = made(unused)
    layer = elastic_layer(case)
    names = [name for name, _ in layer.named_parameters()]
    told(lambda: ExpertShards(layer, _Whole))
    _backward(case, layer, 0)
    layer.sync_gradients()
    found["as before"] = str(names == [name for name, _ in layer.named_parameters()] != [])
    return found | _refused_steps(rank, case, make)


def _refused_steps(rank: int, case: Case, make: Callable[[Any], torch.optim.Optimizer]) -> dict[str, str]:
    layer = elastic_layer(case)
    shards = ExpertShards(layer, make)
    _backward(case, layer, 0)
    before = _weights(layer)
    lonely = [[1, 1, 1, 1, 0]] * RANKS
    empty = [[1, 1, 1, 1, 1], [0, 0, 0, 0, 0], [1, 0, 0, 0, 0]]
    found = {
        "twice": told(lambda: ExpertShards(layer, make)),
        "summed": told(layer.sync_gradients),
        "converted": told(layer.float),
        "other placements": told(lambda: shards.step([_B if rank else _C])),
        "one places": told(lambda: shards.step([_B] if rank == 1 else None)),
        "no holder": told(lambda: shards.step([lonely])),
        "more layers": told(lambda: shards.step([_B, _B])),
        "no such layer": told(lambda: shards.step({"moe": _B})),
        "more experts": told(lambda: shards.step([[[*row, 1] for row in _B]])),
    }
    layer.double().train()
    unchanged = all(map(torch.equal, before[3], _weights(layer).get(3, []))) if before else True
    found["unchanged"] = str(unchanged)
    shards.step([empty])
    found["no pattern"] = told(lambda: shards.send_weights([_A]))

    def other_form(_layer: str, _expert: int) -> nn.Module:
        return nn.Linear(2, 2)

    def right_form(_layer: str, number: int) -> nn.Module:
        return expert(number + 100, case.dtype)

    shards._make_expert = other_form
    found["other form"] = told(lambda: shards.send_weights([_A]))
    shards._make_expert = right_form
    shards.send_weights({"experts": _A})
    layer.check_replicas()
    found["fine afterwards"] = str(layer.replicas_RE.tolist() == _A)
    return found


# -- blocks --------------------------------------------------------------------------------------------


def _blocks(rank: int) -> Found:
    """A model's output, gradients, logits and states, in two dtypes."""
    found: Found = {}
    for dtype in (torch.float64, torch.float32):
        model = Model(dtype)
        layers = replace_moe_blocks(model, PLACEMENT, blocks=HAND_WRITTEN)
        hidden = batch(rank, dtype).requires_grad_()
        loss(model, hidden).backward()
        for layer in layers.values():
            layer.sync_gradients()
        found[str(dtype)] = {
            "grads": {n: p.grad for n, p in model.named_parameters()},
            "hidden": hidden.grad,
            "logits": [one.detach() for one in model.logits],
        }
    found["names"] = list(layers)
    found["full"] = full_state_dict(model, to=1)
    other = Model(torch.float32, seed=1)
    replace_moe_blocks(other, PLACEMENT, blocks=HAND_WRITTEN)
    load_full_state_dict(other, Model(torch.float32).state_dict())
    found["loaded"] = all(map(torch.equal, other.parameters(), model.parameters()))
    copied = copy.copy(Model(torch.float32).state_dict())
    copied.pop("blocks.1.experts.down_proj")
    found["lacking"] = told(lambda: load_full_state_dict(other, copied))
    found["sharded"] = _sharded_model(model, layers)
    return found


def _sharded_model(model: Model, layers: dict[str, ElasticExperts]) -> Found:
    """The model's own optimizer does not see experts any more; a full state does."""
    model.zero_grad()
    shards = ExpertShards(layers, OPTIMIZERS["AdamW"])
    dense = [name for name, _ in model.named_parameters()]
    hidden = batch(dist.get_rank(), torch.float32)
    loss(model, hidden).backward()
    turned = [[each[-1], *each[:-1]] for each in PLACEMENT[:2]] + [PLACEMENT[2]]
    shards.step(turned)
    for layer in layers.values():
        layer.check_replicas()
    return {
        "dense": dense,
        "full": full_state_dict(model),
        "names": [name for name, _ in shards.named_parameters()],
        "load": told(lambda: load_full_state_dict(model, {})),
        "placed": {n: each.tolist() for n, each in shards.placements.items()}
        == dict(zip(layers, turned, strict=True)),
    }


def _blocks_refused(rank: int) -> dict[str, str]:
    def replaced(model: nn.Module, placement: Any = PLACEMENT, **options: Any) -> str:
        before = [id(module) for module in model.modules()]
        why = told(lambda: replace_moe_blocks(model, placement, blocks=HAND_WRITTEN, **options))
        assert before == [id(module) for module in model.modules()], "the model is as it was"
        return why

    reduce: Literal["mean", "sum"] = "mean" if rank else "sum"
    return {
        "other weights": replaced(Model(seed=rank // 2)),
        "other placement": replaced(Model(), PLACEMENT if rank else [PLACEMENT[1], *PLACEMENT[1:]]),
        "other reduce": replaced(Model(), reduce=reduce),
        "one rank's trouble": replaced(Model(), PLACEMENT if rank else PLACEMENT[:2]),
        "no holder": replaced(Model(), [[[1, 0, 1, 1]] * 3, *PLACEMENT[1:]]),
    }
