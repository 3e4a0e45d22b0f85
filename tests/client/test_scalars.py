"""What loggers show: the names, the values, and real files of TensorBoard and Weights & Biases."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ckptd.client import Checkpointer, RunOptions, write_scalars
from ckptd.client.scalars import SCALARS, TierSteps, scalars_of
from ckptd.client.stats import Stats
from ckptd.core.recovery.recovery_phases import RecoveryPhase

ROOT = Path(__file__).resolve().parents[2]
FULL = Stats(
    snapshot_step=41, failed=1, torn=2, no_slot=3, undecided=4, lost_tokens_share=0.02, replayed_steps=5
)
FULL.phases = {RecoveryPhase.LOADED: 1.5, RecoveryPhase.FIRST_NEW_STEP: 0.5}
FULL.redone_iterations, FULL.daemon_outages, FULL.unprotected = 2, 1, 1
FULL.note_stall(0.001, 0.003)
FULL.note_stall(0.0, 0.002)


def test_every_scalar_has_a_value_and_a_meaning() -> None:
    found = scalars_of(FULL, 42, TierSteps(replica=40, durable=12), lossy=True)
    assert {name: found[name] for name in SCALARS} == found == {
        "ckptd/stall_ms": 3.0,
        "ckptd/stall_ms_max": 4.0,
        "ckptd/snapshot_step": 41.0,
        "ckptd/snapshot_lag": 1.0,
        "ckptd/replica_step": 40.0,
        "ckptd/replica_lag": 2.0,
        "ckptd/durable_step": 12.0,
        "ckptd/durable_lag": 30.0,
        "ckptd/snapshots_missing": 10.0,
        "ckptd/daemon_outages": 1.0,
        "ckptd/unprotected": 1.0,
        "ckptd/recovery_s": 2.0,
        "ckptd/replayed_steps": 5.0,
        "ckptd/lost_steps": 2.0,
        "ckptd/plt": 0.02,
    }  # fmt: skip


def test_what_is_not_known_is_absent() -> None:
    assert scalars_of(Stats(), 0, TierSteps(), lossy=False) == {
        "ckptd/snapshots_missing": 0.0,
        "ckptd/daemon_outages": 0.0,
        "ckptd/unprotected": 0.0,
    }


def test_a_first_start_is_no_recovery() -> None:
    stats = Stats(phases={RecoveryPhase.IMPORTS: 2.0, RecoveryPhase.FIRST_NEW_STEP: 0.5})
    assert "ckptd/recovery_s" not in scalars_of(stats, 1, TierSteps(), lossy=False)


def test_stalls_are_those_of_the_last_hundred_steps() -> None:
    stats = Stats()
    for _ in range(300):
        stats.note_stall(9.0, 0.0)
    for _ in range(100):
        stats.note_stall(0.001, 0.0)
    found = scalars_of(stats, 400, TierSteps(), lossy=False)
    assert found["ckptd/stall_ms"] == pytest.approx(1.0)
    assert found["ckptd/stall_ms_max"] == 1.0


def test_the_documentation_has_the_same_names_and_meanings() -> None:
    text = (ROOT / "docs/observability.md").read_text()
    table = text.split("<!-- scalars -->\n")[1].split("<!-- end of scalars -->")[0]
    assert table == "| scalar | meaning |\n|---|---|\n" + "".join(
        f"| `{name}` | {meaning} |\n" for name, meaning in SCALARS.items()
    )


def trained(endpoint: str, run: str, steps: int) -> tuple[Checkpointer, list[dict[str, float]]]:
    """A real loop; and the scalars in each step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    optimizer = torch.optim.AdamW(model.parameters())
    ckpt = Checkpointer(model, optimizer, run=RunOptions(job="scalars", name=run), daemon=endpoint)
    found = []
    for _ in ckpt.steps(steps):
        optimizer.zero_grad()
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        found.append(ckpt.scalars())
    return ckpt, found


def test_a_loop_has_them_in_every_step(endpoint: str) -> None:
    ckpt, found = trained(endpoint, "in-every-step", 30)
    with ckpt:
        assert found[-1].keys() <= SCALARS.keys()
        assert found[-1]["ckptd/stall_ms_max"] >= found[-1]["ckptd/stall_ms"] > 0
        steps = [each["ckptd/snapshot_step"] for each in found if "ckptd/snapshot_step" in each]
        assert steps == sorted(steps)
        # The first steps are measured, and the last one has its snapshot when the loop has ended.
        assert ckpt.scalars()["ckptd/snapshot_lag"] <= ckpt.stats()["every"]
    assert ckpt.scalars() == {}


def test_without_a_daemon_there_are_none() -> None:
    model = nn.Linear(2, 2)
    assert Checkpointer(model, torch.optim.SGD(model.parameters(), 0.1), daemon=None).scalars() == {}


@pytest.mark.slow
@pytest.mark.skipif(not find_spec("tensorboard"), reason="tensorboard is not installed: ckptd[test] has it")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_reads_back_what_was_written(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    scalars = scalars_of(FULL, 42, TierSteps(40, 12), lossy=True)
    with SummaryWriter(str(tmp_path)) as writer:
        write_scalars(writer, scalars, 42)
    read = EventAccumulator(str(tmp_path))
    read.Reload()
    assert set(read.Tags()["scalars"]) == set(scalars)
    for name, value in scalars.items():
        (event,) = read.Scalars(name)
        assert (event.step, event.value) == (42, pytest.approx(value))


WANDB = """
import json, sys, wandb
run = wandb.init(project="ckptd", mode="offline", dir=sys.argv[1], settings=wandb.Settings(console="off"))
run.log({"loss": 0.5, **json.loads(sys.argv[2])}, step=42)
run.finish()
"""
# The file is a log as LevelDB has it: blocks of 32 KiB with records of crc32, length, and whether it goes on.
WANDB_READ = """
import json, struct, sys
from wandb.proto import wandb_internal_pb2
data, at, parts = open(sys.argv[1], "rb").read(), 7, b""
while at + 7 <= len(data):
    if (left := 32768 - at % 32768) < 7:
        at += left
        continue
    _, length, kind = struct.unpack_from("<IHB", data, at)
    parts, at = parts + data[at + 7 : at + 7 + length], at + 7 + length
    if kind in (1, 4):
        record, parts = wandb_internal_pb2.Record.FromString(parts), b""
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            print(json.dumps({i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in items}))
"""


def python(script: str, *arguments: str) -> str:
    """Wandb starts a process and threads of its own: not in a process of the tests."""
    command = [sys.executable, "-c", script, *arguments]
    return subprocess.run(command, check=True, text=True, capture_output=True, timeout=240).stdout


@pytest.mark.slow
@pytest.mark.skipif(not find_spec("wandb"), reason="wandb is not installed: pip install wandb")
def test_wandb_offline_writes_them_beside_those_of_the_script(tmp_path: Path) -> None:
    scalars = scalars_of(FULL, 42, TierSteps(40, 12), lossy=True)
    python(WANDB, str(tmp_path), json.dumps(scalars))
    (file,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    (row,) = map(json.loads, python(WANDB_READ, str(file)).splitlines())
    logged: dict[str, Any] = {name: row[name] for name in (*scalars, "loss")}
    assert logged == {**scalars, "loss": 0.5}
    assert row["_step"] == 42
