"""Partial snapshots: after a kill each expert is that of its newest snapshot, everything else is the newest
state, and what is lost is counted to the token.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from ckptd.client import Checkpointer, SnapshotOptions
from ckptd.core.export_plan import split_rows
from ckptd.storage.checkpoints.reader import read_catalog, read_image_header, read_manifest
from ckptd.storage.checkpoints.verifier import verify_run
from ckptd.storage.image_format import parse_header
from ckptd.storage.stores.objects import ObjectStore
from ckptd.storage.stores.open_store import open_store
from tests.ckptd.running import eventually
from tests.e2e.cases import EXPERTS, LAYERS
from tests.e2e.compare import same_values
from tests.e2e.harness import DaemonProcess, Jobs, own_daemon
from tests.e2e.job import make_job
from tests.e2e.ranks import Ranks
from tests.e2e.test_durable import lose_memory
from tests.long import long

TOTAL = 24
ONE_EACH = {"experts": 1, "lost_tokens_limit": None}


def partial_options(
    scope: str = "both", every: int = 1, *, policy: str = "partial", **changes: Any
) -> list[str]:
    partial = {**ONE_EACH, "scope": scope, **changes}
    chosen = {"policy": policy, "window": None, "partial": partial, "every": every}
    return [part for k, v in chosen.items() for part in ("--set", f"{k}={json.dumps(v)}")]


def _states(jobs: Jobs, name: str) -> Path:
    folder = jobs.folder / name
    folder.mkdir()
    return folder


def _experts_in(key: str, value: Any, names: list[str]) -> list[tuple[str, Any]]:
    """The experts to which an entry of a final state belongs, by the name of its parameter, each with the
    index of its rows; ``*`` for what fused experts have in common; empty for other entries. A buffer of a
    listed expert, such as the scale of a weight, belongs to the expert.
    """
    kind, _, rest = key.partition("/")
    if kind in ("held", "optim"):
        rest = names[int(rest.split(".")[2])]
    container, found, below = rest.removeprefix("module.").partition(".experts.")
    if not found:
        return []
    head = below.split(".")[0]
    if head.isdigit():
        return [(f"{container}.experts.{head}", ...)]
    if not value.ndim:
        return [(f"{container}.experts.*", ...)]
    return [(f"{container}.experts.{row}", row) for row in range(len(value))]


def _check(
    resumed: dict[str, Any],
    timeline: dict[int, dict[str, Any]],
    end: int,
    lost: dict[str, Any],
    scope: str = "both",
    *,
    experts_seen: int = EXPERTS * LAYERS,
) -> None:
    """The state at the top of ``end`` is put together of those that a job had at ``lost['iterations']``."""
    names = [k.removeprefix("param/") for k in resumed if k.startswith("param/")]
    seen = set()
    for key, value in resumed.items():
        experts = _experts_in(key, value, names)
        if not experts:
            assert same_values(value, timeline[end][key]), f"{key} is not that of iteration {end}"
        for expert, rows in experts:
            older = scope == "both" or key.startswith("optim/") == (scope == "optimizer")
            if expert.endswith("*"):  # from the newest snapshot with any of them
                several = [f"{expert[:-1]}{i}" for i in range(experts_seen // LAYERS)]
                known = [lost["iterations"].get(e, end) for e in several if e in seen]
                at = max(known) if older else end
            else:
                seen.add(expert)
                at = lost["iterations"].get(expert, end) if older else end
            was = timeline[at][key][rows]
            if scope == "optimizer" and key.startswith("held/") and expert in lost["iterations"]:
                # A master, which is optimizer state to the papers, follows the newest weight.
                name = names[int(key.split(".")[2])]
                was = timeline[end][f"param/{name}"][rows].to(was.dtype)
            assert same_values(value[rows], was), f"{key} of {expert} is not that of iteration {at}"
    assert len(seen) == experts_seen


def _lost(
    timeline: dict[int, dict[str, Any]],
    layer: int,
    expert: int,
    first: int,
    end: int,
    moe: str = "blocks.{}.moe",
) -> int:
    """The tokens that an expert was given in these steps; each top shows those of the step before."""
    name = f"buffer/{moe.format(layer)}.load"
    return int(sum(timeline[step + 1][name][expert] for step in range(first, end)))


def _load(folder: Path) -> dict[int, dict[str, Any]]:
    return {int(p.stem): torch.load(p, weights_only=False) for p in folder.glob("*.pt")}


@pytest.mark.parametrize(
    ("case", "scope", "every"),
    [
        ("plain", "both", 1),
        ("fused", "both", 1),
        pytest.param("fused", "optimizer", 1, marks=long),
        pytest.param("fused", "weights", 1, marks=long),
        ("masters", "both", 1),
        pytest.param("masters", "optimizer", 1, marks=long),
        pytest.param("plain", "optimizer", 1, marks=long),
        ("plain", "weights", 1),
        ("plain", "both", 2),
        ("precision_fp8_lm", "both", 1),
        pytest.param("precision_fp8_lm", "weights", 1, marks=long),
        pytest.param("precision_fp8_lm", "optimizer", 1, marks=long),
        pytest.param("precision_fp16", "both", 1, marks=long),
        pytest.param("precision_fp8_fp32", "both", 1, marks=long),
        pytest.param("precision_fp8_fp16", "both", 1, marks=long),
        pytest.param("precision_fp8_masters", "both", 1, marks=long),
        pytest.param("precision_delayed", "both", 1, marks=long),
        pytest.param("precision_moments", "both", 1, marks=long),
        pytest.param("precision_blocks", "both", 1, marks=long),
        pytest.param("precision_blocks", "optimizer", 1, marks=long),
    ],
)
def test_two_kills_lose_what_was_counted_and_nothing_else(
    jobs: Jobs, case: str, scope: str, every: int
) -> None:
    options = [*partial_options(scope, every), "--run", f"p-{case}-{scope}-{every}"]
    first, second, third = (_states(jobs, name) for name in ("first", "second", "third"))
    kill = ("--kill-sealed", "--patient-until", "12")
    jobs.run(
        case, *options, "--states", str(first), "--total", "40", "--kill-at", "17", *kill, expect_killed=True
    )
    jobs.run(
        case,
        *(*options, "--states", str(second), "--seed", "1000", "--total", "40"),
        *("--kill-begun", "3", "--kill-sealed"),
        expect_killed=True,
    )
    out = jobs.run(case, *options, "--states", str(third), "--seed", "1001", "--total", str(TOTAL))
    report = jobs.report(out)
    lost = report["lost"]

    timeline = _load(first)
    once = _load(second)
    end = min(once)
    assert end <= 17
    timeline = {step: state for step, state in timeline.items() if step <= end} | {
        step: state for step, state in once.items() if step > end
    }
    again = _load(third)
    resumed = min(again)
    assert resumed == report["resumed_from"] > end
    _check(again[resumed], timeline, resumed, lost, scope)
    assert len(lost["iterations"]) == (EXPERTS - 1) * LAYERS
    assert report["ckptd/plt"] == lost["cumulative_plt"] > 0, "what loggers show"


@pytest.mark.parametrize(
    ("policy", "every", "selection"),
    [
        ("partial", 1, "turns"),
        pytest.param("partial", 2, "turns", marks=long),
        ("selected", 1, "model"),
        pytest.param("selected", 2, "layer", marks=long),
    ],
)
def test_tokens_are_counted_as_the_gates_chose(
    jobs: Jobs, daemon: DaemonProcess, policy: str, every: int, selection: str
) -> None:
    """PLT as logged equals an independent count over the recorded assignments, exactly."""
    chosen = partial_options("both", every, policy=policy, selection=selection)
    options = [*chosen, "--run", f"count-{policy}-{selection}-{every}"]
    first, second = _states(jobs, "first"), _states(jobs, "second")
    kill = ("--kill-sealed", "--patient-until", "12", "--kill-at", "17")
    jobs.run("plain", *options, "--states", str(first), *kill, "--total", "40", expect_killed=True)
    out = jobs.run("plain", *options, "--states", str(second), "--seed", "1000", "--total", str(TOTAL))
    report, timeline = jobs.report(out), _load(first)
    end, lost = report["resumed_from"], report["lost"]
    _check(_load(second)[end], timeline, end, lost)
    shares = []
    for layer in range(LAYERS):
        given = gone = 0
        for expert in range(EXPERTS):
            name = f"blocks.{layer}.moe.experts.{expert}"
            count = _lost(timeline, layer, expert, lost["iterations"].get(name, end), end)
            assert lost["tokens"].get(name, 0) == count
            given, gone = given + _lost(timeline, layer, expert, 0, end), gone + count
        shares.append(gone / given)
    assert lost["plt"] == lost["cumulative_plt"] == sum(shares) / LAYERS
    assert sum(shares) > 0
    assert "PARTIAL SNAPSHOTS: weights and optimizer state of 6 of 8 experts" in jobs.log(out)
    assert (report["window"], len(lost["iterations"])) == (EXPERTS, 6)
    run = f"count-{policy}-{selection}-{every}"
    shown = json.loads(_ctl(daemon, "snapshots", "--job", "e2e", "--run", run, "--operators", "--json"))
    (rank,) = shown["ranks"]
    assert rank["plt"] == lost["cumulative_plt"]
    assert {one["expert"]: one["tokens"] for one in rank["lost"]} == lost["tokens"]


def _ctl(daemon: DaemonProcess, *arguments: str) -> str:
    command = [sys.executable, "-m", "ckptd.ctl", *arguments, "--endpoint", daemon.endpoint]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return done.stdout + done.stderr


def test_the_limit_of_lost_tokens_decides_how_many_experts_a_snapshot_has(jobs: Jobs) -> None:
    """Nothing is lost while a failure would lose too much, whatever K is."""
    options = [*partial_options(lost_tokens_limit=0.0375), "--run", "limit"]
    jobs.run("plain", *options, "--kill-at", "9", "--kill-sealed", "--total", "40", expect_killed=True)
    out = jobs.run("plain", *options, "--seed", "1000", "--total", "12")
    report = jobs.report(out)
    assert report["lost"]["tokens"] == {}
    assert report["lost"]["plt"] == 0.0
    assert report["window"] == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "changes", "experts"),
    [
        ("plain", {}, EXPERTS * LAYERS),
        pytest.param("expert/by_hand", {"num_experts": 4}, 4, marks=long),
        ("expert/fused", {"num_experts": 4}, 4),
        ("expert/by_hand", {"num_experts": 4, "policy": "selected"}, 4),
        pytest.param("plain", {"policy": "selected"}, EXPERTS * LAYERS, marks=long),
        pytest.param("fused", {"policy": "selected"}, EXPERTS * LAYERS, marks=long),
        pytest.param("masters", {"policy": "selected", "scope": "optimizer"}, EXPERTS * LAYERS, marks=long),
        pytest.param("plain", {"policy": "selected", "scope": "weights"}, EXPERTS * LAYERS, marks=long),
    ],
)
def test_ranks_come_back_together(jobs: Jobs, case: str, changes: dict[str, Any], experts: int) -> None:
    """Replicated experts, which one rank captures, and experts of each rank's own."""
    run = f"ranks-{case.replace('/', '-')}-{changes.get('policy', '')}-{changes.get('scope', '')}"
    options = partial_options(**changes)
    before = {rank: ("--states", str(_states(jobs, f"first-{rank}"))) for rank in range(2)}
    after = {rank: ("--states", str(_states(jobs, f"second-{rank}"))) for rank in range(2)}
    first = Ranks(jobs, run, *options, case=case, killed=1, kill_at=14, total=20, each=before)
    first.end_by_the_death_of(1)
    outs = Ranks(jobs, run, *options, "--seed", "7", case=case, total=18, each=after).end()
    reports = [jobs.report(out) for out in outs]
    assert len({report["resumed_from"] for report in reports}) == 1
    for rank, report in enumerate(reports):
        end, lost = report["resumed_from"], report["lost"]
        states, resumed = (_load(Path(each[rank][1])) for each in (before, after))
        _check(resumed[end], states, end, lost, changes.get("scope", "both"), experts_seen=experts)
        assert lost["plt"] == reports[0]["lost"]["plt"] > 0
        assert (report["selectable_experts"] == experts) == (changes.get("policy") == "selected")
        assert len(lost["iterations"]) >= experts / 2


@pytest.mark.slow
@pytest.mark.parametrize("selection", ["model", pytest.param("layer", marks=long)])
def test_of_ranks_that_hold_an_expert_its_owner_selects_it(jobs: Jobs, selection: str) -> None:
    """Two expert-parallel ranks and two replicas of each. After a kill both replicas of an expert are its
    newest copy, bit for bit; PLT equals an independent count over the assignments that all ranks recorded.
    """
    local = 2
    options = partial_options(policy="selected", num_experts=2 * local, selection=selection)
    before = {rank: ("--states", str(_states(jobs, f"first-{rank}"))) for rank in range(4)}
    after = {rank: ("--states", str(_states(jobs, f"second-{rank}"))) for rank in range(4)}
    run, case = f"owned-{selection}", "expert/uneven_replicas"
    first = Ranks(jobs, run, *options, case=case, world_size=4, killed=1, kill_at=18, total=24, each=before)
    first.end_by_the_death_of(1)
    outs = Ranks(jobs, run, *options, "--seed", "7", case=case, world_size=4, total=22, each=after).end()
    reports = [jobs.report(out) for out in outs]
    (end,) = {report["resumed_from"] for report in reports}
    lost = [report["lost"] for report in reports]
    timelines = [_load(Path(before[rank][1])) for rank in range(4)]
    resumed = [_load(Path(after[rank][1]))[end] for rank in range(4)]
    for rank in range(4):
        assert (
            "all 4 experts of this rank are selected by tokens at risk (2 of them by other"
            in (reports[rank]["describe"])
        )
        assert reports[rank]["selectable_experts"] == LAYERS * local
        _check(resumed[rank], timelines[rank], end, lost[rank], experts_seen=LAYERS * local)
    for one, other in ((0, 2), (1, 3)):
        assert lost[one]["iterations"] == lost[other]["iterations"] != {}
        for key in (key for key in resumed[one] if key.split("/")[0] in ("param", "held", "optim")):
            assert same_values(resumed[one][key], resumed[other][key]), key
    shares = []
    for layer in range(LAYERS):
        given = gone = 0
        for rank, expert in itertools.product(range(4), range(local)):
            name = f"moes.{layer}.experts.{expert}"
            since = lost[rank]["iterations"].get(name, end)
            count = _lost(timelines[rank], layer, expert, since, end, "moes.{}")
            assert lost[rank]["tokens"].get(name, 0) == count
            given, gone = given + _lost(timelines[rank], layer, expert, 0, end, "moes.{}"), gone + count
        shares.append(gone / given)
    assert {each["plt"] for each in lost} == {sum(shares) / LAYERS}
    assert sum(shares) > 0


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["partial", pytest.param("selected", marks=long)])
def test_windows_grow_as_far_as_the_limit_allows_on_one_rank_and_on_several(jobs: Jobs, policy: str) -> None:
    """With K = 1 of 4 experts: a window of 2 from iteration 14 on, one of 4 from 40 on."""
    limited = partial_options(lost_tokens_limit=0.0375, policy=policy)
    options = [*limited, "--until-window", str(EXPERTS), "--step-ms", "5"]
    alone = jobs.run("plain", *options, "--run", f"grows-{policy}", "--total", "4000")
    assert jobs.report(alone)["window"] == EXPERTS
    outs = Ranks(jobs, f"grow-{policy}", *options, case="plain", total=4000).end()
    for out in outs:
        report = jobs.report(out)
        assert report["window"] == EXPERTS, jobs.log(out)
        assert report["switches"] == 2
        assert report["selectable_experts"] == (EXPERTS * LAYERS if policy == "selected" else 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("exact_policy", "lossy"),
    [
        ("sliding", "partial"),
        pytest.param("dense", "selected", marks=long),
        pytest.param("aligned", "partial", marks=long),
    ],
)
def test_another_policy_takes_over_after_a_restart(jobs: Jobs, exact_policy: str, lossy: str) -> None:
    """An exact snapshot is continued by partial ones exactly; partial ones by exact ones, from then on."""
    run = ("--run", f"other-{exact_policy}", "--total", "400", "--step-ms", "5")
    window = "null" if exact_policy == "dense" else "3"
    exactly = ["--set", f'policy="{exact_policy}"', "--set", f"window={window}"]
    told = "selected (by model)" if lossy == "selected" else lossy
    reference = _states(jobs, "reference")
    jobs.run("plain", "--states", str(reference), "--total", "40", daemon="none")
    jobs.run("plain", *exactly, *run, "--kill-at", "9", "--kill-sealed", expect_killed=True)

    second = _states(jobs, "second")
    out = jobs.run(
        "plain",
        *(*partial_options(policy=lossy), *run, "--seed", "1000", "--states", str(second)),
        *("--kill-after-new-window", "6"),
        expect_killed=True,
    )
    assert f"the script asks for {told} snapshots, and they are {exact_policy} so far" in jobs.log(out)
    timeline = _load(reference)
    for step, state in _load(second).items():
        if 9 < step < 40:
            assert all(same_values(state[key], timeline[step][key]) for key in state), f"at {step}"

    third = _states(jobs, "third")
    out = jobs.run(
        "plain",
        *(*exactly, *run, "--seed", "1001", "--states", str(third), "--kill-after-new-window", "6"),
        expect_killed=True,
    )
    log = jobs.log(out)
    assert "PARTIAL SNAPSHOTS" in log
    asks = f"the script asks for {exact_policy} snapshots, and they are {told} so far; until a whole window"
    assert asks in log
    exact = _states(jobs, "exact")
    options = [*exactly, *run, "--seed", "1002", "--states", str(exact)]
    out = jobs.run("plain", *options, "--total", str(max(_load(third)) + 6))
    assert "lost" not in jobs.report(out)
    assert "PARTIAL" not in jobs.log(out)
    before, end = _load(third), jobs.report(out)["resumed_from"]
    assert all(same_values(value, before[end][key]) for key, value in _load(exact)[end].items())


@pytest.mark.slow
def test_several_ranks_change_their_policy_together(jobs: Jobs) -> None:
    sliding = ("--set", 'policy="sliding"', "--set", "window=3")
    Ranks(jobs, "together", *sliding, case="plain", killed=1, total=20).end_by_the_death_of(1)
    options = [*partial_options(), "--until-window", str(EXPERTS), "--step-ms", "5", "--seed", "7"]
    after = Ranks(jobs, "together", *options, case="plain", total=4000)
    outs = after.end()
    for out in outs:
        assert jobs.report(out)["window"] == EXPERTS
        assert "lost" not in jobs.report(out)
    told = [
        jobs.log(out).count("the script asks for partial snapshots, and they are sliding") for out in outs
    ]
    assert told == [1, 0], after.logs


@pytest.mark.slow
@pytest.mark.parametrize("policy", [pytest.param("sliding", marks=long), pytest.param("partial", marks=long)])
def test_owners_of_another_policy_select(jobs: Jobs, policy: str) -> None:
    """They stay when a run changes to selected experts, and a recovery takes each expert from its owner."""
    run = f"from-{policy}"
    before = partial_options() if policy == "partial" else ["--set", 'policy="sliding"', "--set", "window=3"]
    Ranks(jobs, run, *before, case="plain", killed=1, total=20).end_by_the_death_of(1)
    selected = [*partial_options(policy="selected"), "--step-ms", "5"]
    changes = Ranks(
        jobs, run, *selected, "--seed", "7", "--kill-after-new-policy", "30", case="plain", total=4000
    )
    changes.end_by_the_death_of(1)
    outs = Ranks(jobs, run, *selected, "--seed", "8", "--until-window", "1", case="plain", total=4000).end()
    reports = [jobs.report(out) for out in outs]
    assert [report["selectable_experts"] for report in reports] == [EXPERTS * LAYERS] * 2, changes.logs
    assert reports[0]["lost"]["iterations"] == reports[1]["lost"]["iterations"] != {}
    one, other = (torch.load(out, weights_only=False) for out in outs)
    assert all(same_values(one[key], other[key]) for key in one if key.startswith(("param/", "optim/")))


@pytest.mark.slow
def test_all_ranks_take_partial_snapshots_or_none(jobs: Jobs) -> None:
    mixed = {0: tuple(partial_options()), 1: ("--set", 'policy="sliding"', "--set", "window=4")}
    told = Ranks(jobs, "mixed", case="plain", total=20, each=mixed).end_by_a_failure()
    assert "rank 0 takes partial snapshots, and rank 1 exact ones: pass all ranks the same policy=" in told


@pytest.mark.slow
def test_what_needs_a_replay_is_refused(jobs: Jobs, daemon: DaemonProcess) -> None:
    process, out = jobs.start("plain", *partial_options(), "--run", "unverified", "--total", "12", "--verify")
    process.join(120)
    assert process.exitcode == 1
    assert "verify() replays a window, and no replay leads through partial snapshots" in jobs.log(out)
    job = make_job("plain", 1, None)
    snapshots = SnapshotOptions(policy="partial")
    with (
        Checkpointer(
            job.model, job.optimizers, job.state, run="unlogged", daemon=daemon.endpoint, snapshots=snapshots
        ) as ckpt,
        pytest.raises(
            ValueError, match="boundary logs are for replays, and partial snapshots are not replayed"
        ),
    ):
        ckpt.boundary_log()


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def storing_daemon(store: Path) -> Iterator[DaemonProcess]:
    """One that persists often, to a folder."""
    often = ("--persist-every", "5", "--persist-every-s", "0")
    with own_daemon("--memory", "256MiB", "--store", f"file://{store}", *often) as process:
        yield process


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "scope", "policy"),
    [
        ("plain", "both", "partial"),
        pytest.param("fused", "optimizer", "partial", marks=long),
        pytest.param("masters", "weights", "partial", marks=long),
        pytest.param("plain", "both", "selected", marks=long),
    ],
)
def test_storage_has_every_expert(
    tmp_path: Path, storing_daemon: DaemonProcess, store: Path, case: str, scope: str, policy: str
) -> None:
    """All memory is lost: each expert comes from the newest durable snapshot that has it, and everything is
    stored once.
    """
    jobs = Jobs(tmp_path, storing_daemon.endpoint)
    options = [*partial_options(scope, policy=policy), "--run", "stored"]
    first, second = _states(jobs, "first"), _states(jobs, "second")
    states, until = ("--states", str(first)), ("--kill-at", "30", "--total", "40")
    jobs.run(case, *options, *states, *until, expect_killed=True)
    opened = open_store(f"file://{store}")

    def committed() -> list[int]:
        return [c.id.end for c in read_catalog(opened, "e2e", "stored").committed]

    eventually(lambda: bool(store.exists() and committed()), "a durable checkpoint", timeout_s=30)
    lose_memory(storing_daemon)
    newest, timeline = committed()[0], _load(first)
    assert verify_run(opened, "e2e", "stored").ok
    check_stored_once(opened, "stored", newest, state_bytes(timeline[newest]))
    out = jobs.run(case, *options, "--states", str(second), "--seed", "77", "--total", "36")
    report = jobs.report(out)
    assert report["resumed_from"] == newest
    _check(_load(second)[newest], timeline, newest, report["lost"], scope)
    assert len(report["lost"]["iterations"]) == (EXPERTS - 1) * LAYERS


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "changes", "experts", "lost"),
    [
        pytest.param("plain", {}, EXPERTS * LAYERS, "*", marks=long),
        ("plain", {}, EXPERTS * LAYERS, "*~r1~*"),
        ("plain", {"policy": "selected"}, EXPERTS * LAYERS, "*"),
        pytest.param("plain", {"policy": "selected"}, EXPERTS * LAYERS, "*~r1~*", marks=long),
        pytest.param("expert/fused", {"num_experts": 4}, 4, "*", marks=long),
        pytest.param("expert/fused", {"num_experts": 4}, 4, "*~r1~*", marks=long),
    ],
)
def test_storage_has_every_expert_of_several_ranks(
    tmp_path: Path,
    storing_daemon: DaemonProcess,
    store: Path,
    case: str,
    changes: dict[str, Any],
    experts: int,
    lost: str,
) -> None:
    """Replicated experts, which one rank captures, and experts of each rank's own.

    If only one rank's memory is lost, the other one's has whole images of snapshots that are stored reduced.
    """
    jobs, options = Jobs(tmp_path, storing_daemon.endpoint), partial_options(**changes)
    before = {rank: ("--states", str(_states(jobs, f"first-{rank}"))) for rank in range(2)}
    after = {rank: ("--states", str(_states(jobs, f"second-{rank}"))) for rank in range(2)}
    first = Ranks(jobs, "several", *options, case=case, killed=1, kill_at=18, total=24, each=before)
    first.end_by_the_death_of(1)
    opened = open_store(f"file://{store}")
    eventually(lambda: bool(read_catalog(opened, "e2e", "several").committed), "a checkpoint", timeout_s=30)
    storing_daemon.kill()
    for path in storing_daemon.segment_dir.glob(lost):
        path.unlink()
    storing_daemon.start()
    newest = read_catalog(opened, "e2e", "several").committed[0].id.end
    outs = Ranks(jobs, "several", *options, "--seed", "7", case=case, total=22, each=after).end()
    assert not any("different snapshots" in jobs.log(out) for out in outs)
    for rank, report in enumerate(map(jobs.report, outs)):
        assert report["resumed_from"] == newest
        states, resumed = (_load(Path(each[rank][1])) for each in (before, after))
        _check(resumed[newest], states, newest, report["lost"], experts_seen=experts)
        assert report["lost"]["iterations"]


def state_bytes(state: dict[str, Any]) -> int:
    """P_ne + P_e of MoC-System's equation 6: the weights and optimizer state of a job's final state. Weights
    that the optimizer holds count if they are masters; the steps of its parameters do not.
    """
    params = [value for key, value in state.items() if key.startswith("param/")]
    held = [value for key, value in state.items() if key.startswith("held/")]
    masters = [h for h in held if all(h.dtype != p.dtype for p in params)]
    others = [value for key, value in state.items() if key.startswith(("buffer/", "optim/"))]
    tensors = [value for value in (*params, *masters, *others) if torch.is_tensor(value) and value.ndim]
    return sum(tensor.nbytes for tensor in tensors)


def check_stored_once(store: ObjectStore, run: str, end: int, dense: int) -> None:
    """A checkpoint has as many bytes as a dense snapshot, and of each snapshot a header and step scalars."""
    (found,) = [c for c in read_catalog(store, "e2e", run).committed if c.id.end == end]
    (manifest,) = [read_manifest(store, info.key) for info in found.manifests.values()]
    headers = [read_image_header(store, snapshot) for snapshot in manifest.snapshots]
    added = sum(map(len, headers))
    for header in headers:
        added += sum(t.nbytes for t in parse_header(header).tensors if t.name.startswith("ckptd."))
    objects = {stored.key: stored.size for snapshot in manifest.snapshots for stored in snapshot.objects}
    stored = sum(objects.values())
    assert len(headers) == EXPERTS
    assert stored - added == pytest.approx(dense, rel=0.01)


@pytest.mark.slow
def test_the_daemon_and_exports_say_that_snapshots_are_partial(jobs: Jobs, daemon: DaemonProcess) -> None:
    """An export takes older experts only if it is asked to, and then says of which iteration each is."""
    states = _states(jobs, "shown")
    for scope in ("both", "optimizer"):
        more = ("--states", str(states)) if scope == "both" else ()
        jobs.run("plain", *partial_options(scope), "--run", f"shown-{scope}", "--total", "12", *more)

    def ctl(*arguments: str) -> str:
        return _ctl(daemon, *arguments)

    told = ctl("snapshots", "--job", "e2e", "--run", "shown-both")
    assert "PARTIAL: a recovery loses updates of experts" in told, told
    assert "with experts from 9 on, without a replay" in told, told
    whole = jobs.folder / "whole.safetensors"
    told = ctl("export", "--job", "e2e", "--run", "shown-optimizer", "--to", str(whole))
    assert whole.exists(), told
    told = ctl("export", "--job", "e2e", "--run", "shown-both", "--to", str(jobs.folder / "none.safetensors"))
    assert "a partial snapshot has the weights of all experts with" in told
    mixed = jobs.folder / "mixed.safetensors"
    which = ("--job", "e2e", "--run", "shown-both", "--iteration", "11")
    told = ctl("export", *which, "--to", str(mixed), "--older-experts")
    assert "this is not the model of one iteration" in told, told
    timeline = _load(states)
    with safe_open(mixed, "pt") as exported:
        metadata = exported.metadata()
        model = {name: exported.get_tensor(name) for name in exported.keys()}  # noqa: SIM118 - not a dict
    newest = int(metadata["ckptd.iteration"])
    expected = {k.removeprefix("param/"): v for k, v in timeline[newest].items() if k.startswith("param/")}
    older = {int(i): names for i, names in json.loads(metadata["ckptd.older_experts"]).items()}
    assert set(older) == set(range(newest - EXPERTS + 1, newest))
    for iteration, names in older.items():
        for name in names:
            param, rows = split_rows(name)
            value = timeline[iteration][f"param/{param}"]
            if rows is None:
                expected[param] = value
            else:
                expected[param] = expected[param].clone()
                expected[param][slice(*rows)] = value[slice(*rows)]
    assert all(torch.equal(model[name], value) for name, value in expected.items())
    assert any(
        not torch.equal(model[k.removeprefix("param/")], v)
        for k, v in timeline[newest].items()
        if ".experts." in k and k.startswith("param/")
    )
