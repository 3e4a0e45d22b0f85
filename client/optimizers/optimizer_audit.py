"""What optimizers keep besides the tensors per parameter that a plan captures.

Counters in attributes, inner optimizers, histories in lists, generators, ``state["step"]``: all of it is
inspected before every snapshot. Plain values, tensors and generators go into the step scalars, and are
put back in place after a restart. Anything else is refused by its path, so that no snapshot is taken that
could not restore it. Values that are as they were when the optimizer was passed to us, and cannot be read
from outside, are left as they are.
"""

from __future__ import annotations

import bisect
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
    flat_state,
    is_ignored,
    left_alone,
    part_of,
    plain,
    plain_tensor,
    same_objects,
    state_values,
    unlike,
    with_parts,
)

if TYPE_CHECKING:
    import torch

    from ckptd.client.model.live_state import LiveState

logger = get_logger(__name__)

# The training thread copies it with each snapshot, and msgpack holds 4 GiB at most in one piece.
MAX_BYTES = 1 << 30
_WARNED_BYTES = 16 << 20

Specs = Mapping[str, Sequence[StateSpec]]
# Names a tensor that is captured elsewhere: its kind, its parameter or buffer, a key of its state.
Reference = list[str]
_NO_PARTS: Mapping[int, Reference] = {}


def cannot_be_captured(who: str, refused: NotCapturable) -> str:
    """The error text, with what to do."""
    return (
        f"optimizer {who} keeps {refused.path} ({refused.why}), which cannot be captured: no snapshot is "
        "taken, and after a failure this run begins anew. Keep it in tensors or plain values (numbers, text, "
        "lists, dicts), or made in the optimizer's constructor; or use another optimizer (docs/optimizers.md)"
    )


class _CapturedTensors:
    """References to tensors that are captured elsewhere, by identity, memory or address.

    Called with a tensor, or with a number that may be its identity or an address in it: an optimizer
    may keep tables by ``data_ptr()``. Built at the first call.
    """

    def __init__(self, captured: Callable[[], Iterable[tuple[Reference, Tensor]]]) -> None:
        self._captured = captured
        self._by_id: dict[int, Reference] | None = None
        self._by_memory: dict[tuple[Any, ...], Reference] = {}
        self._places: list[tuple[int, int, Reference]] = []

    def __call__(self, tensor: Tensor | int) -> list[Any] | None:
        by_id = self._build() if self._by_id is None else self._by_id
        if isinstance(tensor, int):
            return by_id.get(tensor) or self._of_address(tensor)
        found = by_id.get(id(tensor))
        if found is not None:
            return found
        if not plain_tensor(tensor) or not tensor.numel():
            return None
        same = self._by_memory.get(_memory_of(tensor))
        return None if same is None else ["data", *same]

    def _build(self) -> dict[int, Reference]:
        by_id: dict[int, Reference] = {}
        for ref, tensor in self._captured():
            by_id.setdefault(id(tensor), ref)
            if plain_tensor(tensor) and tensor.numel():
                self._by_memory.setdefault(_memory_of(tensor), ref)
                self._places.append((tensor.data_ptr(), tensor.numel() * tensor.element_size(), ref))
        self._places.sort(key=lambda place: place[0])
        self._by_id = by_id
        return by_id

    def _of_address(self, number: int) -> list[Any] | None:
        at = bisect.bisect_right(self._places, number, key=lambda place: place[0]) - 1
        if at < 0:
            return None
        start, size, ref = self._places[at]
        return ["a", number - start, *ref] if number < start + size else None


class KeptState:
    """What the optimizers of one binding keep.

    Args:
        given: the optimizers as the user passed them, with wrappers, in the binding's order.

    Attributes:
        specs: what a plan captures of the state per parameter, as of the last look.
        names: the class name of each optimizer.
        given: the optimizers, without wrappers that keep nothing of the run.
    Raises:
        ValueError: one keeps what no snapshot can hold, from the beginning.
    """

    def __init__(self, binding: LiveState, given: Sequence[Any]) -> None:
        # Accelerate's and others' wrappers keep nothing of the run.
        pairs = zip(given, binding.optimizers, strict=True)
        self._binding, self.given = binding, [o if is_ignored(g) else g for g, o in pairs]
        self.names = [type(g).__name__ for g in self.given]
        self._modules = {id(m) for m in binding.model.modules()}
        self.specs: Specs = {}
        # All values of the state at the last look, and what was found.
        self._seen: list[Any] = []
        self._unknown = ""
        self._looked: dict[str, tuple[Any, ...]] = {}
        # By parameter: keys that no plan captures as tensors.
        self._odd: dict[str, list[str]] = {}
        # By parameter: references to the planned parts of tensors that are made of others, by identity.
        self._parts: dict[str, dict[int, Reference]] = {}
        self._composed = False  # there are such tensors; each look compares their parts, too
        # Where keys differ from the planned ones: all keys, in the optimizer's own order; None:
        # there is no state.
        self._deviating: dict[str, list[str] | None] = {}
        self._held: tuple[object, frozenset[int]] = (None, frozenset())
        # By keeper: all keys of its state at the last look, and those that belong to no parameter.
        self._foreign_keys: dict[int, tuple[list[Any], list[Any]]] = {}
        self._volatile: set[tuple[str, str]] = set()
        self._warned = False
        self._num_generators = 0
        self._check: Callable[[Mapping[str, Any]], object] | None = None
        self._baseline: Baseline | None = None
        try:
            self._baseline = self._walk()[1]
        except NotCapturable as refused:
            raise ValueError(cannot_be_captured(self.whose, refused)) from None

    @property
    def whose(self) -> str:
        """The optimizers' names."""
        return ", ".join(dict.fromkeys(self.names))

    def wrappers(self) -> list[str]:
        """Why a wrapped optimizer cannot be captured in parts; empty if none is wrapped."""
        return [
            f"{type(given).__name__} is around {type(optimizer).__name__}, and its own step may "
            "depend on all parameters"
            for given, optimizer in zip(self.given, self._binding.optimizers, strict=True)
            if given is not optimizer
        ]

    # -- the state now -------------------------------------------------------------------------------

    def look(self, specs: Specs) -> str:
        """Compare the state per parameter with what the plan captures of it.

        Returns:
            A tensor that a new plan could capture; empty if there is none.
        """
        now = state_values(self._binding.keepers, parts=self._composed)
        if specs is not self.specs:
            self.specs, self._looked, self._odd, self._deviating = specs, {}, {}, {}
            self._parts = {}
        elif same_objects(now, self._seen):
            return self._unknown
        unknown = ""
        for name in self._binding.owner:
            state = self._binding.state(name)
            values_now = tuple(with_parts(state.values()))
            before = self._looked.get(name)
            if not before or not same_objects(values_now, before):
                self._looked[name] = values_now
                unknown = self._look_at(name, state) or unknown
        # Only now: a look that fails half-way must be made again.
        self._seen, self._unknown = now, unknown
        return unknown

    def _look_at(self, name: str, state: Mapping[str, Any]) -> str:
        planned = {s.key: s for s in self.specs.get(name, ())}
        held, flat = self._binding.held(name), flat_state(state)
        odd = [k for k, v in flat.items() if k not in planned or not fits(v, planned[k], held)]
        self._odd.pop(name, None)
        self._deviating.pop(name, None)
        self._parts.pop(name, None)
        self._composed |= flat.keys() != state.keys()
        # Of a tensor that is made of others, an entry has the class, and references to its parts.
        if whole := [k for k in state if k in odd or k not in flat]:
            self._odd[name] = whole
        if parts := flat.keys() - state.keys() - set(odd):
            self._parts[name] = {id(flat[k]): ["state", name, k] for k in parts}
        if not state:
            # An optimizer that only asks for the state of a parameter leaves an empty one.
            self._deviating[name] = [] if held in self._binding.keeper(name).state else None
        elif list(state) != list(planned):
            self._deviating[name] = list(state)
        unknown = ""
        for key in odd:
            value = flat[key]
            if not isinstance(value, Tensor) or not (plain_tensor(value) or hasattr(value, "to_local")):
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
        """Everything else, packed: it may change after the return.

        Raises:
            NotCapturable: something that no snapshot can hold.
        """
        kept, _ = self._walk()
        if self._check is not None:
            self._check(kept)
        packed = values.pack(kept, "what the optimizer keeps")
        if len(packed) > MAX_BYTES:
            raise NotCapturable(
                self.whose, f"{len(packed)} bytes beside tensors per parameter, {MAX_BYTES} at most"
            )
        if len(packed) > _WARNED_BYTES and not self._warned:
            self._warned = True
            logger.warning(
                "optimizer %s keeps %.1f MiB elsewhere than in tensors per parameter: the training "
                "thread copies them in each snapshot",
                self.whose,
                len(packed) / 2**20,
            )
        return packed

    def tree(self) -> dict[str, Any]:
        """What `gather` packs, in memory of its own.

        Raises:
            NotCapturable: something that no snapshot can hold.
        """
        found: dict[str, Any] = values.unpack(values.pack(self._walk()[0], "what the optimizer keeps"))
        return found

    def keeps_generators(self) -> bool:
        """True if it holds random generators now.

        Raises:
            NotCapturable: something that no snapshot can hold.
        """
        self._walk()
        return self._num_generators > 0

    def check_also(self, check: Callable[[Mapping[str, Any]], object]) -> None:
        """From now on `gather` calls ``check``, which may raise `NotCapturable`."""
        self._check = check

    def _walk(self) -> tuple[dict[str, Any], Baseline]:
        made, known, skipped = Baseline(), _CapturedTensors(self._captured), self._skipped()
        writers: list[TreeWriter] = []

        def is_skipped(value: object) -> bool:
            return id(value) in skipped or id(value) in self._modules

        def writer(into: Baseline | None = None, parts: Mapping[int, Reference] = _NO_PARTS) -> TreeWriter:
            def find(value: Tensor | int) -> list[Any] | None:
                return parts.get(id(value)) or known(value)

            writers.append(TreeWriter(find, self._baseline, is_skipped, into))
            return writers[-1]

        attributes: list[Any] = []
        groups: list[Any] = []
        foreign: list[Any] = []
        for root, optimizer, keeper in self._roots():
            attributes.append(writer(made).attributes(root, ""))
            # Options that ``gather_groups`` leaves out.
            groups.append(
                [
                    [i, key, writer(made).node(value, f"param_groups[{i}][{key!r}]")]
                    for i, group in enumerate(optimizer.param_groups)
                    for key, value in group.items()
                    if key != "params" and not plain(value)
                ]
            )
            one = writer()
            foreign.append([one.pair(k, v, "state") for k, v in self._foreign(keeper).items()])
        entries = {}
        for name, keys in self._odd.items():
            state, one = self._binding.state(name), writer(parts=self._parts.get(name, _NO_PARTS))
            found = [[k, one.node(state[k], f"state[{name}][{k!r}]")] for k in keys if not _simple(state[k])]
            if found:
                entries[name] = found
        self._num_generators = sum(one.num_generators for one in writers)
        return {
            "attributes": attributes,
            "groups": groups,
            "foreign": foreign,
            "entries": entries,
            "keys": self._deviating,
        }, made

    def _roots(self) -> Iterable[tuple[Any, torch.optim.Optimizer, torch.optim.Optimizer]]:
        """By optimizer: the object whose attributes count, the optimizer, and the keeper of its state."""
        binding = self._binding
        for given, optimizer, keeper in zip(self.given, binding.optimizers, binding.keepers, strict=True):
            yield (keeper if given is optimizer else given), optimizer, keeper

    def _foreign(self, keeper: torch.optim.Optimizer) -> dict[Any, Any]:
        """Entries of ``state`` that belong to no parameter, such as ``state["step"]``."""
        binding, keys = self._binding, list(keeper.state)
        if self._held[0] is not binding.owner:
            self._held = binding.owner, frozenset(id(binding.held(n)) for n in binding.owner)
            self._foreign_keys = {}
        known = self._foreign_keys.get(id(keeper))
        if known is None or not same_objects(keys, known[0]):
            owned = self._held[1]
            known = self._foreign_keys[id(keeper)] = keys, [k for k in keys if id(k) not in owned]
        return {k: keeper.state[k] for k in known[1]}

    def _skipped(self) -> set[int]:
        """Identities of objects that are captured elsewhere, besides modules."""
        binding = self._binding
        found = set[int]()
        for optimizer in (*binding.optimizers, *binding.keepers):
            found.add(id(optimizer.state))
            found.add(id(optimizer.param_groups))
            found.update(map(id, optimizer.param_groups))
        return found

    # -- tensors that are captured elsewhere -------------------------------------------------------

    def _captured(self) -> Iterable[tuple[Reference, Tensor]]:
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

    def _find_known(self, ref: Reference) -> Any:
        """The live tensor of a reference."""
        if ref[0] == "data":
            whole = self._find_known(ref[1:])
            return None if whole is None else whole.data
        binding, kind, name = self._binding, ref[0], ref[1]
        found: Any
        if kind == "state":
            found = part_of(binding.state(name), ref[2])
        elif kind == "buffer":
            found = binding.buffers().get(name)
        else:
            found = (binding.masters if kind.startswith("master") else binding.params).get(name)
            if kind.endswith("grad") and found is not None:
                found = found.grad
        return found

    # -- after a restart -----------------------------------------------------------------------------

    def load(self, packed: bytes | None, names: Iterable[str]) -> None:
        """Put back the recording: of all optimizers, and of the state of these parameters."""
        if packed is None:  # of an earlier version
            return
        kept = values.unpack(packed)
        parts = zip(kept["attributes"], kept["groups"], kept["foreign"], strict=True)
        for (root, optimizer, keeper), (attributes, groups, foreign) in zip(
            self._roots(), parts, strict=True
        ):
            reader = TreeReader(self._find_known)
            reader.begin(root)
            reader.put_attributes(root, attributes)
            for i, key, node in groups:
                group = optimizer.param_groups[i]
                if not left_alone(node):
                    group[key] = TreeReader(self._find_known).put(node, group.get(key))
            self._load_foreign(keeper, foreign)
        self._load_names(kept, names)

    def load_entries(self, packed: bytes | None, names: Iterable[str]) -> None:
        """Put back the recorded state of these parameters alone."""
        if packed is not None:
            self._load_names(values.unpack(packed), names)

    def _load_names(self, kept: Mapping[str, Any], names: Iterable[str]) -> None:
        for name in names:
            self._load_entries(name, kept["entries"].get(name, ()))
            if name in kept["keys"]:
                self._keep_only(name, kept["keys"][name])

    def _load_foreign(self, keeper: torch.optim.Optimizer, pairs: list[Any]) -> None:
        reader = TreeReader(self._find_known)
        before = self._foreign(keeper)
        for key in before:
            del keeper.state[key]
        for key_node, node in pairs:
            key = reader.put(key_node)
            keeper.state[key] = reader.put(node, before.get(key))

    def _load_entries(self, name: str, entries: Iterable[list[Any]]) -> None:
        keeper, held = self._binding.keeper(name), self._binding.held(name)
        reader = TreeReader(self._find_known, held)
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

    # -- comparison ----------------------------------------------------------------------------------

    def difference(self, packed: bytes | None, *, entries: bool = False) -> str:
        """The first difference from the recording; empty if there is none.

        Args:
            entries: compare the state per parameter, too.
        """
        if packed is None:
            return ""
        recorded = values.unpack(packed)
        try:
            live = self.tree()
        except NotCapturable as refused:
            return str(refused)
        for i in range(len(self.names)):
            if found := self._unlike(recorded, live, i):
                return found
        if entries and (path := unlike(_as_node(recorded["entries"]), _as_node(live["entries"]))):
            return f"state{path}"
        return ""

    def unlike(self, other: KeptState, optimizer: int, names: Collection[str] | None) -> str:
        """The first difference of optimizer number ``optimizer`` from that of ``other``; empty if none.

        `look` has looked at both.

        Args:
            names: only the state of these parameters is compared; None: everything.
        Raises:
            NotCapturable: something that no snapshot can hold.
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
            # An attribute may have come earlier in one life than in another. Those that stay as they are tell
            # nothing: a scheduler puts a `step` of its own on the optimizer, which a copy of it lacks.
            a, b = (
                sorted(
                    (pair for pair in found[part][optimizer] if not left_alone(pair[1])),
                    key=lambda pair: str(pair[0]),
                )
                for found in (recorded, live)
            )
            path = unlike([kind, a], [kind, b])
            if path:
                return f"{path.removeprefix('.')} of optimizer {self.names[optimizer]}"
        return ""


def _as_node(entries: Mapping[str, list[list[Any]]]) -> list[Any]:
    return [
        "d",
        [[["v", n], ["d", [[["v", k], v] for k, v in e]]] for n, e in sorted(entries.items())],
    ]


def _simple(value: object) -> bool:
    return plain(value) and not _holds_tensors(value)


def _holds_tensors(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_holds_tensors, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_holds_tensors, value))
    return isinstance(value, Tensor)


def _memory_of(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
