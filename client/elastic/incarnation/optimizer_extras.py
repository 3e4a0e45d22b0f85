"""State of optimizers besides their tensors, in an incarnation of other ranks than recorded it.

`KeptState` gathers that state (``ckptd.client.optimizers.optimizer_audit``): attributes, entries of
``state`` that belong to no parameter, nested values per parameter. State of one parameter goes with
that parameter. The rest a rank gets from the rank of its number, and a new rank from the lowest
one. That is exact for what does not depend on which parameters a rank has. An optimizer that
updates experts, of which each rank has others in each incarnation, may keep lists and tensors by the
position of a parameter: these are refused, by their path, as soon as they appear.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import xxhash
from torch import Tensor

from ckptd.client import values
from ckptd.client.model.live_state import LiveState, local
from ckptd.client.optimizers.value_trees import NotCapturable
from ckptd.client.ranks.collectives import Collectives
from ckptd.core.elastic.incarnations import ExpertLayers

Node = Any
"""A value, or a list that begins with a tag (``ckptd.client.optimizers.value_trees``)."""

_BY_POSITION = (
    "it may go by the position of a parameter, and ranks have other experts in the next incarnation"
)


class OptimizerExtras:
    """The rules for the optimizers of one rank; created before anything is loaded into them.

    Args:
        binding: of an `ElasticJob`'s model, with optimizers as the program makes them.
    """

    def __init__(self, binding: LiveState, layers: ExpertLayers) -> None:
        self._binding, self._layers = binding, layers
        self._fresh = [dict(each) for each in binding.kept.tree()["attributes"]]
        self._moving = {binding.owner[n][0] for n in binding.owner if self._moves(n)}

    def _moves(self, name: str) -> bool:
        """True if only some ranks have this parameter or buffer, or each has another part of it."""
        return self._layers.expert_of(name) is not None or self._layers.shard_of(name) is not None

    def fitted(self, kept: Mapping[str, Any]) -> dict[str, Any]:
        """The same state for this rank: a list of parameters becomes the list of its own.

        Raises:
            NotCapturable: a value may be wrong here; with its path.
        """
        found = {part: list(kept[part]) for part in ("attributes", "groups", "foreign")}
        for i in self._moving:
            fresh = self._fresh[i]
            found["attributes"][i] = [
                [name, self._fit(node, fresh.get(name), name)] for name, node in kept["attributes"][i]
            ]
            for group, key, node in kept["groups"][i]:
                self._fit(node, None, f"param_groups[{group}][{key!r}]")
            for key, node in kept["foreign"][i]:
                self._fit_key(key, "state")
                self._fit(node, None, f"state[{_key_text(key)}]")
        for name, pairs in kept["entries"].items():
            for key, node in pairs:
                self._check_entry(node, name, f"state[{name}][{key!r}]")
        return {**kept, **found}

    def _fit(self, node: Node, fresh: Node, path: str) -> Node:
        if values.equal(node, fresh):
            return node
        if isinstance(node, np.ndarray) and node.size > 1:
            raise NotCapturable(path, f"an array; {_BY_POSITION}")
        if not isinstance(node, list):
            return node
        tag = node[0]
        if tag == "k" and self._moves(_name_in(node)):
            raise NotCapturable(path, f"a tensor of {_name_in(node)}, which not all ranks have")
        if tag in ("w", "p") or (tag == "x" and node[1].numel() > 1):
            raise NotCapturable(path, f"a tensor; {_BY_POSITION}")
        if tag in ("l", "q", "s"):
            return self._list(node, fresh, path)
        if tag == "t":
            return ["t", [self._fit(part, None, f"{path}[{i}]") for i, part in enumerate(node[1])]]
        if tag == "o":
            made = dict(fresh[1]) if _is_a("o", fresh) else {}
            return [
                "o",
                [[name, self._fit(part, made.get(name), f"{path}.{name}")] for name, part in node[1]],
            ]
        if tag == "d":
            return ["d", [self._pair(key, part, fresh, path) for key, part in node[1]]]
        return node

    def _pair(self, key: Node, node: Node, fresh: Node, path: str) -> Node:
        self._fit_key(key, path)
        before = next((v for k, v in fresh[1] if values.equal(k, key)), None) if _is_a("d", fresh) else None
        return [key, self._fit(node, before, f"{path}[{_key_text(key)}]")]

    def _fit_key(self, key: Node, path: str) -> None:
        parts = key[1] if key[0] == "T" else [key]
        for part in parts:
            if part[0] in ("k", "n", "a") and self._moves(_name_in(part)):
                raise NotCapturable(f"{path}[{_name_in(part)}]", "not all ranks have this parameter")

    def _list(self, node: Node, fresh: Node, path: str) -> Node:
        """This rank's own list if it consists of parameters; no other list is known to fit."""
        theirs, own = self._common(node), self._common(fresh)
        if theirs is not None and values.equal(theirs, own):
            return fresh
        raise NotCapturable(path, f"a {'set' if node[0] == 's' else 'list'}; {_BY_POSITION}")

    def _common(self, node: Node) -> list[Node] | None:
        """Of a list of parameters those that all ranks have; None for any other node."""
        if not _is_a("l", node) or not all(_is_a("k", part) for part in node[1]):
            return None
        return [part for part in node[1] if not self._moves(_name_in(part))]

    def _check_entry(self, node: Node, name: str, path: str) -> None:
        for part in _tagged(node):
            if part[0] == "k" and _name_in(part) != name and self._moves(_name_in(part)):
                raise NotCapturable(path, f"a tensor of {_name_in(part)}, which not all ranks have")
            if part[0] == "x" and not self._of_its_own(part[1], name):
                raise NotCapturable(path, f"a tensor of shape {list(part[1].shape)}; {_BY_POSITION}")

    def _of_its_own(self, tensor: Tensor, name: str) -> bool:
        """True if a tensor in a parameter's state can belong to that parameter alone, by its shape."""
        if self._binding.owner[name][0] not in self._moving or tensor.numel() <= 1:
            return True
        probe = self._binding.probe(name)
        if probe is not None and probe.independent:
            return True
        held = local(self._binding.held(name))
        return {1, held.numel(), *held.shape}.issuperset(tensor.shape)

    def digests(self, kept: Mapping[str, Any]) -> dict[str, str]:
        """Of each attribute, by its path: equal on two ranks if it does not depend on the rank.
        Generators are left out.
        """
        found = {}
        for i, who in enumerate(self._binding.kept.names):
            for name, node in kept["attributes"][i]:
                packed = values.pack(self._without_ranks(node), name)
                found[f"{name} of optimizer {who}"] = xxhash.xxh3_128_hexdigest(packed)
            packed = values.pack(kept["foreign"][i], "state")
            found[f"state of optimizer {who}"] = xxhash.xxh3_128_hexdigest(packed)
        return found

    def _without_ranks(self, node: Node) -> Node:
        if not isinstance(node, list) or not node:
            return node
        if node[0] == "g":
            return ["g"]
        return [
            self._without_ranks(part)
            for part in node
            if not (_is_a("k", part) and self._moves(_name_in(part)))
        ]


def check_recorded_equal(digests: Mapping[str, str], recorder: int, ranks: Collectives) -> None:
    """If a rank joins, check that all ranks got equal state; a collective call.

    Args:
        digests: of the state that this rank got (`OptimizerExtras.digests`).
        recorder: the rank that recorded it.
    Raises:
        ValueError: on all ranks: names the difference.
    """
    by_rank = ranks.gather((recorder, dict(digests)), tuple[int, dict[str, str]])
    joins = [rank for rank, (recorded_by, _) in enumerate(by_rank) if recorded_by != rank]
    if not joins:
        return
    first, common = by_rank[0]
    for other, found in by_rank[1:]:
        unlike = sorted(k for k in common.keys() | found.keys() if common.get(k) != found.get(k))
        if unlike:
            raise ValueError(
                f"{unlike[0]} was not the same on ranks {first} and {other}, which recorded it, "
                f"and rank {joins[0]} joins: nobody knows what it should have there. Start as many "
                "ranks as before, or pass run= a new name to begin anew; an optimizer of an elastic "
                "job should keep the same on all ranks"
            )


def _is_a(tag: str, node: Node) -> bool:
    return isinstance(node, list) and bool(node) and node[0] == tag


def _tagged(node: Node) -> Iterator[Node]:
    """The node and all nodes below it that have a tag."""
    if isinstance(node, list):
        if node and isinstance(node[0], str):
            yield node
        for part in node:
            yield from _tagged(part)


def _name_in(node: Node) -> str:
    """The parameter or buffer of a reference: ``k`` or ``n``, kind, name …; ``a``, distance, kind,
    name; with ``data`` before the kind.
    """
    rest = node[2:] if node[0] == "a" else node[1:]
    name = rest[2] if rest[0] == "data" else rest[1]
    return str(name)


def _key_text(key: Node) -> str:
    if key[0] == "v":
        return repr(key[1])
    return "(...)" if key[0] == "T" else _name_in(key)
