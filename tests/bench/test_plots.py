"""The charts of the elastic benchmarks are drawn, and differ with what they are drawn of."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from bench import dispatch, placement, traces
from bench.spot.simulation import Halt, Switch, simulate
from bench.spot.trace import Change, Trace, memberships
from ckptd.core.elastic.allocation import allocate
from ckptd.core.elastic.elastic_types import Cluster
from tests.bench.test_spot import TINY, Scripted

PNG = b"\x89PNG\r\n\x1a\n"


def drawn(path: Path) -> bytes:
    data = path.read_bytes()
    assert data.startswith(PNG)
    return data


def test_recovery_is_drawn(tmp_path: Path) -> None:
    cluster, loads = Cluster.uniform(4, 2), np.array([[9, 1, 1, 1]])
    found = placement.by_placement(allocate(loads, cluster, 2), loads, cluster)
    placement.plot(tmp_path / "all.png", found)
    placement.plot(tmp_path / "one.png", {"mro": found["mro"]})
    assert drawn(tmp_path / "all.png") != drawn(tmp_path / "one.png")


def test_stragglers_are_drawn(tmp_path: Path) -> None:
    metrics = dispatch.straggler_by_ratio()
    dispatch.plot(tmp_path / "a.png", metrics)
    dispatch.plot(tmp_path / "b.png", dict.fromkeys(metrics, 1.0))
    assert drawn(tmp_path / "a.png") != drawn(tmp_path / "b.png")


def test_a_trace_is_drawn(tmp_path: Path) -> None:
    trace = Trace((Change(0, 2), Change(60, 1)), 100)
    images = []
    for pause_s in (2, 50):
        strategy = Scripted(Switch(pause_s, 0, 2, 1.0, ""), Halt(""))
        outcome = traces.Outcome(simulate(memberships(trace, 0), 100, strategy), 0, 0)
        traces.plot(tmp_path, f"t{pause_s}", trace, TINY, {"ours": outcome})
        images.append(drawn(tmp_path / f"t{pause_s}.png"))
    assert images[0] != images[1]
