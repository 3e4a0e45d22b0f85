"""Checkpoints of ``torch.distributed.checkpoint`` out of snapshots: stock torch loads them, and
goes on at the same bits.
"""

from __future__ import annotations

import os
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load

from ckptd.client.interchange.starting_weights import StartMismatch, load_start
from ckptd.client.model.live_state import LiveState
from ckptd.core.export_plan import ExportError
from ckptd.export.dcp import export_dcp
from ckptd.export.importing import import_to_folder, open_import
from ckptd.export.memory_source import open_slot
from ckptd.export.source import TensorSource
from ckptd.export.store_source import open_stored
from ckptd.storage.stores.open_store import open_store
from tests.ckptd.export.samples import segment_folder
from tests.ckptd.running import small_tmpfs
from tests.client import reshard
from tests.client.exporting import (
    MoE,
    Trained,
    make_adamw,
    make_model,
    same,
    step_once,
    train,
)
from tests.client.shared_images import SharedRun
from tests.e2e.precision_cases import BlockAdam
from tests.forked import Forked
from tests.long import long
from tests.option_groups import grouped

pytestmark = [
    # That there is no process group is meant.
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.usefixtures("forked_child"),
]

ROOT = Path(__file__).resolve().parents[3]
TOTAL, AT = 9, 7


@pytest.fixture(scope="module")
def dense(endpoint: str) -> Trained:
    return train(endpoint, TOTAL, window=1)


@pytest.fixture(scope="module")
def exported(dense: Trained, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("dcp") / "ckpt"
    with dense.snapshot(AT) as source:
        report = export_dcp(source, target)
    assert (report.tensors, report.optimizer_tensors, report.notes) == (7, 18, ())
    return target


def keys_of(folder: Path) -> set[str]:
    return set(FileSystemReader(folder).read_metadata().state_dict_metadata)


def continued(folder: Path, *, flat: bool, total: int = TOTAL) -> tuple[MoE, Any]:
    """A plain loop of torch that loads the checkpoint and goes on, without ckptd."""
    model = make_model(99)
    optimizer = make_adamw(model)
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    state: dict[str, Any] = {
        "model": get_model_state_dict(model),
        "optim": get_optimizer_state_dict(model, optimizer, options=options),
    }
    load(state, checkpoint_id=folder, no_dist=True)
    model.load_state_dict(state["model"])
    set_optimizer_state_dict(model, optimizer, state["optim"], options=options)
    for step in range(AT, total):
        step_once(model, optimizer, step)
    return model, optimizer


@pytest.mark.parametrize("flat", [True, False])
def test_a_plain_loop_goes_on_at_the_exact_bits(dense: Trained, exported: Path, flat: bool) -> None:
    """Either layout of an optimizer's state dict finds its keys; the continuation is that of the run itself."""
    model, optimizer = continued(exported, flat=flat)
    assert same(model.state_dict(), dense.live[TOTAL])
    before, after = dense.optimizer.state_dict(), optimizer.state_dict()
    for index, state in before["state"].items():
        assert same(state, after["state"][index])
    assert before["param_groups"] == after["param_groups"]


def test_state_that_is_made_of_several_tensors_is_exported_as_these(endpoint: str, tmp_path: Path) -> None:
    """Complete, in its own dtypes, and with a note; no import takes it for the state itself."""
    trained = train(
        endpoint,
        TOTAL,
        model=MoE(16),
        make_optimizer=lambda model: BlockAdam(model.parameters(), 1e-2),
        window=1,
    )
    with trained.snapshot(TOTAL - 1) as source:
        report = export_dcp(source, tmp_path / "dcp")
    assert "first:codes, first:scales, second:codes, second:scales" in report.notes[0]
    prefix = "optim.state.experts.up.first"
    state = {
        f"{prefix}:codes": torch.zeros(2, 16, 16, dtype=torch.float8_e4m3fn),
        f"{prefix}:scales": torch.zeros(64),
    }
    load(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert state[f"{prefix}:codes"].float().abs().max() == 448
    with open_import(tmp_path / "dcp", kind="dcp", model_key="model", optimizer_key="optim") as found:
        import_to_folder(found, tmp_path / "set")
    model = MoE(16)
    binding = LiveState(model, [BlockAdam(model.parameters(), 1e-2)], None)
    with pytest.raises(StartMismatch, match=r"first:(codes|scales), a part of a tensor"):
        load_start(binding, tmp_path / "set")


def test_a_sparse_snapshot_is_the_model_of_its_iteration(endpoint: str, tmp_path: Path) -> None:
    sparse = train(endpoint, TOTAL, window=3)
    for iteration in (TOTAL - 3, TOTAL - 1):
        with sparse.snapshot(iteration) as source:
            report = export_dcp(source, tmp_path / str(iteration))
        assert report.optimizer_tensors == 0
        loaded = {"model": make_model(99).state_dict()}
        load(loaded, checkpoint_id=tmp_path / str(iteration), no_dist=True)
        assert same(loaded["model"], sparse.live[iteration])
    assert {key.split(".")[0] for key in keys_of(tmp_path / str(iteration))} == {"model"}


@pytest.mark.parametrize("place", ["memory", "storage"])
@long
def test_a_model_that_ranks_captured_in_shares_goes_on_at_the_exact_bits(
    dense: Trained, tmp_path: Path, place: str
) -> None:
    """Two experts of one fused parameter are two ranks' to capture; packed and plain state is in
    every rank's image.
    """
    run = SharedRun(dense, 3)
    assert len(run.owners_of("experts.up")) == 2
    with ExitStack() as stack:
        source: TensorSource
        if place == "memory":
            folder = stack.enter_context(segment_folder())
            run.into_memory(folder)
            source = stack.enter_context(open_slot(folder, AT, rank=1))
        else:
            store = stack.enter_context(closing(open_store(f"file://{tmp_path}/store")))
            run.into_store(store, AT)
            opened = open_stored(store, "file://store", "job", "run", AT, rank=1)
            source = stack.enter_context(opened)
        report = export_dcp(source, tmp_path / "ckpt")
    assert (report.tensors, report.optimizer_tensors, report.notes) == (7, 18, ())
    assert report.joined_ranks == (0, 2)
    model, optimizer = continued(tmp_path / "ckpt", flat=True)
    assert same(model.state_dict(), dense.live[TOTAL])
    before, after = dense.optimizer.state_dict(), optimizer.state_dict()
    for index, state in before["state"].items():
        assert same(state, after["state"][index])
    assert before["param_groups"] == after["param_groups"]


@long
def test_a_sparse_model_that_ranks_captured_in_shares_is_that_of_its_iteration(
    endpoint: str, tmp_path: Path
) -> None:
    sparse = train(endpoint, TOTAL, window=3)
    run = SharedRun(sparse, 4)
    with segment_folder() as folder:
        run.into_memory(folder)
        for rank, iteration in enumerate(sorted(run.views)[-3:]):
            target = tmp_path / str(iteration)
            with open_slot(folder, iteration, rank=rank) as source:
                report = export_dcp(source, target)
            assert report.optimizer_tensors == 0
            loaded = {"model": make_model(99).state_dict()}
            load(loaded, checkpoint_id=target, no_dist=True)
            assert same(loaded["model"], sparse.live[iteration])


def test_two_ranks_load_their_shards(exported: Path, dense: Trained, tmp_path: Path) -> None:
    """Resharding is torch's own: the checkpoint was written by one process and is loaded by two."""
    torch.save(dense.live[AT], tmp_path / "expected.pt")
    ranks = [
        Forked(reshard.main, exported, tmp_path, env=os.environ | {"RANK": str(rank), "WORLD_SIZE": "2"})
        for rank in range(2)
    ]
    said = [process.communicate(timeout=120)[1] for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0], said


def with_two_groups(model: nn.Module) -> torch.optim.AdamW:
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    groups: list[dict[str, Any]] = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=0.1)


def test_options_of_several_groups_need_to_know_whose_they_are(endpoint: str, tmp_path: Path) -> None:
    trained = train(endpoint, 4, window=1, make_optimizer=with_two_groups)
    with trained.snapshot(3) as source:
        full = export_dcp(source, tmp_path / "known")
        source.facts = replace(source.facts, groups={})
        report = export_dcp(source, tmp_path / "unknown")
    assert "options of parameter groups" in report.notes[0]
    assert not any(key.startswith("optim.param_groups") for key in keys_of(tmp_path / "unknown"))
    assert full.notes == ()
    model = make_model(99)
    for flat in (True, False):
        options = StateDictOptions(flatten_optimizer_state_dict=flat)
        optimizer = with_two_groups(model)
        state: Any = get_optimizer_state_dict(model, optimizer, options=options)
        load({"optim": state}, checkpoint_id=tmp_path / "known", no_dist=True)
    assert [group["weight_decay"] for group in state["param_groups"]] == [0.01, 0.0]


class Unused(MoE):
    """With a parameter that never gets a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(2, 2)


def test_state_that_does_not_exist_yet_is_left_out(endpoint: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    trained = train(endpoint, 3, window=1, model=Unused())
    with trained.snapshot(2) as source:
        report = export_dcp(source, tmp_path / "ckpt")
    assert report.notes == ("2 parameters have no optimizer state yet",)
    keys = keys_of(tmp_path / "ckpt")
    assert "model.spare.weight" in keys
    assert "optim.state.gate.weight.exp_avg" in keys
    assert not any(key.startswith("optim.state.spare") for key in keys)


class Half(nn.Module):
    """A model in bf16 whose masters the optimizer holds."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4).bfloat16()


def test_masters_that_are_kept_apart_are_there(endpoint: str, tmp_path: Path) -> None:
    from ckptd.client import Checkpointer

    model = Half()
    masters = {n: p.detach().float().clone() for n, p in model.named_parameters()}
    optimizer = torch.optim.SGD(list(masters.values()), lr=0.1, momentum=0.9)
    trained = train(endpoint, 1, window=1)  # finds the folder
    options = grouped(job="export", run=trained.run + "m", daemon=endpoint, masters=masters, window=1)
    with Checkpointer(model, optimizer, **options) as ckpt:
        for _ in ckpt.steps(3):
            for master in masters.values():
                master.grad = torch.full_like(master, 1e-3)
            before = {n: m.clone() for n, m in masters.items()}
            optimizer.step()
            with torch.no_grad():
                for name, param in model.named_parameters():
                    param.copy_(masters[name])
    trained.run += "m"
    with trained.snapshot(2) as source:
        export_dcp(source, tmp_path / "ckpt")
    loaded = {"master": {n: torch.zeros_like(m) for n, m in masters.items()}}
    load(loaded, checkpoint_id=tmp_path / "ckpt", no_dist=True)
    assert same(loaded["master"], before)
    assert "optim.state.lin.weight.momentum_buffer" in keys_of(tmp_path / "ckpt")


def test_a_full_disk_leaves_nothing(dense: Trained) -> None:
    with small_tmpfs("16k") as small, dense.snapshot(AT) as source:
        with pytest.raises(ExportError, match=r"dcp_export ended .*No space left on device$"):
            export_dcp(source, small / "ckpt")
        assert os.listdir(small) == []


def test_a_checkpoint_is_replaced_only_by_force(dense: Trained, exported: Path) -> None:
    with dense.snapshot(AT) as source:
        with pytest.raises(ExportError, match="exists already"):
            export_dcp(source, exported)
        export_dcp(source, exported, force=True)
    assert sorted(os.listdir(exported)) == [".metadata", "__0_0.distcp"]
