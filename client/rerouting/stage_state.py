"""The state of a pipeline's stage: a copy to roll back to, and the bytes for a worker that comes back; and
whether a stage has the embedding of another one.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec
import torch
import xxhash
from torch import Tensor, nn

from ckptd.client import values
from ckptd.client.capture.step_state import Stateful
from ckptd.client.rng_state import capture_rng, restore_rng

_Shape = tuple[int, ...]
_Found = list[tuple[str, bool, _Shape, int]]  # name, whether it is an embedding, shape, digest


class StageState:
    """Parameters and buffers of a module, its optimizer's state and options, and other objects.

    Args:
        optimizer: has nothing that changes but ``state`` and ``param_groups``, as those of ``torch.optim``.
        others: by name, such as a schedule of learning rates.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        others: Mapping[str, Stateful] | None = None,
    ) -> None:
        self._module, self._optimizer, self._others = module, optimizer, dict(others or {})

    def copy(self) -> dict[str, Any]:
        """All of it, sharing no memory with the live one."""
        groups = self._optimizer.param_groups
        return {
            "tensors": [_copied(each) for each in self._tensors()],
            "state": [_copied(dict(self._optimizer.state.get(p, {}))) for g in groups for p in g["params"]],
            "groups": [_copied({k: v for k, v in g.items() if k != "params"}) for g in groups],
            "others": {name: _copied(each.state_dict()) for name, each in self._others.items()},
        }

    def restore(self, copied: Mapping[str, Any]) -> None:
        """Take over a copy, of this stage or of the same one in another pipeline.

        Raises:
            ValueError: it is of another module, or optimizer.
        """
        tensors = self._tensors()
        groups = self._optimizer.param_groups
        params = [p for g in groups for p in g["params"]]
        mine = [(each.shape, each.dtype) for each in tensors], len(params), len(groups), {*self._others}
        theirs = [(each.shape, each.dtype) for each in copied["tensors"]]
        if mine != (theirs, len(copied["state"]), len(copied["groups"]), {*copied["others"]}):
            raise ValueError(
                "the state is of another stage: its parameters, its optimizer or what is in state= differ"
            )
        with torch.no_grad():
            for live, saved in zip(tensors, copied["tensors"], strict=True):
                live.copy_(saved)
        for param, state in zip(params, copied["state"], strict=True):
            self._optimizer.state.pop(param, None)
            if state:
                self._optimizer.state[param] = _copied(state)
        for group, saved in zip(groups, copied["groups"], strict=True):
            group.update(_copied(saved))
        for name, each in self._others.items():
            each.load_state_dict(_copied(copied["others"][name]))

    def pack(self) -> Tensor:
        """The copy and this process's generators as bytes, uint8 ``[size]``."""
        generators = bytearray(values.pack(capture_rng(), "generators"))
        file = io.BytesIO()
        torch.save({**self.copy(), "generators": torch.frombuffer(generators, dtype=torch.uint8)}, file)
        return torch.frombuffer(file.getbuffer(), dtype=torch.uint8)

    def unpack(self, packed: Tensor) -> None:
        """`restore` what another worker has packed, its generators included.

        Raises:
            ValueError: as `restore`.
            pickle.UnpicklingError: a ``state_dict`` has more than tensors, numbers, texts and containers.
        """
        copied = torch.load(io.BytesIO(packed.numpy().tobytes()), weights_only=True)
        self.restore(copied)
        restore_rng(values.unpack(copied["generators"].numpy().tobytes()))

    def _tensors(self) -> list[Tensor]:
        return [*self._module.parameters(), *self._module.buffers()]


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: _copied(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)([_copied(each) for each in value])
    return copy.deepcopy(value)


def check_not_tied(module: nn.Module, exchange: Callable[[bytes], list[bytes]]) -> None:
    """Check that no parameter of a stage has the values of another stage's embedding, as if they were tied.

    Args:
        exchange: gives what the stages of a pipeline send, in their order; a collective call.
    Raises:
        ValueError: one has, in any of the stages; on all of them.
    """
    tables = {m.weight for m in module.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)}
    shapes = {shape for of in exchange(_packed(tuple(t.shape) for t in tables)) for shape in _unpacked(of)}
    found = [
        (name, param in tables, tuple(param.shape), _digest(param))
        for name, param in module.named_parameters()
        if tuple(param.shape) in shapes
    ]
    stages = [msgspec.msgpack.decode(of, type=_Found) for of in exchange(msgspec.msgpack.encode(found))]
    for stage, of in enumerate(stages):
        for name, _, shape, digest in (each for each in of if each[1]):
            same = [
                f"{other} of stage {number}"
                for number, others in enumerate(stages)
                for other, _, its_shape, its_digest in others
                if number != stage and (its_shape, its_digest) == (shape, digest)
            ]
            if same:
                raise ValueError(
                    f"{name} of stage {stage} and {', '.join(same)} have the same values: nothing keeps an "
                    "embedding equal that is tied over stages. Have them on one stage. If they shall be "
                    "trained apart, begin with another value in one of them"
                )


def _packed(shapes: Iterable[_Shape]) -> bytes:
    return msgspec.msgpack.encode(sorted(shapes))


def _unpacked(shapes: bytes) -> list[_Shape]:
    return msgspec.msgpack.decode(shapes, type=list[_Shape])


def _digest(param: Tensor) -> int:
    """Of its values; 63 bits."""
    data = param.detach().contiguous().view(-1).view(torch.uint8).numpy()
    return xxhash.xxh3_64_intdigest(data.data) >> 1
