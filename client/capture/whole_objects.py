"""Objects of ``state=`` that have no ``state_dict``: containers, generators, objects of the user's classes.

A replay buffer, a running mean, an average of the weights that somebody wrote by hand: all that such an
object keeps is captured as what optimizers keep is (`value_trees`), and comes back in place. What is captured
without it (the model, its optimizers, other objects of ``state=``) is left out where it refers to them.
Nothing is left out in silence: a value that no snapshot can hold is an error with its path.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ckptd.client import values
from ckptd.client.model.live_state import LiveState
from ckptd.client.optimizers.value_trees import (
    Baseline,
    NotCapturable,
    TreeReader,
    TreeWriter,
    counts_steps,
    is_ignored,
    left_alone,
)
from ckptd.client.rng_state import GENERATORS

_IN_PLACE = (list, dict, deque, set, Tensor, np.ndarray, *GENERATORS)
_FIXED = (type(None), bool, int, float, complex, str, bytes, tuple, frozenset, torch.Size, np.generic)


def why_not_whole(name: str, value: object) -> str:
    """The advice for a value that cannot be captured as a whole; empty if it can."""
    if isinstance(value, _FIXED):
        return (
            f"it cannot be changed in place; keep it in a dict, kept = {{{name!r}: ...}}, that the loop "
            "reads and writes, and pass the dict"
        )
    if isinstance(value, _IN_PLACE):
        return ""
    has_attributes = hasattr(value, "__dict__") or counts_steps(value)
    if is_ignored(value) or hasattr(value, "__next__") or not has_attributes:
        return "pass objects with state_dict() and load_state_dict()"
    return ""


class WholeObject:
    """Captures an object with all that it keeps.

    A replay does not compare it, because times may be among it; what a step computes of it is compared.

    Args:
        name: in ``state=``.
    """

    reproducible = False

    def __init__(self, name: str, value: Any) -> None:
        self.value, self._path = value, f"state[{name!r}]"
        self._elsewhere = frozenset[int]()
        self._refs: dict[int, list[str]] = {}
        self._tensors: dict[tuple[str, str], Tensor] = {}
        self._baseline: Baseline | None = None
        self._start: Any = None

    def know(self, binding: LiveState, others: Iterable[object]) -> None:
        """Learn what is captured without it; called once, before training.

        Raises:
            UnsupportedValue: it keeps what no snapshot can hold.
        """
        found = [
            *binding.model.modules(),
            *binding.optimizers,
            *binding.keepers,
            *binding.kept.given,
            *others,
        ]
        self._elsewhere = frozenset(map(id, found)) - {id(self.value)}
        self._tensors = {("param", name): tensor for name, tensor in binding.params.items()}
        self._tensors |= {("master", name): tensor for name, tensor in binding.masters.items()}
        self._tensors |= {("buffer", name): tensor for name, tensor in binding.buffers().items()}
        self._refs = {id(tensor): [*place] for place, tensor in self._tensors.items()}
        writer = self._writer()
        self._start = values.unpack(values.pack(self._write(writer), self._path))
        self._baseline = writer.made

    def begin_as(self, before: WholeObject) -> None:
        """The start is that of another one for the same object."""
        self._start, self._baseline = before._start, before._baseline

    def state_dict(self) -> Any:
        """The tree of the object.

        Raises:
            UnsupportedValue: it keeps what no snapshot can hold.
        """
        return _changed(self._write(self._writer()), self._start)

    def load_state_dict(self, tree: Any) -> None:
        """Fill the object."""
        if isinstance(self.value, np.ndarray):
            self.value[...] = tree
            return
        reader = TreeReader(lambda ref: self._tensors.get((ref[0], ref[1])))
        found = reader.put(_completed(tree, self._start), self.value)
        if found is not self.value:
            raise ValueError(
                f"{self._path} is of another kind than in the snapshot: a {type(self.value).__name__}"
            )

    def _writer(self) -> TreeWriter:
        def known(tensor: Tensor | int) -> list[str] | None:
            return self._refs.get(tensor if isinstance(tensor, int) else id(tensor))

        return TreeWriter(known, self._baseline, lambda value: id(value) in self._elsewhere)

    def _write(self, writer: TreeWriter) -> Any:
        try:
            return writer.node(self.value, self._path)
        except NotCapturable as refused:
            raise values.UnsupportedValue(refused.path, self.value, refused.why) from None


def _changed(now: Any, start: Any) -> Any:
    """The tree without the plain attributes that are as at the start: an edited script may set them."""
    if not (_of_object(now) and _of_object(start)):
        return now
    before = dict(start[1])
    found = []
    for name, node in now[1]:
        if name in before and not isinstance(node, list | Tensor | np.ndarray):
            same = type(node) is type(before[name]) and node == before[name]
            found.append([name, ["?"] if same else node])
        else:
            found.append([name, _changed(node, before.get(name))])
    return ["o", found]


def _completed(recorded: Any, start: Any) -> Any:
    """The tree with what `_changed` left out: in a process that goes back, the loop may have changed it."""
    if not (_of_object(recorded) and _of_object(start)):
        return recorded
    before = dict(start[1])
    found = []
    for name, node in recorded[1]:
        first = before.get(name, node)
        plain = not isinstance(first, list | Tensor | np.ndarray)
        left_out = left_alone(node) and plain
        found.append([name, first if left_out else _completed(node, first)])
    return ["o", found]


def _of_object(node: Any) -> bool:
    return isinstance(node, list) and len(node) == 2 and node[0] == "o"
