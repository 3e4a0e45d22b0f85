"""Attributes of objects that change while they train: counters, histories, generators that a module keeps.

PyTorch's own places for state are parameters and buffers. Much code keeps some in plain attributes
(``self.calls += 1``), which no ``state_dict`` has: a training that resumed without them would go on with
other bits. Here the attributes that an object's own class keeps are watched; those that have changed since
the start are in each snapshot from then on, and are restored in place.

Left out, and named if a replay differs: tensors of a graph or on a device, objects, and what is large. If
one of these was made once and stays (a cache, beside its size), nothing of its object is captured: the size
without the cache would be worse than neither. Nor is a flag that was set once, which often guards what must
be done in each process.
"""

from __future__ import annotations

import dis
import inspect
import operator
import sys
import types
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import compress, count, repeat
from typing import Any

from torch import nn

from ckptd.client.capture.attribute_records import (
    MISSING,
    MOST_BYTES,
    OF_A_GRAPH,
    AttributeRecord,
    AttributeRecorder,
    LeftOut,
    restored,
)
from ckptd.client.log_lines import get_logger
from ckptd.client.model.live_state import named_modules
from ckptd.units import first_of

logger = get_logger(__name__)

# Its name among the objects of `state=`.
ATTRIBUTES = "ckptd.attributes"
# Bytes of tensors in an attribute of a module, which a buffer is for.
_TENSOR_BYTES = 64 << 10
# The same of a trainer or callback, such as generated sequences from which several steps learn.
_TRAINER_TENSOR_BYTES = 64 << 20
# The same object at as many tops: the steps do not make it anew.
_STAYS = 3
_SHOWN = 5
_NO_MODULES: Mapping[str, nn.Module] = {}
_SET_ONCE = "a flag that was set once, which may tell what this process has done"
_STORES = (dis.opmap["STORE_ATTR"], dis.opmap["DELETE_ATTR"])
# Their classes keep no state of a run in attributes, or restore it themselves.
_LIBRARIES = frozenset(
    {
        "accelerate",
        "bitsandbytes",
        "ckptd",
        "diffusers",
        "lightning",
        "lightning_fabric",
        "lightning_utilities",
        "megatron",
        "peft",
        "pytorch_lightning",
        "timm",
        "torch",
        "torchao",
        "torchmetrics",
        "transformer_engine",
        "transformers",
        *sys.stdlib_module_names,
    }
) - {"__main__"}


@dataclass(slots=True, eq=False)
class _Attribute:
    """One attribute, as it was at the start and when it was seen last.

    Attributes:
        start, last: None: left out, the latter for the reason ``why``.
        replaced: how many times it was another object than at the top before.
        alike: at how many tops in a row it was this one.
    """

    owner: str
    name: str
    start: AttributeRecord | None = None
    last: AttributeRecord | None = None
    why: str = ""
    changed: bool = False
    replaced: int = 0
    alike: int = 0

    @property
    def path(self) -> str:
        return f"{self.owner}.{self.name}" if self.owner else self.name

    @property
    def stays_out(self) -> bool:
        """True if it was made in a step, and the next steps use it. What each step makes anew is no state."""
        made = self.last is None and self.replaced > 0 and self.why not in (OF_A_GRAPH, _SET_ONCE)
        return made and (self.replaced == 1 or self.alike >= _STAYS)


def of_modules(model: nn.Module, others: Mapping[str, nn.Module] = _NO_MODULES) -> ObjectAttributes:
    """The attributes of a model's modules, where their classes are not a library's.

    Args:
        others: further modules by name, such as an average of the model in ``state=``.
    """
    owners: dict[str, Any] = dict(named_modules(model))
    for name, other in others.items():
        owners |= {f"state[{name!r}]{path and '.'}{path}": module for path, module in named_modules(other)}
    return ObjectAttributes(owners)


def of_trainer(objects: Iterable[Any], trained: nn.Module) -> ObjectAttributes:
    """The attributes of a trainer and of its callbacks, of which two may be of one class.

    Modules among them are captured as well, such as an average of the model: ``trained`` is the one that is
    captured without it.
    """
    names, owners = Counter[str](), dict[str, Any]()
    for each in objects:
        kind = type(each).__name__
        names[kind] += 1
        owners[kind if names[kind] == 1 else f"{kind} {names[kind]}"] = each
    return ObjectAttributes(owners, tensors=_TRAINER_TENSOR_BYTES, trained=trained)


# In one look, by the identity of values.
_Records = dict[int, tuple[AttributeRecord | None, str]]


class ObjectAttributes:
    """The attributes of these objects that change while they train: an object for ``state=``.

    A replay does not compare them, because times may be among them.

    Args:
        owners: the objects by name, each with a ``__dict__``.
        tensors: the most bytes of tensors in one attribute, on whatever device they are, those of a module
            that is not part of ``trained`` included. None: 64 KiB, no module, and no tensor on a device, for
            which the training thread would have to wait.
        trained: the model whose parameters a snapshot has.
    """

    reproducible = False

    def __init__(
        self, owners: Mapping[str, Any], *, tensors: int | None = None, trained: nn.Module | None = None
    ) -> None:
        kinds = set(map(type, owners.values()))
        libraries = {kind for kind in kinds if all(map(_of_library, kind.__mro__))}
        self._owners = {
            name: owner
            for name, owner in owners.items()
            if type(owner) not in libraries or (isinstance(owner, nn.Module) and _options(owner))
        }
        self._tables = [vars(owner) for owner in self._owners.values()]
        self._sizes: list[int] = []
        self._theirs: dict[type, frozenset[str]] = {}
        captured = frozenset(map(id, trained.parameters() if trained is not None else ()))
        self._recorder = AttributeRecorder(
            tensors or _TENSOR_BYTES, everything=tensors is not None, trained=captured
        )
        # By number: each attribute, where it is, and the value seen last.
        self._attributes: list[_Attribute] = []
        self._where: list[dict[str, Any]] = []
        self._names: list[str] = []
        self._values: list[Any] = []
        # Of objects whose contents may change, by identity: the numbers of the attributes that hold them.
        self._watchers: dict[int, set[int]] = defaultdict(set)
        self._begun = False
        self._look()
        self._begun = True
        watched = 0
        for number, attribute in enumerate(self._attributes):
            attribute.start, attribute.changed, attribute.replaced = attribute.last, False, 0
            watched += attribute.last.nbytes if attribute.last is not None else 0
            if watched > MOST_BYTES:
                self._watchers[id(self._values[number])].discard(number)

    def describe(self) -> str:
        """What is captured, and what is not; empty if nothing has changed."""
        found = [("captured", self.captured()), ("changed, and not captured", self.left_out())]
        return "; ".join(f"attributes {how}: {first_of(names, _SHOWN)}" for how, names in found if names)

    def captured(self) -> list[str]:
        """The attributes that are captured now."""
        left = self._owners_left_out()
        return [a.path for a in self._changed() if a.last is not None and a.owner not in left]

    def left_out(self) -> list[str]:
        """The attributes that have changed and are not captured, each with the reason."""
        left = self._owners_left_out()
        return [
            f"{a.path} ({a.why or f'beside {left[a.owner]}'})"
            for a in self._changed()
            if a.last is None or a.owner in left
        ]

    def set_once(self) -> list[str]:
        """The flags that were set once, and are left out for this."""
        return [a.path for a in self._changed() if a.why == _SET_ONCE]

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """By object and attribute, what has changed since the start."""
        self._look()
        left, found = self._owners_left_out(), dict[str, dict[str, Any]]()
        for attribute in self._changed():
            if attribute.last is not None and attribute.owner not in left:
                found.setdefault(attribute.owner, {})[attribute.name] = list(attribute.last[:2])
        return found

    def load_state_dict(self, recorded: Mapping[str, Mapping[str, Any]]) -> None:
        """Put them back. What has changed here, and had not when this was recorded, is again as at the start.

        Raises:
            ValueError: a module that a trainer or callback keeps has other tensors here.
        """
        self._look()
        wanted = {
            (a.owner, a.name): a.start[:2]
            for a in self._changed()
            if a.last is not None and a.start is not None and a.start.tag != "m"
        }
        there = {(owner, name): v for owner, found in recorded.items() for name, v in found.items()}
        for (owner, name), (tag, value) in (wanted | there).items():
            if owner in self._owners:
                table = vars(self._owners[owner])
                table[name] = restored(tag, value, table.get(name))
            else:
                logger.warning("the snapshot has attribute %s of %s, which this model lacks", name, owner)
        self._find()
        for attribute in self._attributes:
            attribute.replaced += (attribute.owner, attribute.name) in there  # in the life before
        self._look()

    # -- looking ---------------------------------------------------------------------------------

    def _changed(self) -> Iterator[_Attribute]:
        return (a for a in self._attributes if a.changed)

    def _owners_left_out(self) -> dict[str, str]:
        """The objects of which nothing is captured, each with the attribute that is the cause."""
        return {a.owner: a.name for a in self._changed() if a.stays_out}

    def _look(self) -> None:
        """See what has changed; what was not replaced costs no Python, and contents are looked at once."""
        if list(map(len, self._tables)) != self._sizes:
            self._find()
        now = list(map(dict.get, self._where, self._names, repeat(MISSING)))
        replaced = set(compress(count(), map(operator.is_not, now, self._values)))
        for number in replaced:
            self._watchers[id(self._values[number])].discard(number)
        self._values = now
        records: _Records = {}
        changed = set(replaced)
        for watchers in self._watchers.values():
            if watchers:
                number = next(iter(watchers))
                before = self._attributes[number].last
                record, _ = self._record(now[number], before, records)
                if record is None or before is None or record.key != before.key:
                    changed |= watchers
        for number in changed:
            self._see(number, now[number], number in replaced, records)
        self._watchers = defaultdict(set, {key: found for key, found in self._watchers.items() if found})

    def _find(self) -> None:
        """Add the attributes that are new."""
        self._sizes = list(map(len, self._tables))
        known = {(a.owner, a.name) for a in self._attributes}
        for (owner, live), table in zip(self._owners.items(), self._tables, strict=True):
            theirs = self._theirs.get(type(live))
            if theirs is None:
                theirs = self._theirs[type(live)] = _names_of_libraries(type(live))
            options = _options(live) if isinstance(live, nn.Module) and not self._begun else ()
            whole = all(map(_of_library, type(live).__mro__))
            for name in table:
                if (name in options or not (whole or name in theirs)) and (owner, name) not in known:
                    self._attributes.append(_Attribute(owner, name))
                    self._where.append(table)
                    self._names.append(name)
                    self._values.append(MISSING)

    def _see(self, number: int, value: Any, replaced: bool, records: _Records) -> None:
        attribute = self._attributes[number]
        attribute.replaced += replaced
        attribute.alike = 1 if replaced else attribute.alike + 1
        before = attribute.last
        attribute.last, attribute.why = self._record(value, before, records)
        if type(value) is bool and self._begun and attribute.replaced < 2:
            attribute.last, attribute.why = None, _SET_ONCE
        if attribute.why and isinstance(value, nn.Module) and before is not None and not attribute.changed:
            logger.warning(
                "%s changes while it trains, and no snapshot has it (%s): after a failure it begins anew, "
                "unless it is in state=, which packs it for each snapshot",
                attribute.path,
                attribute.why,
            )
        keys = [record and record.key for record in (before, attribute.last)]
        attribute.changed |= replaced or keys[0] != keys[1]
        if attribute.last is None:
            watched = value is not MISSING and attribute.alike < _STAYS
        else:
            watched = attribute.last.tag != "v"
        (self._watchers[id(value)].add if watched else self._watchers[id(value)].discard)(number)

    def _record(
        self, value: Any, before: AttributeRecord | None, records: _Records
    ) -> tuple[AttributeRecord | None, str]:
        """The record of a value, or None and the reason; made once in a look."""
        found = records.get(id(value))
        if found is None:
            try:
                found = self._recorder.record(value, before, first=not self._begun), ""
            except LeftOut as reason:
                found = None, str(reason)
            if found[0] is None or found[0].tag != "v":
                records[id(value)] = found
        return found


# -- whose attributes are looked at ----------------------------------------------------------------


def _of_library(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in _LIBRARIES


def _names_of_libraries(kind: type) -> frozenset[str]:
    """The attributes that a library's classes among the bases of ``kind`` keep."""
    found = set(vars(nn.Module()))  # which sets them all in its constructor, some not by name
    for base in kind.__mro__:
        if base is not nn.Module and _of_library(base):
            for member in vars(base).values():
                for code in _codes(member):
                    found.update(_stored(code))
    return frozenset(found)


def _options(module: nn.Module) -> list[str]:
    """Options of a library's module that a program may change in steps: the rate of a dropout, the momentum
    of a batch norm. Its class sets them in its constructor only.
    """
    kind = type(module)
    if kind not in _CHANGING:
        members = [m for base in kind.__mro__ if _of_library(base) for m in vars(base).items()]
        codes = [code for name, member in members if name != "__init__" for code in _codes(member)]
        _CHANGING[kind] = frozenset(name for code in codes for name in _stored(code))
    return [
        name
        for name, value in vars(module).items()
        if type(value) is float and name not in _CHANGING[kind] and not name.startswith("eps")
    ]


# By class: what its methods set, besides the constructor.
_CHANGING: dict[type, frozenset[str]] = {}


def _stored(code: types.CodeType) -> Iterator[str]:
    """The attributes that the code sets or deletes. `dis` takes eight times as long: 53 ms for the classes of
    transformers' Trainer, in each start.
    """
    raw, extended = code.co_code, 0
    for at in range(0, len(raw), 2):
        operation, argument = raw[at], raw[at + 1] | extended
        extended = argument << 8 if operation == dis.EXTENDED_ARG else 0
        if operation in _STORES:
            yield code.co_names[argument]


def _codes(member: Any) -> Iterator[types.CodeType]:
    """The code of a class's member, that of functions in it included."""
    functions = (member.fget, member.fset, member.fdel) if isinstance(member, property) else (member,)
    for function in functions:
        plain = inspect.unwrap(getattr(function, "__func__", function)) if callable(function) else None
        code = getattr(plain, "__code__", None)
        todo = [code] if isinstance(code, types.CodeType) else []
        while todo:
            code = todo.pop()
            yield code
            todo += [c for c in code.co_consts if isinstance(c, types.CodeType)]
