"""Durable checkpoints that store some experts with each: all memory is lost, and each expert comes from its
newest durable copy.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ckptd.client.daemon_link.mapped_segment import SlotFile
from ckptd.client.values import unpack
from ckptd.core.export_plan import ExportError
from ckptd.core.slots.slots import SlotState
from ckptd.export.exports import export_file
from ckptd.export.store_source import open_stored
from ckptd.storage.checkpoints.reader import read_catalog, read_manifest
from ckptd.storage.checkpoints.verifier import verify_run
from ckptd.storage.image import ImageView
from ckptd.storage.stores.objects import ObjectStore
from ckptd.storage.stores.open_store import open_store
from tests.ckptd.running import eventually
from tests.e2e.cases import EXPERTS, LAYERS
from tests.e2e.compare import same_values
from tests.e2e.harness import DaemonProcess, Jobs, own_daemon
from tests.e2e.ranks import Ranks
from tests.e2e.test_durable import lose_memory
from tests.e2e.test_partial import _check, _load, _lost, _states, partial_options
from tests.long import long

EVERY = 5
PEERS = ("--peer-listen", "tcp://127.0.0.1:0", "--peer-security", "plain")


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def daemon(store: Path) -> Iterator[DaemonProcess]:
    """One that stores a checkpoint every few iterations, in place of the session's."""
    with own_daemon(*storing(store)) as process:
        yield process


def storing(store: Path, every: int = EVERY) -> tuple[str, ...]:
    often = ("--persist-every", str(every), "--persist-every-s", "0")
    return ("--memory", "256MiB", "--store", f"file://{store}", *often)


def committed(store: ObjectStore, run: str) -> list[int]:
    """The iterations of the durable checkpoints, newest first."""
    return [c.id.end for c in read_catalog(store, "e2e", run).committed]


def images(folder: Path, run: str) -> Iterator[tuple[int, dict[str, int]]]:
    """Of each object of the committed checkpoints: its iteration, and the bytes of its tensors."""
    store = open_store(f"file://{folder}")
    names = [info.key for c in read_catalog(store, "e2e", run).committed for info in c.manifests.values()]
    for key in sorted({key for name in names for key in read_manifest(store, name).object_keys}):
        with (folder / key).open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        sizes = {
            name: entry["data_offsets"][1] - entry["data_offsets"][0]
            for name, entry in header.items()
            if name != "__metadata__"
        }
        yield int(key.split("/")[2]), sizes


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
    command = ("checkpoints", "show", "e2e", "some", str(newest), "--endpoint", daemon.endpoint)
    told = subprocess.run(
        [sys.executable, "-m", "ckptd.ctl", *command], capture_output=True, text=True, timeout=60, check=False
    )
    assert f"a restore loads iteration {newest}, and experts from" in told.stdout, told
    out = jobs.run(case, *options, "--states", str(second), "--seed", "77", "--total", str(newest + 12))
    report = jobs.report(out)
    lost = report["lost"]
    assert report["resumed_from"] == newest, jobs.log(out)
    assert f"A DURABLE CHECKPOINT STORES {experts} OF {EXPERTS} PARTS" in report["describe"]
    _check(_load(second)[newest], timeline, newest, lost, scope)
    assert (report["num_experts"], report["persist_experts"]) == (EXPERTS, experts)
    assert report["snapshots"] > EXPERTS, "the old copies leave no slots for new snapshots"
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
def test_advice_knows_what_a_running_job_stores_and_how_often_it_failed(
    tmp_path: Path, daemon: DaemonProcess
) -> None:
    jobs, found = Jobs(tmp_path, daemon.endpoint), dict[str, Any]()
    options = [*partial_options(persist_experts=2), "--run", "rated", "--step-ms", "30"]
    jobs.run("plain", *options, "--kill-at", "20", "--total", "60", expect_killed=True)
    process, out = jobs.start("plain", *options, "--total", "100000")

    def rated() -> bool:
        """Once it is attached, has done some steps, and has stored a checkpoint."""
        words = ("advise", "e2e", "rated", "--watch", "1s", "--loss-mtbf", "1h", "--json")
        command = [sys.executable, "-m", "ckptd.ctl", *words, "--endpoint", daemon.endpoint]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        found.update(json.loads(done.stdout))
        return done.returncode == 0 and found["policies"][0]["choice"]["window"] == EXPERTS

    try:
        eventually(rated, "advice on the job", timeout_s=120)
    finally:
        process.kill()
        process.join()
    now = found["policies"][0]
    assert now["choice"] == {"policy": "partial", "window": EXPERTS, "every": 1, "parts": 2, "replicas": 1}, (
        jobs.log(out)
    )
    storage = now["storage"]
    assert storage["every"] >= EVERY
    assert storage["shortest"] * found["iteration_s"] >= storage["upload_s"] > 0
    assert 0 < storage["upload_bytes"] < found["rank_state_bytes"]
    # One failure, after 20 iterations and what the second life had done by then.
    assert found["mtbf_s"] > 20 * found["iteration_s"]


@pytest.mark.slow
def test_snapshots_that_storage_has_whole_are_exported(
    tmp_path: Path, daemon: DaemonProcess, store: Path
) -> None:
    """With the weights of all experts in each snapshot: those that a checkpoint ended with, bare ones too. Of
    the others, storage has only what newer ones lack.
    """
    jobs, opened = Jobs(tmp_path, daemon.endpoint), open_store(f"file://{store}")
    options = [*partial_options("optimizer", persist_experts=1), "--run", "out", "--step-ms", "30"]
    states = _states(jobs, "states")
    jobs.run(
        "plain", *options, "--states", str(states), "--kill-at", "42", "--total", "60", expect_killed=True
    )
    eventually(lambda: len(committed(opened, "out")) > 1, "durable checkpoints", timeout_s=30)
    checkpoints = read_catalog(opened, "e2e", "out").committed
    ends = {c.id.end for c in checkpoints}
    (manifest,) = [read_manifest(opened, info.key) for info in checkpoints[0].manifests.values()]
    listed = {snapshot.iteration for snapshot in manifest.snapshots} | ends
    assert listed > ends
    timeline, refused = _load(states), set()
    for iteration in sorted(listed):
        with open_stored(opened, "file://store", "e2e", "out", iteration) as source:
            target = tmp_path / f"{iteration}.safetensors"
            try:
                export_file(source, target)
            except ExportError as error:
                assert "of an older partial snapshot storage has only what newer ones" in str(error)  # noqa: PT017
                refused.add(iteration)
                continue
        model = load_file(target)
        named = {key: value for key, value in timeline[iteration].items() if key.startswith("param/")}
        assert len(model) >= len(named)
        assert all(torch.equal(model[key.removeprefix("param/")], value) for key, value in named.items())
    assert refused == listed - ends


@long
@pytest.mark.slow
def test_a_second_loss_counts_no_token_twice(tmp_path: Path, daemon: DaemonProcess, store: Path) -> None:
    """The second life begins with old copies, and its checkpoints list some of them again."""
    jobs, opened = Jobs(tmp_path, daemon.endpoint), open_store(f"file://{store}")
    options = [*partial_options(persist_experts=1), "--run", "twice", "--step-ms", "30", "--total", "90"]
    timeline: dict[int, dict[str, Any]] = {}
    lost: dict[str, list[tuple[int, int]]] = {}  # by expert: the steps whose updates are lost
    end, report = 0, {}
    for life, kill_at in enumerate(("32", "54", "-1")):
        folder = _states(jobs, f"life-{life}")
        last = ("--total", str(end + 3)) if life == 2 else ()
        arguments = (*options, "--states", str(folder), "--seed", str(life), "--kill-at", kill_at, *last)
        out = jobs.run("plain", *arguments, expect_killed=life < 2)
        states = _load(folder)
        if life:
            report = jobs.report(out) if life == 2 else {}
            assert min(states) == end, jobs.log(out)
            copies = newest_copies(store, "twice", end)
            for name, at in copies.items():
                lost.setdefault(name, []).append((at, end))
            if life == 2:
                _check(states[end], timeline, end, report["lost"])
        timeline = {step: state for step, state in timeline.items() if step < end} | states
        eventually(lambda: committed(opened, "twice")[:1] > [end], "a checkpoint", timeout_s=30)  # noqa: B023
        lose_memory(daemon)
        assert verify_run(opened, "e2e", "twice").ok
        end = committed(opened, "twice")[0]
    end = report["resumed_from"]
    shares = []
    for layer in range(LAYERS):
        given = gone = 0
        for expert in range(EXPERTS):
            spans = lost[f"blocks.{layer}.moe.experts.{expert}"]
            steps = {step for first, until in spans for step in range(first, until)}
            given += _lost(timeline, layer, expert, 0, end)
            gone += sum(_lost(timeline, layer, expert, step, step + 1) for step in steps)
        shares.append(gone / given)
    assert report["lost"]["cumulative_plt"] == sum(shares) / LAYERS
    assert report["lost"]["plt"] < report["lost"]["cumulative_plt"]


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
    newer copies of replicated ones takes those of storage, as the others do.
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
    if case == "plain":
        assert found[0] == found[1]
    checkpoints = read_catalog(opened, "e2e", "several").committed
    listed = [read_manifest(opened, info.key) for c in checkpoints for info in c.manifests.values()]
    assert any(each.start <= each.end - EVERY for each in listed), "no checkpoint lists older images"


@pytest.mark.slow
def test_replicas_stay_alike_where_a_checkpoint_stores_all_parts_but_one(tmp_path: Path, store: Path) -> None:
    """It listed the snapshot before the window, the window, and the newest one without experts: consecutive
    iterations, so the rank with memory took newer experts from there. Their values, and those of the other rank's
    replicas, were different from then on.
    """
    options = [*partial_options(persist_experts=EXPERTS - 1), "--step-ms", "30"]
    with own_daemon(*storing(store, every=EXPERTS)) as daemon:
        jobs, opened = Jobs(tmp_path, daemon.endpoint), open_store(f"file://{store}")
        after = {rank: ("--states", str(_states(jobs, f"after-{rank}"))) for rank in range(2)}
        first = Ranks(jobs, "alike", *options, case="plain", killed=1, kill_at=30, total=50)
        first.end_by_the_death_of(1)
        eventually(lambda: bool(committed(opened, "alike")), "a durable checkpoint", timeout_s=30)
        daemon.kill()
        for path in daemon.segment_dir.glob("*~r1~*"):
            path.unlink()
        daemon.start()
        newest = committed(opened, "alike")[0]
        outs = Ranks(jobs, "alike", *options, case="plain", total=newest + 4, each=after).end()
        lost = [jobs.report(out)["lost"]["iterations"] for out in outs]
    assert lost[0] == lost[1]
    assert lost[0]
    ours, theirs = (_load(Path(folder)) for _, folder in after.values())
    assert newest in ours
    for step, state in ours.items():
        shared = [key for key in state if key.startswith(("param/", "optim/"))]
        assert [key for key in shared if not same_values(state[key], theirs[step][key])] == [], step


def anchored(operators: list[str], images: Iterable[tuple[int, int]], end: int) -> dict[str, int]:
    """By expert, the newest of these images (iteration, bitmap of anchors) up to ``end`` that has it."""
    found: dict[str, int] = {}
    for iteration, anchors in images:
        for number, name in enumerate(operators):
            if iteration <= end and anchors >> number & 1 and ".experts." in name:
                found[name] = max(found.get(name, -1), iteration)
    return found


def in_memory(daemon: DaemonProcess, rank: int) -> tuple[list[str], list[tuple[int, int]]]:
    """The operators of a rank, and its sealed snapshots on a node: iteration, and bitmap of anchors."""
    found, operators = [], []
    for path in daemon.segment_dir.glob(f"*~r{rank}~*"):
        file = SlotFile(path, "snapshots")
        operators = [each[0] for each in unpack(file.descriptor.client)["operators"]]
        for index in range(file.num_slots):
            header = file.header(index)
            if header is not None and header.state is SlotState.SEALED:
                view = ImageView(file.slot(index)[: header.image_len])
                found.append((header.iteration, view.anchors))
    return operators, found


def damage(folder: Path, iteration: int) -> None:
    """Change a byte of rank 0's snapshot of this iteration."""
    for path in folder.glob("*~r0~*.seg"):
        file = SlotFile(path, "snapshots", shared=True)
        for index in range(file.num_slots):
            header = file.header(index)
            if header is not None and header.iteration == iteration:
                file.slot(index)[header.image_len - 1] ^= 1
                return
    pytest.fail(f"no slot of iteration {iteration}")


@pytest.fixture
def nodes(store: Path, request: pytest.FixtureRequest) -> Iterator[list[DaemonProcess]]:
    """One node; or two that keep replicas of each other's snapshots."""
    names = [("--node-id", name, *PEERS) for name in ("first", "second")] if request.param == 2 else [()]
    with ExitStack() as stack:
        yield [stack.enter_context(own_daemon(*storing(store), *name)) for name in names]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "nodes", "damaged"),
    [
        ("expert/by_hand", 1, False),
        pytest.param("expert/fused", 1, False, marks=long),
        pytest.param("expert/by_hand", 1, True, marks=long),
        pytest.param("expert/by_hand", 2, False, marks=long),
    ],
    indirect=["nodes"],
)
def test_experts_of_one_rank_come_from_newer_copies_in_memory(
    tmp_path: Path, nodes: list[DaemonProcess], store: Path, case: str, damaged: bool
) -> None:
    """All go back to the durable checkpoint; of what no other rank has, memory (its own or a peer's) has newer
    copies (two-level recovery, MoC-System section 5.1). None is newer than that checkpoint, and one that is
    damaged is not taken.
    """
    jobs, opened = Jobs(tmp_path, nodes[0].endpoint), open_store(f"file://{store}")
    options = [*partial_options(num_experts=EXPERTS, persist_experts=1), "--step-ms", "30"]
    states = {life: [_states(jobs, f"{life}-{rank}") for rank in range(2)] for life in ("before", "after")}

    def each(life: str) -> dict[int, tuple[str, ...]]:
        at = {rank: ("--daemon", nodes[rank % len(nodes)].endpoint) for rank in range(2)}
        return {rank: (*at[rank], "--states", str(states[life][rank])) for rank in range(2)}

    ended = Ranks(jobs, "kept", *options, case=case, killed=1, kill_at=32, total=50, each=each("before"))
    ended.end_by_the_death_of(1)
    # What is due is uploaded from memory after the end, too.
    eventually(lambda: committed(opened, "kept")[:1] == [30], "the last durable checkpoint", timeout_s=60)
    holder = nodes[-1]
    operators, memory = in_memory(holder, 0)
    for process in nodes:
        process.kill()
        gone = "*" if process is not holder else "*~r1~*"
        for path in process.segment_dir.glob(gone):
            path.unlink()
    if damaged:
        at = max(at for at, _ in memory if at < 30)
        damage(holder.segment_dir, at)
        memory = [image for image in memory if image[0] != at]
    for process in nodes:
        process.start()
    (found, *_) = read_catalog(opened, "e2e", "kept").committed
    listed = {m.rank: m for m in (read_manifest(opened, info.key) for info in found.manifests.values())}
    stored = [[(s.iteration, s.anchors) for s in listed[rank].snapshots] for rank in range(2)]
    durable = [anchored(operators, images, 30) for images in stored]
    best = anchored(operators, [*stored[0], *memory], 30)
    assert len(best) == len(durable[0]) == EXPERTS // 2 * LAYERS
    assert sum(best.values()) > sum(durable[0].values()), "memory has nothing that storage lacks"
    outs = Ranks(jobs, "kept", *options, "--seed", "7", case=case, total=38, each=each("after")).end()
    for rank, (out, taken) in enumerate(zip(outs, (best, durable[1]), strict=True)):
        report = jobs.report(out)
        assert report["resumed_from"] == 30, jobs.log(out)
        timeline, resumed = (_load(states[life][rank]) for life in ("before", "after"))
        _check(resumed[30], timeline, 30, report["lost"], experts_seen=EXPERTS // 2 * LAYERS)
        assert report["lost"]["iterations"] == {name: at for name, at in taken.items() if at < 30}
