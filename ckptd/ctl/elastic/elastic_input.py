"""What `ckptctl elastic` answers about: a file, or what a running job told, checked and made into arrays.

Everything that a person may have got wrong in a file is said here, with the place in the file and
what belongs there.
"""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from ckptd.core.elastic.elastic_types import Cluster, ExpertPlacement, Loads, checked_loads
from ckptd.transport.control.messages import Elastic, ElasticNode

__all__ = ["InputProblem", "Situation", "read_file", "situation"]

Ints = NDArray[np.int64]


class InputProblem(ValueError):
    """The file, or what is in it, cannot be used; the message says what is wrong and what belongs there."""


@dataclass(frozen=True, slots=True, eq=False)
class Situation:
    """An `Elastic` as arrays.

    Args:
        loads_LE: tokens of the newest period.
        held: what the nodes hold; None: not told.
        expert_bytes_LE: None: not told.
        speeds_N: bytes a second of every node; None: not told.
        max_straggler: None: no bound.
    """

    told: Elastic
    cluster: Cluster
    loads_LE: Loads
    held: ExpertPlacement | None
    expert_bytes_LE: Ints | None
    speeds_N: Ints | None
    max_straggler: float | None

    @property
    def names(self) -> tuple[str, ...]:
        """Of the nodes."""
        return tuple(node.name for node in self.told.nodes)

    @property
    def layers(self) -> tuple[str, ...]:
        """Names of the layers; their numbers where they have none."""
        return self.told.layers or tuple(f"layer {number}" for number in range(len(self.loads_LE)))

    def only(self, nodes: Ints) -> Situation:
        """The same with these nodes alone, given by their numbers.

        Raises:
            InputProblem: none is left.
        """
        if not len(nodes):
            raise InputProblem("no node is left: there is nothing to place experts on")
        told = msgspec.structs.replace(
            self.told, nodes=tuple(self.told.nodes[n] for n in nodes.tolist())
        )
        return dataclasses.replace(
            self,
            told=told,
            cluster=_cluster(told),
            held=None if self.held is None else ExpertPlacement(self.held.counts[:, nodes]),
            speeds_N=None if self.speeds_N is None else self.speeds_N[nodes],
        )


def read_file(path: str) -> Elastic:
    """The `Elastic` of a JSON file; also of what `ckptctl elastic show --json` printed, if that is
    of one run.

    ``nodes`` may be a number: as many nodes, named by their numbers, of ``slots`` slots and
    ``ranks`` ranks each. ``expert_bytes`` may be one number for all experts, ``max_straggler``
    null.

    Raises:
        InputProblem: it cannot be read, is no JSON, or a value is not what it must be.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputProblem(f"{path} cannot be read: {error}") from error
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputProblem(f"{path} is not JSON: {error}") from error
    try:
        return msgspec.convert(_spelled_out(found), Elastic, strict=True)
    except (msgspec.ValidationError, InputProblem) as error:
        raise InputProblem(f"{path}: {error}") from error


def _spelled_out(found: Any) -> dict[str, Any]:
    """Without the abbreviations that people may use."""
    if isinstance(found, dict) and "runs" in found:
        found = _of_one_run(found["runs"])
    if not isinstance(found, dict):
        raise InputProblem(
            'a JSON object is needed, such as {"loads": [[5, 3]], "nodes": 2, "slots": 2}'
        )
    out = dict(found)
    for key in ("loads", "nodes"):
        if key not in out:
            raise InputProblem(
                f"there is no {key!r}: tokens of every expert of each layer, and nodes"
            )
    for name in ("loads", "expert_bytes"):
        _refuse_floats(out.get(name), name)
    slots, ranks = out.pop("slots", None), out.pop("ranks", 1)
    nodes = out["nodes"]
    if isinstance(nodes, int) and not isinstance(nodes, bool):
        if not 1 <= nodes <= 1 << 16 or slots is None:
            raise InputProblem(
                f'"nodes": {nodes} needs "slots" beside it, and to be a number of at least 1 (at most 65536)'
            )
        nodes = [{"name": str(number)} for number in range(nodes)]
    if isinstance(nodes, list):
        every = {"ranks": ranks} | ({} if slots is None else {"slots": slots})
        out["nodes"] = [every | node if isinstance(node, dict) else node for node in nodes]
    if isinstance(out.get("expert_bytes"), int):
        out["expert_bytes"] = [[out["expert_bytes"]]]
    if out.get("max_straggler", 0) is None:
        out["max_straggler"] = 0.0
    return out


def _of_one_run(runs: Any) -> Any:
    if not isinstance(runs, list) or len(runs) != 1 or not isinstance(runs[0], dict):
        raise InputProblem(
            "it is of several runs, or none: keep one of them (show --job … --run …)"
        )
    return runs[0].get("told")


def _refuse_floats(value: Any, name: str) -> None:
    """In words: what the decoder says of a NaN does not help."""
    for where, number in _numbers(value, name):
        if isinstance(number, float) and not math.isfinite(number):
            raise InputProblem(f"{where} is {number}: a number of tokens or bytes was not measured")
        if isinstance(number, float):
            raise InputProblem(f"{where} is {number}: whole numbers are needed; round them once")
        if number < 0:
            raise InputProblem(f"{where} is {number}: it is never negative")


def _numbers(value: Any, name: str) -> list[tuple[str, int | float]]:
    if isinstance(value, list):
        inner = (_numbers(one, f"{name}[{index}]") for index, one in enumerate(value))
        return [found for part in inner for found in part]
    if isinstance(value, int | float) and not isinstance(value, bool):
        return [(name, value)]
    return []


def situation(told: Elastic) -> Situation:
    """Check it and make arrays of it.

    Raises:
        InputProblem: what is said of the same thing does not fit together; each case in words.
    """
    loads_LE = _rectangle(told.loads, "loads")
    names = [node.name for node in told.nodes]
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise InputProblem(f"two nodes are called {twice}: each needs a name of its own")
    if told.layers and len(told.layers) != len(loads_LE):
        raise InputProblem(f"{len(told.layers)} names of layers for {len(loads_LE)} rows of loads")
    if told.max_straggler and told.max_straggler < 1:
        raise InputProblem(
            f"max_straggler is {told.max_straggler}: the busiest rank is never below the mean; 1.1 is usual, null is no bound"
        )
    for number, period in enumerate(told.history):
        if _rectangle(period, f"history[{number}]").shape != loads_LE.shape:
            raise InputProblem(f"history[{number}] has another shape than loads")
    known = all(node.bytes_per_s for node in told.nodes)
    return Situation(
        told,
        _cluster(told),
        loads_LE,
        _held(told, loads_LE.shape),
        _expert_bytes(told, loads_LE.shape),
        np.array([node.bytes_per_s for node in told.nodes]) if known else None,
        told.max_straggler or None,
    )


def _rectangle(rows: tuple[tuple[int, ...], ...], name: str) -> Loads:
    if not rows or not rows[0]:
        raise InputProblem(f"{name} is empty: a row for each layer, with the tokens of each expert")
    for number, row in enumerate(rows):
        if len(row) != len(rows[0]):
            raise InputProblem(
                f"{name}[{number}] has {len(row)} experts, {name}[0] has {len(rows[0])}: all layers need as many"
            )
    return checked_loads(np.array(rows, dtype=np.int64))


def _cluster(told: Elastic) -> Cluster:
    domains = tuple(_domain(node, told.domain) for node in told.nodes) if told.domain else ()
    slots = np.array([node.slots for node in told.nodes], dtype=np.int64)
    return Cluster(slots, domains, tuple(node.ranks for node in told.nodes))


def _domain(node: ElasticNode, label: str) -> str:
    if label not in node.labels:
        has = ", ".join(sorted(node.labels)) or "none"
        raise InputProblem(
            f'node {node.name} has no label {label!r} (it has: {has}), which "domain" names'
        )
    return node.labels[label]


def _held(told: Elastic, shape: tuple[int, ...]) -> ExpertPlacement | None:
    if not any(node.holds for node in told.nodes):
        return None
    counts = np.zeros((shape[0], len(told.nodes), shape[1]), dtype=np.int32)
    for number, node in enumerate(told.nodes):
        if not node.holds:
            continue
        if len(node.holds) != shape[0]:
            raise InputProblem(
                f"node {node.name} holds something in {len(node.holds)} layers, and there are {shape[0]}"
            )
        for layer, experts in enumerate(node.holds):
            if any(expert >= shape[1] for expert in experts):
                raise InputProblem(
                    f"node {node.name} holds expert {max(experts)} of layer {layer}, which has {shape[1]}: they count from 0"
                )
            np.add.at(counts[layer, number], list(experts), 1)
    return ExpertPlacement(counts)


def _expert_bytes(told: Elastic, shape: tuple[int, ...]) -> Ints | None:
    if not told.expert_bytes:
        return None
    rows = _rectangle(told.expert_bytes, "expert_bytes")
    if rows.shape != (1, 1) and rows.shape != shape:
        raise InputProblem(
            f"expert_bytes has the shape {rows.shape}, loads have {shape}: give one number, or one for each expert"
        )
    return np.broadcast_to(rows, shape).copy()
