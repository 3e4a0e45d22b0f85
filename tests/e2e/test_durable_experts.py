"""Durable checkpoints that store some experts with each: all memory is lost, and each expert comes from its
newest durable copy.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ckptd.storage.checkpoints.reader import read_catalog
from ckptd.storage.checkpoints.verifier import verify_run
from ckptd.storage.stores.objects import ObjectStore
from ckptd.storage.stores.open_store import open_store
from tests.ckptd.running import eventually
from tests.e2e.cases import EXPERTS, LAYERS
from tests.e2e.harness import DaemonProcess, Jobs, own_daemon
from tests.e2e.ranks import Ranks
from tests.e2e.test_durable import lose_memory
from tests.e2e.test_partial import _check, _load, _lost, _states, partial_options
from tests.long import long

EVERY = 5


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def daemon(store: Path) -> Iterator[DaemonProcess]:
    """One that stores a checkpoint every few iterations, in place of the session's."""
    often = ("--persist-every", str(EVERY), "--persist-every-s", "0")
    with own_daemon("--memory", "256MiB", "--store", f"file://{store}", *often) as process:
        yield process


def committed(store: ObjectStore, run: str) -> list[int]:
    """The iterations of the durable checkpoints, newest first."""
    return [c.id.end for c in read_catalog(store, "e2e", run).committed]


def images(folder: Path, run: str, rank: int = 0) -> Iterator[tuple[int, dict[str, int]]]:
    """Of each stored object: its iteration, and the bytes of its tensors."""
    for path in sorted((folder / "e2e" / run).glob(f"*/rank-{rank:05d}/*.safetensors")):
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        sizes = {
            name: entry["data_offsets"][1] - entry["data_offsets"][0]
            for name, entry in header.items()
            if name != "__metadata__"
        }
        yield int(path.parent.parent.name), sizes


def expert_of(tensor: str) -> str:
    """The expert to which a tensor belongs; "" if to none, or to the rows of several."""
    at = tensor.find("blocks.")
    head, found, rest = tensor[max(0, at) :].partition(".experts.")
    return f"{head}.experts.{rest.split('.')[0]}" if found and not tensor.startswith("buffer/") else ""


def newest_copies(folder: Path, run: str, end: int) -> dict[str, int]:
    """By expert, the newest iteration up to ``end`` of which storage has its optimizer state."""
    found: dict[str, int] = {}
    for iteration, sizes in images(folder, run):
        for expert in {expert_of(name) for name in sizes if name.startswith("optim/")} - {""}:
            if iteration <= end:
                found[expert] = max(found.get(expert, -1), iteration)
    return found


def plt(timeline: dict[int, dict[str, Any]], copies: dict[str, int], end: int) -> float:
    """The proportion of lost tokens, from the gates' choices."""
    shares = []
    for layer in range(LAYERS):
        given = gone = 0
        for expert in range(EXPERTS):
            name = f"blocks.{layer}.moe.experts.{expert}"
            given += _lost(timeline, layer, expert, 0, end)
            gone += _lost(timeline, layer, expert, copies[name], end)
        shares.append(gone / given)
    return sum(shares) / LAYERS


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "scope", "experts"),
    [
        ("plain", "both", 1),
        pytest.param("plain", "both", 2, marks=long),
        pytest.param("plain", "weights", 1, marks=long),
        pytest.param("fused", "optimizer", 1, marks=long),
        pytest.param("masters", "optimizer", 2, marks=long),
    ],
)
def test_each_expert_comes_from_its_newest_durable_copy(
    tmp_path: Path, daemon: DaemonProcess, store: Path, case: str, scope: str, experts: int
) -> None:
    jobs, opened = Jobs(tmp_path, daemon.endpoint), open_store(f"file://{store}")
    options = [*partial_options(scope, persist_experts=experts), "--run", "some", "--step-ms", "30"]
    first, second = _states(jobs, "first"), _states(jobs, "second")
    jobs.run(case, *options, "--states", str(first), "--kill-at", "42", "--total", "60", expect_killed=True)
    eventually(lambda: bool(committed(opened, "some")), "a durable checkpoint", timeout_s=30)
    lose_memory(daemon)
    assert verify_run(opened, "e2e", "some").ok
    ends, timeline = committed(opened, "some"), _load(first)
    newest = ends[0]
    out = jobs.run(case, *options, "--states", str(second), "--seed", "77", "--total", str(newest + 12))
    report = jobs.report(out)
    lost = report["lost"]
    assert report["resumed_from"] == newest, jobs.log(out)
    assert f"A DURABLE CHECKPOINT STORES {experts} OF {EXPERTS} PARTS" in report["describe"]
    _check(_load(second)[newest], timeline, newest, lost, scope)
    assert verify_run(opened, "e2e", "some").ok
    if case != "plain" or scope != "both":
        return
    copies = newest_copies(store, "some", newest)
    assert len(copies) == EXPERTS * LAYERS
    assert lost["iterations"] == {name: at for name, at in copies.items() if at < newest}
    assert min(copies.values()) <= newest - EVERY, "nothing is of an earlier checkpoint"
    assert lost["plt"] == plt(timeline, copies, newest)
    # Each checkpoint but the first has stored so many experts of each layer, and everything else once.
    by_end: dict[int, set[str]] = {}
    ordered = sorted(end for end in ends if end <= newest)
    for iteration, sizes in images(store, "some"):
        end = next((end for end in ordered if end >= iteration), None)
        if end is not None:
            by_end.setdefault(end, set()).update(map(expert_of, sizes))
    stored = [len(by_end[end] - {""}) for end in ordered]
    assert stored[0] == EXPERTS * LAYERS
    assert stored[1:] == [experts * LAYERS] * (len(ordered) - 1)
    assert len(ordered) > 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "changes", "number", "lost"),
    [
        ("plain", {}, EXPERTS * LAYERS, "*~r1~*"),
        pytest.param("plain", {}, EXPERTS * LAYERS, "*", marks=long),
        pytest.param("expert/fused", {"num_experts": 4}, 4, "*", marks=long),
        pytest.param("expert/by_hand", {"num_experts": 4}, 4, "*~r1~*", marks=long),
    ],
)
def test_all_ranks_take_the_same_copies_whichever_memory_is_lost(
    tmp_path: Path,
    daemon: DaemonProcess,
    store: Path,
    case: str,
    changes: dict[str, Any],
    number: int,
    lost: str,
) -> None:
    """Replicated experts, which one rank captures, and experts of each rank's own. A rank whose memory has
    newer experts takes those of storage, as the others do.
    """
    jobs, opened = Jobs(tmp_path, daemon.endpoint), open_store(f"file://{store}")
    options = [*partial_options(**changes, persist_experts=1), "--step-ms", "30"]
    before = {rank: ("--states", str(_states(jobs, f"first-{rank}"))) for rank in range(2)}
    after = {rank: ("--states", str(_states(jobs, f"second-{rank}"))) for rank in range(2)}
    first = Ranks(jobs, "several", *options, case=case, killed=1, kill_at=32, total=50, each=before)
    first.end_by_the_death_of(1)
    eventually(lambda: bool(committed(opened, "several")), "a durable checkpoint", timeout_s=30)
    daemon.kill()
    for path in daemon.segment_dir.glob(lost):
        path.unlink()
    daemon.start()
    newest = committed(opened, "several")[0]
    outs = Ranks(jobs, "several", *options, "--seed", "7", case=case, total=newest + 8, each=after).end()
    found: list[dict[str, int]] = []
    for rank, out in enumerate(outs):
        report = jobs.report(out)
        assert report["resumed_from"] == newest, jobs.log(out)
        states, resumed = (_load(Path(each[rank][1])) for each in (before, after))
        _check(resumed[newest], states, newest, report["lost"], experts_seen=number)
        found.append(report["lost"]["iterations"])
        assert min(found[-1].values()) <= newest - EVERY, "nothing is of an earlier checkpoint"
    if case == "plain":
        assert found[0] == found[1]
