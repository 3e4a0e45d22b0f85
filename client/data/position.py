"""The position of a loop in its data, and its restoration to the exact same batches.

The order of an epoch and the random numbers of a collator (masks, augmentations) follow from the random
state at the start of the epoch and at each fetch. Loaders fetch ahead: when a step begins, the next
batch may exist already, created from a random state that is lost. Therefore two states are kept: the
state before the epoch's iterator was created, and the state before the newest fetch. A restarted job
creates the iterator from the first and repeats the newest fetch from the second. One fetch yields one
batch, the very first one possibly two, so the two newest batches are fetched again; earlier ones may be
skipped without creating them.

The random state is that of the global generators, and of the generators that the loader reaches (`Reach`).
"""

from __future__ import annotations

import functools
import random
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ckptd.client.data.loaders import After
from ckptd.client.log_lines import get_logger
from ckptd.client.rng_state import GENERATORS, capture_rng, restore_rng

logger = get_logger(__name__)

# Batches that must be fetched again: the one that the first fetch returns, and the one that it
# creates in advance.
_AGAIN = 2
_LIBRARIES = frozenset(
    {
        "accelerate",
        "builtins",
        "collections",
        "functools",
        "lightning",
        "numpy",
        "pytorch_lightning",
        "torch",
        "torchdata",
        "transformers",
    }
)
# Only these attributes of a library's objects are inspected; the others are internal to it.
_FOLLOWED = (
    "base_dataloader",
    "batch_sampler",
    "sampler",
    "dataset",
    "datasets",
    "data_source",
    "collate_fn",
    "worker_init_fn",
    "generator",
    "synchronized_generator",
    "func",
    "args",
    "keywords",
)
# `_epoch` belongs to a stream of Hugging Face's datasets: a tensor that its workers share.
_COUNTS = ("epoch", "_epoch", "iteration", "initial_seed", "seed")
_SAMPLERS = ("sampler", "batch_sampler")
_DEPTH = 8
_ITEMS = 64
_PLAIN = (type(None), bool, int, float, str)
# `SystemRandom` has no state: its numbers cannot be repeated.
_STATELESS = random.SystemRandom
_GLOBAL = {id(torch.default_generator), id(np.random.mtrand._rand), id(random._inst)}


@dataclass(slots=True)
class _Found:
    """An object at a path: a generator, or a plain attribute of ``owner`` with its value at that time."""

    value: Any
    owner: Any = None
    name: str = ""

    @property
    def now(self) -> Any:
        value = _plain(getattr(self.owner, self.name, None))
        return value if isinstance(value, _PLAIN) else None


class Reach:
    """The state that determines a loader's batches, besides their indices and the global random generators.

    It consists of the random generators that a dataset, sampler, collate function or transform holds as an
    attribute, in a closure, or as a global of its module; of the epoch numbers and seeds of samplers; and
    of plain attributes of the user's own samplers that change during iteration. They are found by
    inspecting objects; nothing is called.

    Args:
        counts: include epoch numbers and seeds; False if the loop itself sets them for each epoch.
    """

    def __init__(self, loader: Any, *, counts: bool = True) -> None:
        self._loader, self._counts = loader, counts
        self._known = list(self._find())
        # A restarted job builds unchanged attributes itself; its seeds and epochs may differ.
        self._built = {
            path: found.value for path, found in self._known if found.name and found.name not in _COUNTS
        }

    @property
    def generators(self) -> list[str]:
        """The paths of the random generators."""
        return [path for path, found in self._known if not found.name]

    @property
    def objects(self) -> list[object]:
        """The random generators."""
        return [found.value for _, found in self._known if not found.name]

    def look(self) -> None:
        """Search again at the start of an epoch, to find objects created since."""
        self._known = list(self._find())

    def capture(self) -> dict[str, Any]:
        """Generator states, and plain attributes changed since the loader was built; fit for ``state=``."""
        state: dict[str, Any] = {}
        for path, found in self._known:
            if not found.name:
                state[path] = _state_of(found.value)
            elif path not in self._built or self._built[path] != found.now:
                state[path] = found.now
        return state

    def restore(self, state: dict[str, Any]) -> None:
        """Restore the result of ``capture``; objects that it does not name keep their initial state."""
        self.look()
        late = [f for p, f in self._known if f.value is None and isinstance(state.get(p), torch.Tensor)]
        for found in late:  # the first iterator creates it
            setattr(found.owner, found.name, torch.Generator())
        if late:
            self.look()
        # Objects that an iterator has created since then are not part of the recorded state.
        self._known = [(p, f) for p, f in self._known if p in state or p in self._built]
        for path, found in self._known:
            if not found.name:
                if path in state:
                    _set_state(found.value, state[path])
                continue
            value = state.get(path, self._built.get(path, found.value))
            if isinstance(value, _PLAIN):
                _put(found.owner, found.name, value)

    def _find(self) -> Iterator[tuple[str, _Found]]:
        found = _walk(self._loader, "loader", 0, {id(self._loader)}, sampler=False)
        return ((p, f) for p, f in found if self._counts or f.name not in _COUNTS)


def _walk(
    value: Any, path: str, depth: int, seen: set[int], *, sampler: bool
) -> Iterator[tuple[str, _Found]]:
    if depth > _DEPTH:
        return
    if isinstance(value, After):
        value = value.inner
    for name, child in _children(value):
        if name in _COUNTS:
            child = _plain(child)
        at = f"{path}.{name}"
        inside = sampler or name in _SAMPLERS
        if isinstance(child, _PLAIN):
            own = inside and not _of_library(value) and not isinstance(value, list | tuple | dict)
            counts = name in _COUNTS and isinstance(child, int)
            if (own or counts) and name in getattr(value, "__dict__", ()):
                yield at, _Found(child, value, name)
        elif id(child) not in seen and id(child) not in _GLOBAL:
            seen.add(id(child))
            if isinstance(child, GENERATORS):
                if not isinstance(child, _STATELESS):
                    yield at, _Found(child)
            else:
                yield from _walk(child, at, depth + 1, seen, sampler=inside)


def _plain(value: Any) -> Any:
    """The number in a tensor without dimensions; other values unchanged."""
    if isinstance(value, torch.Tensor) and value.dim() == 0 and not value.is_floating_point():
        return int(value)
    return value


def _put(owner: Any, name: str, value: Any) -> None:
    """Set an attribute; a tensor is changed in place, because workers share it."""
    live = getattr(owner, name, None)
    if isinstance(live, torch.Tensor):
        live.fill_(value)
    else:
        setattr(owner, name, value)


def _children(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, types.FunctionType | types.MethodType):
        yield from _used_by(value)
    elif isinstance(value, functools.partial):
        yield from (("func", value.func), ("args", value.args), ("keywords", value.keywords))
    elif isinstance(value, list | tuple):
        yield from ((str(at), part) for at, part in enumerate(value[:_ITEMS]))
    elif type(value) is dict:
        if len(value) <= _ITEMS:
            yield from ((str(key), part) for key, part in value.items())
    elif isinstance(value, types.ModuleType | type | torch.Tensor | np.ndarray):
        return
    else:
        attributes: dict[str, Any] = getattr(value, "__dict__", {})
        library = _of_library(value)
        # Only instance attributes: a property may have side effects.
        yield from ((n, v) for n, v in list(attributes.items()) if not library or n in (*_FOLLOWED, *_COUNTS))
        if not library:
            yield from _used_by_methods(type(value))


def _used_by_methods(kind: type) -> Iterator[tuple[str, Any]]:
    for base in kind.__mro__:
        if base.__module__.partition(".")[0] not in _LIBRARIES:
            for name, method in vars(base).items():
                if isinstance(method, types.FunctionType):
                    yield from ((f"{name}().{n}", v) for n, v in _used_by(method))


def _used_by(function: Any) -> Iterator[tuple[str, Any]]:
    """The generators and the user's functions that a function uses as globals or in its closure."""
    plain = function.__func__ if isinstance(function, types.MethodType) else function
    if (plain.__module__ or "").partition(".")[0] in _LIBRARIES:
        return
    for name, cell in zip(plain.__code__.co_freevars, plain.__closure__ or (), strict=False):
        if cell != types.CellType():
            yield name, cell.cell_contents
    names = set(_names(plain.__code__))
    for name in sorted(names & plain.__globals__.keys()):
        used = plain.__globals__[name]
        if isinstance(used, types.ModuleType) and used.__name__.partition(".")[0] not in _LIBRARIES:
            for inner in sorted(names & vars(used).keys()):
                if isinstance(vars(used)[inner], GENERATORS):
                    yield f"{name}.{inner}", vars(used)[inner]
        elif isinstance(used, (*GENERATORS, types.FunctionType, functools.partial)):
            yield name, used


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _of_library(value: Any) -> bool:
    return type(value).__module__.partition(".")[0] in _LIBRARIES


def _state_of(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    if isinstance(generator, np.random.RandomState):
        return generator.get_state(legacy=False)
    version, internal, gauss = generator.getstate()
    return [version, np.asarray(internal, dtype=np.uint32).tobytes(), gauss]


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(state)
    else:
        version, internal, gauss = state
        generator.setstate((version, tuple(np.frombuffer(internal, dtype=np.uint32).tolist()), gauss))


class DataPosition:
    """The epoch, the number of its batches so far, and the random states to repeat them; for ``state=``.

    Args:
        ahead: whether this process may create a batch before it is requested. If not, the state
            before the newest fetch is not needed.
    Attributes:
        reach: the reach of the loader; None if there is none yet.
    """

    def __init__(self, reach: Reach | None = None, *, ahead: bool = True) -> None:
        self.reach, self._ahead = reach, ahead
        self.epoch = 0
        self.consumed = 0
        self.loader: Any = None
        self._at_epoch: dict[str, Any] = {}
        self._at_fetch: dict[str, Any] = {}

    def begin_epoch(self, epoch: int, *, consumed: int = 0, loader: Any = None) -> None:
        """Record the start of an epoch; call it before the epoch's iterator is created.

        Args:
            loader: other state that determines the order of the epoch (seeds, generators), of types
                that ``state=`` accepts.
        """
        self.epoch, self.consumed, self.loader = epoch, consumed, loader
        if self.reach is not None:
            self.reach.look()
        self._at_epoch, self._at_fetch = self._capture(), {}

    def return_to_epoch(self) -> None:
        """Restore the random state before this epoch's iterator was created."""
        self._restore(self._at_epoch)

    def return_global_state(self) -> None:
        """Restore only the global generators; those that the loader reaches stay with its iterator."""
        restore_rng(self._at_epoch)

    def about_to_fetch(self) -> dict[str, Any]:
        """The random state before a fetch; pass it to ``fetched``."""
        return self._capture() if self._ahead else {}

    def fetched(self, before: dict[str, Any]) -> None:
        """Record that a batch was returned; ``before`` is the random state before the fetch."""
        self.consumed += 1
        self._at_fetch = before

    def watch(self, iterator: Iterator[Any], note: Callable[[Any], object] | None = None) -> Iterator[Any]:
        """Count the batches of ``iterator``, and call ``note`` with each; it may be called after its end."""
        return _Watched(self, iterator, note)

    @property
    def skippable(self) -> int:
        """The number of batches of this epoch that a loader may skip."""
        return max(self.consumed - _AGAIN, 0)

    def fast_forward(self, fetch: Callable[[], object], skipped: int) -> None:
        """Fetch the batches before this position, except the ``skipped`` first, from a new iterator.

        Raises:
            ValueError: the data ends before the position.
        """
        for left in range(self.consumed - skipped, 0, -1):
            if left == 1 and self._at_fetch:
                self._restore(self._at_fetch)
            try:
                fetch()
            except StopIteration:
                raise ValueError(
                    f"the training data ended before batch {self.consumed} of epoch {self.epoch}, "
                    "the position of this run: is it another "
                    "dataset? Pass a new name to run= to start from the beginning"
                ) from None

    def _capture(self) -> dict[str, Any]:
        state = capture_rng()
        if self.reach is not None and (found := self.reach.capture()):
            state["reach"] = found
        return state

    def _restore(self, state: dict[str, Any]) -> None:
        restore_rng(state)
        if self.reach is not None:
            self.reach.restore(state.get("reach", {}))

    def state_dict(self) -> dict[str, Any]:
        return {
            "epoch": self.epoch,
            "consumed": self.consumed,
            "loader": self.loader,
            "at_epoch": self._at_epoch,
            "at_fetch": self._at_fetch,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self.consumed = state["epoch"], state["consumed"]
        self.loader = state["loader"]
        self._at_epoch, self._at_fetch = state["at_epoch"], state["at_fetch"]


def log_refetched(position: DataPosition, skipped: int, took_s: float, option: str) -> None:
    """Log the cost of the restoration to ``position``, and the ``option`` that avoids it, if any."""
    fetched = position.consumed - skipped
    if fetched > _AGAIN:
        logger.warning(
            "fetched %d batches of epoch %d again in %.1f s and discarded them, because samples "
            "may depend on random numbers%s",
            fetched,
            position.epoch,
            took_s,
            f"; if a sample depends only on its index, {option} avoids this" if option else "",
        )


class _Watched(Iterator[Any]):
    def __init__(
        self,
        position: DataPosition,
        inner: Iterator[Any],
        note: Callable[[Any], object] | None,
    ) -> None:
        self._position, self._inner, self._note = position, inner, note

    def __next__(self) -> Any:
        before = self._position.about_to_fetch()
        batch = next(self._inner)
        self._position.fetched(before)
        if self._note is not None:
            self._note(batch)
        return batch
