"""Objects of the program around the loop that change while it trains, and that no snapshot has.

A scheduler, a gradient scaler, a second optimizer or an average of the model that nobody passed to the
`Checkpointer` begins anew after a failure. A replay notices a scheduler, too late, and an average not at
all. So the first steps look at the variables of the function with the loop, and a warning names what was
forgotten. So it does with the program's own state: random generators, iterators, containers and objects that
change, and variables that the loop's body, or a function that it calls, takes over from the step before, but
for what the program only shows. What begins to change later (an average of the last quarter) is found by
looks at the 8th, 16th, 32nd, … top.
"""

from __future__ import annotations

import gc
import random
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset, Sampler
from torch.utils.data.dataloader import _BaseDataLoaderIter

from ckptd.client import values
from ckptd.client.capture.attribute_records import AttributeRecorder, LeftOut
from ckptd.client.capture.object_attributes import ObjectAttributes
from ckptd.client.capture.uncaptured.carried_variables import Kept, carried_variables, kept_by_functions
from ckptd.client.capture.uncaptured.fingerprints import fingerprint, is_iterator, is_time, of_user
from ckptd.client.capture.uncaptured.shown_variables import only_shown
from ckptd.client.capture.whole_objects import WholeObject
from ckptd.client.data import Batches
from ckptd.client.log_lines import get_logger
from ckptd.client.model.live_state import LiveState
from ckptd.client.optimizers.value_trees import counts_steps
from ckptd.client.rng_state import GENERATORS
from ckptd.units import first_of

logger = get_logger(__name__)

# Tops at which it looks: a scheduler may count for the first time in the second step.
_LOOKS = 4
# The last but one: what iterates over a loader now, and has gone on at the last one, is one of the loop's.
_ITERATORS_AT = _LOOKS - 1
_KINDS = (Optimizer, LRScheduler, torch.amp.GradScaler, nn.Module, _BaseDataLoaderIter)
_CONTAINERS = (list, dict, set, deque, np.ndarray)
_NUMBERS = (type(None), bool, int, float, str)
_PLAIN = (*_NUMBERS, complex, bytes, type)
_GLOBAL_GENERATORS = frozenset(map(id, (torch.default_generator, np.random.mtrand._rand, random._inst)))
_SHOWN = 6
# Between the loop and the code of the user.
_BETWEEN = frozenset({"ckptd", "contextlib", "rich", "tqdm"})
_LIBRARIES = frozenset({"accelerate", "lightning", "pytorch_lightning", "transformers"})


def around_loop(frame: types.FrameType, captured: Iterable[Any], binding: LiveState) -> LeftBehind | None:
    """Looks at the variables around the loop that asks for steps in ``frame``; None if that cannot be.

    Args:
        captured: objects that snapshots have, besides model and optimizers.
    """
    try:
        of_optimizers = [p for optimizer in binding.optimizers for p in _params(optimizer)]
        tensors = (*binding.params.values(), *binding.masters.values(), *binding.buffers().values())
        updated = (*of_optimizers, *(binding.params[name] for name in binding.masters))
        user = _frame_of_user(frame)
        variables = variables_of(frame)
        carried = () if user is None or not variables else carried_variables(user.f_code, user.f_lasti)
        passed = (*captured, *binding.kept.given)  # around an optimizer there may be an object of the user's
        everything = [part for each in passed for part in _captured_with(each)]
        kept = () if user is None or not variables else _kept_by(user, variables, everything)
        return LeftBehind(
            variables,
            everything,
            (*tensors, *of_optimizers),
            updated,
            carried=carried,
            kept=kept,
            code=None if user is None else user.f_code,
        )
    except Exception as error:  # noqa: BLE001 - as below
        _not_looked_at(error)
        return None


def variables_of(frame: types.FrameType | None) -> dict[str, Any]:
    """The variables of the function that runs the loop, and the attributes of its ``self``; none if it is a
    library's.

    Args:
        frame: asks for the next step.
    """
    frame = _frame_of_user(frame)
    if frame is None or _package(frame) in _LIBRARIES:
        return {}
    found = dict(frame.f_locals)
    own = getattr(found.get("self"), "__dict__", {})
    found |= {f"self.{name}": value for name, value in own.items()}
    generators = {name: value for name, value in frame.f_globals.items() if isinstance(value, GENERATORS)}
    return generators | found


def _kept_by(frame: types.FrameType, variables: Mapping[str, Any], captured: Iterable[Any]) -> Iterator[Kept]:
    """What functions keep that the loop or a scheduler calls, and numbers of datasets."""
    schedulers = [each for each in (*variables.values(), *captured) if isinstance(each, LRScheduler)]
    called = [f for each in schedulers for f in getattr(each, "lr_lambdas", ())]
    yield from kept_by_functions(frame.f_code, frame.f_globals, (*variables.values(), *called), of_user)
    named = {id(value): name for name, value in variables.items()}
    loaders = [each.loader for each in captured if isinstance(each, Batches)]
    datasets = [value for value in variables.values() if isinstance(value, Dataset)]
    datasets += [each for loader in loaders if isinstance(each := getattr(loader, "dataset", None), Dataset)]
    for dataset in {id(each): each for each in datasets if of_user(type(each))}.values():
        of = named.get(id(dataset), type(dataset).__name__)
        for name, value in getattr(dataset, "__dict__", {}).items():
            if type(value) in _NUMBERS:
                yield Kept(f"{of}.{name}", partial(getattr, dataset, name))


def _frame_of_user(frame: types.FrameType | None) -> types.FrameType | None:
    while frame is not None and _package(frame) in _BETWEEN:
        frame = frame.f_back
    return frame


def _captured_with(value: Any) -> Iterator[Any]:
    """An object that is captured, and others that are with it."""
    yield value
    if isinstance(value, WholeObject):
        yield from _with_parts(value.value)
    elif isinstance(value, Batches):
        yield from value.generators()


def _package(frame: types.FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


class LeftBehind:
    """Looks at variables during the first steps.

    Args:
        variables: by name.
        captured: objects that snapshots have, with what is inside them.
        tensors: those that snapshots have.
        updated: those of them that the optimizers in the snapshots update.
        carried: names of variables that a step takes over from the one before.
        kept: variables of functions that the loop calls.
        code: the function with the loop, if its source may say what is only shown.
    """

    def __init__(
        self,
        variables: Mapping[str, Any],
        captured: Iterable[Any],
        tensors: Iterable[Tensor],
        updated: Iterable[Tensor],
        *,
        carried: Iterable[str] = (),
        kept: Iterable[Kept] = (),
        code: types.CodeType | None = None,
    ) -> None:
        self._code = code
        self._tensors, self._updated = frozenset(map(id, tensors)), frozenset(map(id, updated))
        self._recorder = AttributeRecorder(0, everything=True, trained=self._tensors)
        captured = list(captured)
        # None and small numbers are one object, wherever they are.
        parts = [part for each in captured for part in _with_parts(each) if not isinstance(part, _PLAIN)]
        inside = self._inside = set(map(id, parts))
        self._attributes = [each for each in captured if isinstance(each, ObjectAttributes)]
        self._captured_data = {
            id(data) for part in parts if (data := getattr(part, "dataset", None)) is not None
        }
        self._around = bool(variables)
        self._objects = {
            id(value): (name, value)
            for name, value in variables.items()
            if id(value) not in inside and (isinstance(value, _KINDS) or self._is_own(name, value))
        }
        self._kept: dict[str, tuple[Callable[[], Any], str]] = {}
        for name, get in kept:
            self._keep(name, get)
        # What its numbers were: attributes that are replaced are no objects that change.
        own = variables.get("self")
        watched = id(own) not in inside and not isinstance(own, nn.Module)
        self._self = own if watched and hasattr(own, "__dict__") else None
        self._numbers = self._numbers_now()
        self._carried = [
            (name, variables[name])
            for name in sorted(carried)
            if name in variables and id(variables[name]) not in inside
            if not isinstance(variables[name], _KINDS) and not is_time(variables[name])
        ]
        self._first: dict[int, object] = {}
        self._iterators: list[tuple[weakref.ref[Any], int]] = []
        # What has not changed yet: names, the objects, and their first states.
        self._later: dict[int, tuple[str, weakref.ref[Any], object]] = {}
        self._told: set[int] = set()
        self._flags: set[str] = set()
        self._looks = 0

    def look(self, variables: Callable[[], Mapping[str, Any]] = dict) -> LeftBehind | None:
        """Look once, and say what was found; None when there is nothing to look at any more.

        Args:
            variables: those around the loop at this moment.
        """
        try:
            return self._look(variables)
        except Exception as error:  # noqa: BLE001 - objects of the user's, which need not even be complete
            _not_looked_at(error)
            return None

    def _look(self, variables: Callable[[], Mapping[str, Any]]) -> LeftBehind | None:
        self._looks += 1
        if self._looks > _LOOKS:
            if self._looks & (self._looks - 1) == 0:
                self._look_later(variables())
            return self
        if self._looks == _ITERATORS_AT and self._around:
            self._iterators = [
                (weakref.ref(each), each._num_yielded)
                for each in gc.get_objects()
                # Not isinstance: proxies among all objects would import what they stand for.
                if issubclass(type(each), _BaseDataLoaderIter)
                if id(each._dataset) not in self._captured_data and self._counts(each)
            ]
        if self._looks == 1:
            self._objects = {key: found for key, found in self._objects.items() if self._counts(found[1])}
        now = {key: self._state(value) for key, (_, value) in self._objects.items()}
        self._first = self._first or now
        if self._looks < _LOOKS:
            return self
        changed = [self._objects[key] for key in now if now[key] != self._first[key]]
        after = self._numbers_now()
        counted = [n for n in self._numbers if n in after and after[n] != self._numbers[n]]
        if counted:
            # Nobody can set a number in place: the object that has it is captured, with what else it keeps.
            of_self = [n for n, v in changed if n.startswith("self.") and not isinstance(v, _KINDS)]
            changed = [(n, v) for n, v in changed if n not in of_self] + [("self", self._self)]
            counted += [n.removeprefix("self.") for n in of_self]
        known = {id(value) for _, value in changed}
        for iterator, was in self._iterators:
            found = iterator()
            if found is not None and found._num_yielded != was and id(found) not in known:
                changed.append((f"an iterator over {type(found._dataset).__name__}", found))
        self._carried += [(name, get()) for name, (get, was) in self._kept.items() if repr(get()) != was]
        carried, changed = self._not_only_shown(changed)
        if carried:
            logger.warning(
                "NOT CAPTURED: %s: a step takes it over from the one before, and after a failure it begins "
                "anew. If training depends on it, keep it in a dict in place of the variable: kept = {...}, "
                'Checkpointer(..., state={"kept": kept})',
                first_of((_words(name, value) for name, value in carried), _SHOWN),
            )
        self._say_flags()
        self._say(changed, counted)
        self._told = {id(value) for _, value in changed}
        self._wait_for([found for key, found in self._objects.items() if key not in self._told])
        # Batches and histories must not stay for the whole run.
        self._objects, self._first, self._kept, self._iterators = {}, {}, {}, []
        return self

    def _not_only_shown(
        self, changed: list[tuple[str, Any]]
    ) -> tuple[list[tuple[str, Any]], list[tuple[str, Any]]]:
        """Carried variables and changed objects on which more depends than what the program shows."""
        found = (self._carried, changed)
        plain = [name for each in found for name, value in each if _may_be_shown(value)]
        shown = only_shown(self._code, plain) if plain and self._code is not None else frozenset[str]()
        carried, changed = ([each for each in part if each[0] not in shown] for part in found)
        return carried, changed

    def _say_flags(self) -> None:
        """Name flags of modules that steps have set; each once."""
        found = [path for each in self._attributes for path in each.set_once() if path not in self._flags]
        self._flags |= set(found)
        if found:
            logger.warning(
                "NOT CAPTURED: %s: a step has set this flag once, and it is unset after a failure. If "
                "that matters (it guards an initialization, or switches a part on), make it a buffer: "
                "register_buffer(name, torch.tensor(False))",
                first_of(found, _SHOWN),
            )

    def _keep(self, name: str, get: Callable[[], Any]) -> None:
        """Look at what a function keeps."""
        try:
            value = get()
        except (KeyError, AttributeError, ValueError):
            return
        if type(value) in _NUMBERS:
            if not is_time(value):
                self._kept[name] = get, repr(value)
        elif id(value) not in self._inside and (isinstance(value, _KINDS) or self._is_own(name, value)):
            self._objects.setdefault(id(value), (name, value))

    def _wait_for(self, found: Iterable[tuple[str, Any]]) -> None:
        """Look at these later, as long as they are there."""
        for name, value in found:
            own = of_user(type(value)) or isinstance(value, _KINDS)
            if own and hasattr(value, "__weakref__") and self._counts(value):
                self._later[id(value)] = name, weakref.ref(value), self._state(value)

    def _look_later(self, variables: Mapping[str, Any]) -> None:
        """See what has begun to change since; what is new is looked at from now on."""
        self._later = {key: found for key, found in self._later.items() if found[1]() is not None}
        changed = [
            (name, value)
            for name, ref, was in self._later.values()
            if (value := ref()) is not None and self._state(value) != was
        ]
        self._say_flags()
        self._say(changed, ())
        self._told |= {id(value) for _, value in changed}
        self._later = {key: found for key, found in self._later.items() if key not in self._told}
        known = self._later.keys() | self._told | self._inside
        new = [(n, v) for n, v in variables.items() if isinstance(v, _KINDS) and id(v) not in known]
        self._wait_for(new)

    def _say(self, changed: Sequence[tuple[str, Any]], counted: Sequence[str]) -> None:
        if changed:
            logger.warning(
                "NOT CAPTURED: %s: it changes while it trains, and begins anew after a failure. %s %s",
                first_of((_words(name, value, counted) for name, value in changed), _SHOWN),
                "Pass" if any(isinstance(value, _KINDS) for _, value in changed) else "If it matters, pass",
                self._advice(changed),
            )

    def _is_own(self, name: str, value: Any) -> bool:
        """True for state that the program itself may keep."""
        if (
            name == "self"
            or name.startswith("__")
            or id(value) in self._tensors
            or id(value) in _GLOBAL_GENERATORS
        ):
            return False
        if isinstance(value, (*_CONTAINERS, *GENERATORS)):
            return True
        if is_iterator(value):
            return not _of_ckptd(value)
        if isinstance(value, Tensor):
            return not value.requires_grad
        own = of_user(type(value)) and not isinstance(value, Dataset | Sampler | type)
        return own or counts_steps(value)

    def _skips(self, part: object) -> bool:
        """True for a part of an object that is no state of its own."""
        return id(part) in self._inside or id(part) in self._tensors or isinstance(part, _KINDS)

    def _numbers_now(self) -> dict[str, str]:
        own = getattr(self._self, "__dict__", {})
        return {n: repr(v) for n, v in own.items() if type(v) in _NUMBERS and not is_time(v)}

    def _counts(self, value: Any) -> bool:
        """True for what may be state of the training."""
        if isinstance(value, Optimizer):
            return not any(id(p) in self._updated for p in _params(value))
        if isinstance(value, LRScheduler):
            return any(id(p) in self._tensors for p in _params(value.optimizer))
        if isinstance(value, torch.amp.GradScaler):
            return value.is_enabled()
        if isinstance(value, _BaseDataLoaderIter):
            batches = value._index_sampler
            return self._inside.isdisjoint((id(batches), id(getattr(batches, "sampler", None))))
        return self._state(value) is not None

    def _state(self, value: Any) -> object:
        """Another one when its state has changed; None for a module that has none of its own."""
        if isinstance(value, nn.Module):
            try:
                record = self._recorder.record(value, None, first=True)
            except LeftOut:
                return None
            return record.key if record.key != ([], []) else None
        if isinstance(value, Optimizer):
            return len(value.state), [p._version for p in _params(value)]
        if isinstance(value, LRScheduler):
            return value.last_epoch
        if isinstance(value, _BaseDataLoaderIter):
            return value._num_yielded
        if isinstance(value, torch.amp.GradScaler):
            return values.pack(value.state_dict())
        return fingerprint(value, self._skips)

    def _advice(self, changed: Sequence[tuple[str, Any]]) -> str:
        optimizers = [value for _, value in changed if isinstance(value, Optimizer)]
        of_model = {id(o) for o in optimizers if any(id(p) in self._tensors for p in _params(o))}
        by_itself = [(name, value) for name, value in changed if id(value) not in of_model]
        kept = [
            name
            for name, value in by_itself
            if not isinstance(value, _BaseDataLoaderIter) and not is_iterator(value)
        ]
        found = []
        if kept:
            names = [name.removesuffix("()").partition(" of ")[0] for name in kept]
            state = ", ".join(f'"{name.removeprefix("self.")}": {name}' for name in names)
            found.append(f"Checkpointer(..., state={{{state}}})")
        if len(kept) < len(by_itself):
            found.append(
                "the loader, not its iterator, to ckpt.batches(loader), which gives the same batches"
            )
        if optimizers:
            found.append("all optimizers of the model in a list: Checkpointer(model, [first, second])")
        elif any(isinstance(value, nn.Module) for _, value in changed):
            found.append("a large module with the model: Checkpointer(nn.ModuleDict({...}), ...)")
        return "; ".join(found)


def _of_ckptd(iterator: Any) -> bool:
    """True for the steps themselves."""
    frame = getattr(iterator, "gi_frame", None)
    return frame is not None and _package(frame) == "ckptd"


def _may_be_shown(value: object) -> bool:
    """True for values whose methods change nothing else, as an object of the user's might."""
    return type(value) in _NUMBERS or isinstance(value, (bool, Tensor, *_CONTAINERS))


def _words(name: str, value: object, counted: Sequence[str] = ()) -> str:
    kind = type(value).__name__.lstrip("_")
    return f"self ({kind}: {first_of(counted, _SHOWN)})" if name == "self" else f"{name} ({kind})"


def _not_looked_at(error: Exception) -> None:
    logger.info("the variables around the loop were not looked at: %s: %s", type(error).__name__, error)


def _params(optimizer: Any) -> Iterator[Any]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _with_parts(value: Any) -> Iterator[Any]:
    """An object, its attributes, and what is in lists of these: schedulers are made of others."""
    yield value
    for part in getattr(value, "__dict__", {}).values():
        yield part
        if isinstance(part, list | tuple):
            yield from part
