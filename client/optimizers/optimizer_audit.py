"""What optimizers keep beside the tensors per parameter that a plan captures: counters in
attributes, inner optimizers, histories in lists, generators, ``state["step"]``.

All of it is looked at before every snapshot. What consists of plain values, tensors and generators
goes into the step scalars, and is put back in place after a restart. Anything else is refused by
its path, so that no snapshot is taken that could not bring it back. What is as it was when the
optimizer was given to us, and cannot be told from outside, is left as it is.
"""

from __future__ import annotations

import bisect
import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ckptd.client import values
from ckptd.client.log_lines import get_logger
from ckptd.client.optimizers.optimizer_probe import StateSpec, fits
from ckptd.client.optimizers.value_trees import (
    Baseline,
    NotCapturable,
    TreeReader,
    TreeWriter,
    is_ignored,
    left_alone,
    plain,
    plain_tensor,
    unlike,
)

if TYPE_CHECKING:
    import torch

    from ckptd.client.model.live_state import LiveState

__all__ = ["KeptState", "cannot_be_captured"]

logger = get_logger(__name__)

# Copied by the training thread with each snapshot, and what msgpack holds in one piece is 4 GiB at most.
MAX_BYTES = 1 << 30
_TOLD_BYTES = 16 << 20

Specs = Mapping[str, Sequence[StateSpec]]


def cannot_be_captured(who: str, refused: NotCapturable) -> str:
    """What is told of it, and what to do."""
    return (
        f"optimizer {who} keeps {refused.path} ({refused.why}), which cannot be captured: no "
        "snapshot is taken, and after a "
        "failure this run begins anew. Keep it in tensors or plain values (numbers, text, lists, "
        "dicts), or made in the "
        "optimizer's constructor; or use another optimizer (docs/optimizers.md)"
    )


class KeptState:
    """Of the optimizers of one binding.

    Args:
        given: the optimizers as the user has them, wrappers included, in the order of those of the binding.

    Attributes:
        specs: what a plan captures of the state per parameter, as it was looked at last.
    Raises:
        ValueError: one keeps what no snapshot can hold, from the beginning.
    """

    def __init__(self, binding: LiveState, given: Sequence[Any]) -> None:
        # What Accelerate and others put around one keeps nothing of the run.
        pairs = zip(given, binding.optimizers, strict=True)
        self._binding, self._given = binding, [o if is_ignored(g) else g for g, o in pairs]
        self._names = [type(g).__name__ for g in self._given]
        self._modules = {id(m) for m in binding.model.modules()}
        self._known: dict[int, list[str]] | None = None
        self._alike: dict[tuple[Any, ...], list[str]] = {}
        self._places: list[tuple[int, int, list[str]]] = []
        self.specs: Specs = {}
        # What the state consisted of when it was looked at last, and what was found.
        self._seen: list[Any] = []
        self._unknown = ""
        self._looked: dict[str, tuple[Any, ...]] = {}
        self._odd: dict[str, list[str]] = {}
        # Where keys are not those that were planned: those there are, in the optimizer's own order;
        # None: there is no state.
        self._deviating: dict[str, list[str] | None] = {}
        self._held: tuple[object, frozenset[int]] = (None, frozenset())
        self._volatile: set[tuple[str, str]] = set()
        self._told = False
        self._num_generators = 0
        self._also: Callable[[Mapping[str, Any]], None] | None = None
        self._baseline: Baseline | None = None
        try:
            self._baseline = self._walk()[1]
        except NotCapturable as refused:
            raise ValueError(cannot_be_captured(self.whose, refused)) from None

    @property
    def names(self) -> list[str]:
        """Of each optimizer that of its class."""
        return list(self._names)

    @property
    def given(self) -> list[Any]:
        """The optimizers as the user has them, without wrappers that keep nothing of the run."""
        return list(self._given)

    @property
    def whose(self) -> str:
        """The optimizers' names."""
        return ", ".join(dict.fromkeys(self._names))

    def wrappers(self) -> list[str]:
        """Why an optimizer that is wrapped cannot be captured in parts; empty if none is."""
        return [
            f"{type(given).__name__} is around {type(optimizer).__name__}, and its own step may "
            "depend on all parameters"
            for given, optimizer in zip(self._given, self._binding.optimizers, strict=True)
            if given is not optimizer
        ]

    # -- what there is -------------------------------------------------------------------------------

    def look(self, specs: Specs) -> str:
        """Compare the state per parameter with what the plan captures of it.

        Returns:
            A tensor that a plan could capture, if it were made anew; empty if there is none.
        """
        now = _values_of(self._binding.keepers)
        if specs is not self.specs:
            self.specs, self._looked, self._odd, self._deviating = specs, {}, {}, {}
        elif len(now) == len(self._seen) and all(map(operator.is_, now, self._seen)):
            return self._unknown
        self._seen, self._unknown = now, self._look_at_all()
        return self._unknown

    def _look_at_all(self) -> str:
        unknown = ""
        for name in self._binding.owner:
            state = self._binding.state(name)
            now = tuple(state.values())
            before = self._looked.get(name)
            if before and len(now) == len(before) and all(map(operator.is_, now, before)):
                continue
            self._looked[name] = now
            unknown = self._look_at(name, state) or unknown
        return unknown

    def _look_at(self, name: str, state: Mapping[str, Any]) -> str:
        planned = {s.key: s for s in self.specs.get(name, ())}
        held = self._binding.held(name)
        odd = [k for k, v in state.items() if k not in planned or not fits(v, planned[k], held)]
        self._odd.pop(name, None)
        self._deviating.pop(name, None)
        if odd:
            self._odd[name] = odd
        if not state:
            # An optimizer that only asks for the state of a parameter leaves an empty one.
            self._deviating[name] = [] if held in self._binding.keeper(name).state else None
        elif list(state) != list(planned):
            self._deviating[name] = list(state)
        unknown = ""
        for key in odd:
            value = state[key]
            if not isinstance(value, Tensor) or not _plannable(value):
                continue
            if key in planned and planned[key].is_tensor:
                self._volatile.add((name, key))  # another shape now: it was planned once, and that is enough
            if (name, key) not in self._volatile:
                unknown = f"optimizer state {key!r} of {name}"
        return unknown

    def python(self) -> dict[str, dict[str, Any]]:
        """Plain values without tensors in the state per parameter."""
        found = {}
        for name, keys in self._odd.items():
            state = self._binding.state(name)
            simple = {k: state[k] for k in keys if _simple(state[k])}
            if simple:
                found[name] = simple
        return found

    def gather(self) -> bytes:
        """All else, packed: it may change when this has returned.

        Raises:
            Refused: something that no snapshot can hold.
        """
        kept, _ = self._walk()
        if self._also is not None:
            self._also(kept)
        packed = values.pack(kept, "what the optimizer keeps")
        if len(packed) > MAX_BYTES:
            raise NotCapturable(
                self.whose, f"{len(packed)} bytes beside tensors per parameter, {MAX_BYTES} at most"
            )
        if len(packed) > _TOLD_BYTES and not self._told:
            self._told = True
            logger.warning(
                "optimizer %s keeps %.1f MiB elsewhere than in tensors per parameter: the training "
                "thread copies them in "
                "each snapshot",
                self.whose,
                len(packed) / 2**20,
            )
        return packed

    def tree(self) -> dict[str, Any]:
        """What `gather` packs, as it is now, in memory of its own.

        Raises:
            Refused: something that no snapshot can hold.
        """
        found: dict[str, Any] = values.unpack(values.pack(self._walk()[0], "what the optimizer keeps"))
        return found

    def keeps_generators(self) -> bool:
        """Whether there are random generators in it, as it is now.

        Raises:
            Refused: something that no snapshot can hold.
        """
        self._walk()
        return self._num_generators > 0

    def check_also(self, check: Callable[[Mapping[str, Any]], None]) -> None:
        """From now on `gather` asks this, too, which may raise `NotCapturable`."""
        self._also = check

    def _walk(self) -> tuple[dict[str, Any], Baseline]:
        try:
            return self._walk_all()
        finally:
            self._known, self._alike, self._places = None, {}, []

    def _walk_all(self) -> tuple[dict[str, Any], Baseline]:
        made = Baseline()
        skipped = self._skipped()

        writers: list[TreeWriter] = []

        def writer() -> TreeWriter:
            writers.append(TreeWriter(self._tell_known, self._baseline, lambda value: id(value) in skipped))
            return writers[-1]

        attributes, groups, foreign = [], [], []
        for given, optimizer, keeper in zip(
            self._given, self._binding.optimizers, self._binding.keepers, strict=True
        ):
            one = writer()
            root = keeper if given is optimizer else given
            attributes.append(one.attributes(root, ""))
            made.objects.update(one.made.objects)
            made.opaque.update(one.made.opaque)
            groups.append(self._groups(writer, optimizer, made))
            foreign.append(self._foreign(writer(), keeper))
        entries = {name: self._entries(writer(), name, keys) for name, keys in self._odd.items()}
        self._num_generators = sum(one.num_generators for one in writers)
        return {
            "attributes": attributes,
            "groups": groups,
            "foreign": foreign,
            "entries": {name: found for name, found in entries.items() if found},
            "keys": self._deviating,
        }, made

    def _groups(self, writer: Any, optimizer: torch.optim.Optimizer, made: Baseline) -> list[Any]:
        """Options that ``gather_groups`` leaves out."""
        found = []
        for i, group in enumerate(optimizer.param_groups):
            for key, value in group.items():
                if key != "params" and not plain(value):
                    one = writer()
                    found.append([i, key, one.node(value, f"param_groups[{i}][{key!r}]")])
                    made.objects.update(one.made.objects)
                    made.opaque.update(one.made.opaque)
        return found

    def _foreign(self, writer: TreeWriter, keeper: torch.optim.Optimizer) -> list[Any]:
        """Entries of ``state`` that are of no parameter, such as ``state["step"]``."""
        owned = self._owned()
        others = {k: v for k, v in keeper.state.items() if id(k) not in owned}
        return [writer._pair(k, v, "state", 0) for k, v in others.items()]

    def _owned(self) -> frozenset[int]:
        """Identities of the tensors that the optimizers update."""
        owner, found = self._held
        if owner is not self._binding.owner:
            found = frozenset(id(self._binding.held(n)) for n in self._binding.owner)
            self._held = self._binding.owner, found
        return found

    def _entries(self, writer: TreeWriter, name: str, keys: Iterable[str]) -> list[list[Any]]:
        state = self._binding.state(name)
        return [[k, writer.node(state[k], f"state[{name}][{k!r}]")] for k in keys if not _simple(state[k])]

    def _skipped(self) -> set[int]:
        """Identities of what is captured otherwise."""
        binding = self._binding
        found = set(self._modules)
        for optimizer in (*binding.optimizers, *binding.keepers):
            found.add(id(optimizer.state))
            found.add(id(optimizer.param_groups))
            found.update(map(id, optimizer.param_groups))
        return found

    # -- tensors that are captured otherwise -------------------------------------------------------

    def _tell_known(self, tensor: Tensor | int) -> list[str] | None:
        if self._known is None:
            self._know()
            assert self._known is not None
        if isinstance(tensor, int):
            return self._known.get(tensor) or self._address(tensor)
        found = self._known.get(id(tensor))
        if found is not None:
            return found
        if not plain_tensor(tensor) or not tensor.numel():
            return None
        same = self._alike.get(_place(tensor))
        return None if same is None else ["data", *same]

    def _address(self, number: int) -> Any:
        """An optimizer may keep tables by ``data_ptr()``."""
        at = bisect.bisect_right(self._places, number, key=lambda place: place[0]) - 1
        if at < 0:
            return None
        start, size, ref = self._places[at]
        return ["a", number - start, *ref] if number < start + size else None

    def _know(self) -> None:
        self._known, self._alike, self._places = {}, {}, []
        for ref, tensor in self._captured():
            self._known.setdefault(id(tensor), ref)
            if plain_tensor(tensor) and tensor.numel():
                self._alike.setdefault(_place(tensor), ref)
                self._places.append((tensor.data_ptr(), tensor.numel() * tensor.element_size(), ref))
        self._places.sort(key=lambda place: place[0])

    def _captured(self) -> Iterable[tuple[list[str], Tensor]]:
        binding = self._binding
        for name, param in binding.params.items():
            yield ["param", name], param
            if param.grad is not None:
                yield ["grad", name], param.grad
        for name, master in binding.masters.items():
            yield ["master", name], master
            if master.grad is not None:
                yield ["master_grad", name], master.grad
        for name, buffer in binding.buffers().items():
            yield ["buffer", name], buffer
        for name in binding.owner:
            odd = self._odd.get(name, ())
            for key, value in binding.state(name).items():
                if isinstance(value, Tensor) and key not in odd:
                    yield ["state", name, key], value

    def _find_known(self, ref: list[str]) -> Any:
        if ref[0] == "data":
            whole = self._find_known(ref[1:])
            return None if whole is None else whole.data
        binding, kind, name = self._binding, ref[0], ref[1]
        found: Any
        if kind == "state":
            found = binding.state(name).get(ref[2])
        elif kind == "buffer":
            found = binding.buffers().get(name)
        else:
            found = (binding.masters if kind.startswith("master") else binding.params).get(name)
            if kind.endswith("grad") and found is not None:
                found = found.grad
        return found

    # -- after a restart -----------------------------------------------------------------------------

    def load(self, packed: bytes | None, names: Iterable[str]) -> None:
        """Put back what was recorded: of all optimizers, and of the state of these parameters."""
        if packed is None:  # of an earlier version
            return
        kept = values.unpack(packed)
        for given, optimizer, keeper, attributes, groups, foreign in zip(
            self._given,
            self._binding.optimizers,
            self._binding.keepers,
            kept["attributes"],
            kept["groups"],
            kept["foreign"],
            strict=True,
        ):
            reader = TreeReader(self._find_known)
            root = keeper if given is optimizer else given
            reader.begin(root)
            reader.put_attributes(root, attributes)
            for i, key, node in groups:
                group = optimizer.param_groups[i]
                if not left_alone(node):
                    group[key] = TreeReader(self._find_known).put(node, group.get(key))
            self._load_foreign(keeper, foreign)
        for name in names:
            self._load_entries(name, kept["entries"].get(name, ()))
            if name in kept["keys"]:
                self._keep_only(name, kept["keys"][name])

    def _load_foreign(self, keeper: torch.optim.Optimizer, pairs: list[Any]) -> None:
        reader = TreeReader(self._find_known)
        owned = self._owned()
        before = {k: v for k, v in keeper.state.items() if id(k) not in owned}
        for key in before:
            del keeper.state[key]
        for key_node, node in pairs:
            key = reader.put(key_node)
            keeper.state[key] = reader.put(node, before.get(key))

    def _load_entries(self, name: str, entries: Iterable[list[Any]]) -> None:
        keeper, held = self._binding.keeper(name), self._binding.held(name)
        reader = TreeReader(self._find_known)
        for key, node in entries:
            state = keeper.state[held]
            found = reader.put(node, state.get(key))
            if isinstance(found, Tensor) and found.device != held.device and found.ndim:
                found = found.to(held.device)
            state[key] = found

    def _keep_only(self, name: str, keys: list[str] | None) -> None:
        keeper, held = self._binding.keeper(name), self._binding.held(name)
        state = keeper.state.pop(held, {})
        if keys is not None:
            keeper.state[held] = {k: state[k] for k in keys if k in state}

    def difference(self, packed: bytes | None, *, entries: bool = False) -> str:
        """The first thing that is not as it was recorded; empty if all is.

        Args:
            entries: compare what is in the state per parameter, too.
        """
        if packed is None:
            return ""
        recorded = values.unpack(packed)
        try:
            live = self.tree()
        except NotCapturable as refused:
            return str(refused)
        for i in range(len(self._names)):
            if found := self._unlike(recorded, live, i):
                return found
        if entries and (path := unlike(_as_node(recorded["entries"]), _as_node(live["entries"]))):
            return f"state{path}"
        return ""

    def unlike(self, other: KeptState, optimizer: int, names: Collection[str] | None) -> str:
        """The first thing that optimizer number ``optimizer`` keeps otherwise than that of ``other``;
        empty if there is none. `look` has looked at both.

        Args:
            names: only what is in the state of these parameters is compared; None: everything.
        Raises:
            Refused: something that no snapshot can hold.
        """
        mine, theirs = self.tree(), other.tree()
        if names is None:
            if found := self._unlike(theirs, mine, optimizer):
                return found
            names = self._binding.owner
        of = [n for n in names if self._binding.owner[n][0] == optimizer]
        a, b = (_as_node({n: e for n, e in tree["entries"].items() if n in of}) for tree in (theirs, mine))
        path = unlike(a, b)
        return f"state{path}" if path else ""

    def _unlike(self, recorded: Mapping[str, Any], live: Mapping[str, Any], optimizer: int) -> str:
        for part, kind in (("attributes", "o"), ("foreign", "d")):
            # An attribute may have come earlier in one life than in another.
            a, b = (
                sorted(found[part][optimizer], key=lambda pair: str(pair[0])) for found in (recorded, live)
            )
            path = unlike([kind, a], [kind, b])
            if path:
                return f"{path.removeprefix('.')} of optimizer {self._names[optimizer]}"
        return ""


def _as_node(entries: Mapping[str, list[list[Any]]]) -> list[Any]:
    return [
        "d",
        [[["v", n], ["d", [[["v", k], v] for k, v in e]]] for n, e in sorted(entries.items())],
    ]


def _values_of(keepers: Iterable[torch.optim.Optimizer]) -> list[Any]:
    """All that is in their state, to see whether it is what it was."""
    found: list[Any] = []
    for keeper in keepers:
        for state in keeper.state.values():
            found += state.values() if isinstance(state, dict) else (state,)
            found.append(state)
    return found


def _simple(value: object) -> bool:
    return not isinstance(value, Tensor) and plain(value) and not _holds_tensors(value)


def _holds_tensors(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_holds_tensors, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_holds_tensors, value))
    return isinstance(value, Tensor)


def _plannable(tensor: Tensor) -> bool:
    return plain_tensor(tensor) or hasattr(tensor, "to_local")


def _place(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
