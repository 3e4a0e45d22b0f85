"""The input of `ckptctl elastic`: a file, or the report of a running job, checked and converted to arrays.

An error in a file names the place in the file and the values that are allowed there.
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
from ckptd.transport.messages import Elastic, ElasticNode

__all__ = ["InputProblem", "Situation", "read_file", "situation"]

Ints = NDArray[np.int64]


class InputProblem(ValueError):
    """The file or one of its values cannot be used; the message names the place and the allowed values."""


@dataclass(frozen=True, slots=True, eq=False)
class Situation:
    """An `Elastic` as arrays.

    Args:
        loads_LE: tokens of the newest period.
        report: the file or the message from which the arrays come.
        held: the experts that the nodes hold; None: not given.
        expert_bytes_LE: the size of one replica of each expert; None: not given.
        speeds_N: bytes per second of every node; None: not given.
        max_straggler: None: no bound.
    """

    report: Elastic
    cluster: Cluster
    loads_LE: Loads
    held: ExpertPlacement | None
    expert_bytes_LE: Ints | None
    speeds_N: Ints | None
    max_straggler: float | None

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the nodes."""
        return tuple(node.name for node in self.report.nodes)

    @property
    def layers(self) -> tuple[str, ...]:
        """The names of the layers; "layer 0" and so on if the input gives none."""
        return self.report.layers or tuple(f"layer {number}" for number in range(len(self.loads_LE)))

    def only(self, nodes: Ints) -> Situation:
        """The same situation with only these nodes, given by their numbers.

        Raises:
            InputProblem: ``nodes`` is empty.
        """
        if not len(nodes):
            raise InputProblem("no node is left on which experts could be placed")
        report = msgspec.structs.replace(
            self.report, nodes=tuple(self.report.nodes[n] for n in nodes.tolist())
        )
        return dataclasses.replace(
            self,
            report=report,
            cluster=_cluster(report),
            held=None if self.held is None else ExpertPlacement(self.held.counts[:, nodes]),
            speeds_N=None if self.speeds_N is None else self.speeds_N[nodes],
        )


def read_file(path: str) -> Elastic:
    """The `Elastic` in a JSON file. The output of `ckptctl elastic show --json` for one run is
    accepted, too.

    ``nodes`` may be a number: that many nodes, named by their numbers, with ``slots`` slots and
    ``ranks`` ranks each. ``expert_bytes`` may be one number for all experts, ``max_straggler``
    null.

    Raises:
        InputProblem: the file cannot be read, is not JSON, or a value is not allowed.
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
    """Replace the abbreviations that a file may contain."""
    if isinstance(found, dict) and "runs" in found:
        found = _of_one_run(found["runs"])
    if not isinstance(found, dict):
        raise InputProblem(
            'the file must contain a JSON object, such as {"loads": [[5, 3]], "nodes": 2, "slots": 2}'
        )
    out = dict(found)
    for key in ("loads", "nodes"):
        if key not in out:
            raise InputProblem(
                f"{key!r} is missing: pass the tokens of every expert of each layer (loads) and the nodes"
            )
    for name in ("loads", "expert_bytes"):
        _refuse_floats(out.get(name), name)
    slots, ranks = out.pop("slots", None), out.pop("ranks", 1)
    nodes = out["nodes"]
    if isinstance(nodes, int) and not isinstance(nodes, bool):
        if not 1 <= nodes <= 1 << 16 or slots is None:
            raise InputProblem(
                f'"nodes": {nodes} must be a number from 1 to 65536, and needs "slots" in the same object'
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
        raise InputProblem("the file must describe exactly one run: select it with `show --job … --run …`")
    return runs[0].get("told")


def _refuse_floats(value: Any, name: str) -> None:
    """Raise an error with the place; the decoder's own message for a NaN does not help."""
    for where, number in _numbers(value, name):
        if isinstance(number, float) and not math.isfinite(number):
            raise InputProblem(f"{where} is {number}: tokens and bytes must be finite numbers")
        if isinstance(number, float):
            raise InputProblem(f"{where} is {number}: tokens and bytes must be whole numbers; round them")
        if number < 0:
            raise InputProblem(f"{where} is {number}: tokens and bytes cannot be negative")


def _numbers(value: Any, name: str) -> list[tuple[str, int | float]]:
    if isinstance(value, list):
        inner = (_numbers(one, f"{name}[{index}]") for index, one in enumerate(value))
        return [found for part in inner for found in part]
    if isinstance(value, int | float) and not isinstance(value, bool):
        return [(name, value)]
    return []


def situation(report: Elastic) -> Situation:
    """Check a report and convert it to arrays.

    Raises:
        InputProblem: two values contradict each other; the message names both.
    """
    loads_LE = _rectangle(report.loads, "loads")
    names = [node.name for node in report.nodes]
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise InputProblem(f"two nodes have the name {twice}: names of nodes must be unique")
    if report.layers and len(report.layers) != len(loads_LE):
        raise InputProblem(
            f"{len(report.layers)} names of layers for {len(loads_LE)} rows of loads: pass one "
            "name for each row"
        )
    if report.max_straggler and report.max_straggler < 1:
        raise InputProblem(
            f"max_straggler is {report.max_straggler}: it must be at least 1 (1.1 is usual), or "
            "null for no bound"
        )
    for number, period in enumerate(report.history):
        if _rectangle(period, f"history[{number}]").shape != loads_LE.shape:
            raise InputProblem(f"history[{number}] must have the shape of loads")
    known = all(node.bytes_per_s for node in report.nodes)
    return Situation(
        report,
        _cluster(report),
        loads_LE,
        _held(report, loads_LE.shape),
        _expert_bytes(report, loads_LE.shape),
        np.array([node.bytes_per_s for node in report.nodes]) if known else None,
        report.max_straggler or None,
    )


def _rectangle(rows: tuple[tuple[int, ...], ...], name: str) -> Loads:
    if not rows or not rows[0]:
        raise InputProblem(f"{name} is empty: it needs a row for each layer, with a number for each expert")
    for number, row in enumerate(rows):
        if len(row) != len(rows[0]):
            raise InputProblem(
                f"{name}[{number}] has {len(row)} experts, {name}[0] has {len(rows[0])}: all "
                "layers must have the same number"
            )
    return checked_loads(np.array(rows, dtype=np.int64))


def _cluster(report: Elastic) -> Cluster:
    domains = tuple(_domain(node, report.domain) for node in report.nodes) if report.domain else ()
    slots = np.array([node.slots for node in report.nodes], dtype=np.int64)
    return Cluster(slots, domains, tuple(node.ranks for node in report.nodes))


def _domain(node: ElasticNode, label: str) -> str:
    if label not in node.labels:
        has = ", ".join(sorted(node.labels)) or "none"
        raise InputProblem(
            f'"domain" is {label!r}, but node {node.name} has no such label (its labels: {has})'
        )
    return node.labels[label]


def _held(report: Elastic, shape: tuple[int, ...]) -> ExpertPlacement | None:
    if not any(node.holds for node in report.nodes):
        return None
    counts = np.zeros((shape[0], len(report.nodes), shape[1]), dtype=np.int32)
    for number, node in enumerate(report.nodes):
        if not node.holds:
            continue
        if len(node.holds) != shape[0]:
            raise InputProblem(
                f"node {node.name} holds experts of {len(node.holds)} layers, but loads have "
                f"{shape[0]} layers"
            )
        for layer, experts in enumerate(node.holds):
            if any(expert >= shape[1] for expert in experts):
                raise InputProblem(
                    f"node {node.name} holds expert {max(experts)} of layer {layer}: its experts "
                    f"are 0 to {shape[1] - 1}"
                )
            np.add.at(counts[layer, number], list(experts), 1)
    return ExpertPlacement(counts)


def _expert_bytes(report: Elastic, shape: tuple[int, ...]) -> Ints | None:
    if not report.expert_bytes:
        return None
    rows = _rectangle(report.expert_bytes, "expert_bytes")
    if rows.shape != (1, 1) and rows.shape != shape:
        raise InputProblem(
            f"expert_bytes has the shape {rows.shape}, loads have {shape}: pass one number, or one "
            "for each expert"
        )
    return np.broadcast_to(rows, shape).copy()
