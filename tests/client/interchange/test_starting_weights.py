"""A run that begins at a given model: whole, by the model's own names, and never in place of what
can be resumed.
"""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from ckptd.client import Checkpointer, RecoveryOptions
from ckptd.client.interchange.starting_weights import StartMismatch, load_start
from ckptd.client.model.live_state import LiveState
from ckptd.export.dcp import export_dcp
from ckptd.export.exports import export_hf
from ckptd.export.importing import import_to_folder, import_to_store, open_import
from ckptd.storage.stores.open_store import open_store
from tests.client.exporting import make_adamw, make_model, same, step_once, train
from tests.option_groups import grouped

TOTAL, AT = 9, 7
MEMORY = "memory://start-from"


def binding_of(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> LiveState:
    return LiveState(model, [optimizer or make_adamw(model)], None)


def saved(path: Path, **changed: Tensor | None) -> Path:
    """A model's state as a safetensors file, with some tensors changed, added or (None) left out."""
    state = make_model(1).state_dict() | changed
    kept = {k: v.clone() for k, v in state.items() if v is not None and k != "head.weight"}
    save_file(kept, path)
    return path


def test_a_model_begins_at_a_file_a_folder_or_a_store(tmp_path: Path) -> None:
    wanted = make_model(1).state_dict()
    file = saved(tmp_path / "model.safetensors")
    with open_import(file, model_key="", optimizer_key="") as found:
        store = open_store(MEMORY)
        report = import_to_store(found, store, MEMORY, "job", "run")
        import_to_folder(found, tmp_path / "set")
    for source in (file, tmp_path, f"file://{tmp_path}", report.start_from, tmp_path / "set"):
        model = make_model(2)
        text = load_start(binding_of(model), source)
        assert text == f"starting from {source}: 7 tensors of the model"
        assert same(model.state_dict(), wanted)


def test_every_name_of_a_tied_parameter_will_do(tmp_path: Path) -> None:
    state = make_model(1).state_dict()
    state["head.weight"] = state.pop("embed.weight")
    save_file(state, tmp_path / "m.safetensors")
    model = make_model(2)
    load_start(binding_of(model), tmp_path / "m.safetensors")
    assert torch.equal(model.embed.weight, state["head.weight"])


def test_wrappers_are_no_part_of_a_name(tmp_path: Path) -> None:
    """A model under data parallelism begins at a file of the bare one, and the other way round."""
    file = saved(tmp_path / "model.safetensors")
    wrapped = nn.ModuleDict({"module": make_model(2)})
    load_start(binding_of(wrapped), file)
    assert same(wrapped["module"].state_dict(), make_model(1).state_dict())
    save_file({f"module.{k}": v + 1 for k, v in _bare(1).items()}, tmp_path / "ddp.safetensors")
    model = make_model(2)
    load_start(binding_of(model), tmp_path / "ddp.safetensors")
    assert torch.equal(model.norm.bias, make_model(1).norm.bias + 1)


def _bare(seed: int) -> dict[str, Tensor]:
    state = make_model(seed).state_dict()
    del state["head.weight"]
    return state


def test_all_that_differs_is_listed_and_nothing_is_loaded(tmp_path: Path) -> None:
    file = saved(
        tmp_path / "m.safetensors",
        **{
            "gate.bias": None,
            "seen": None,
            "gates.bias": torch.zeros(2),
            "gate.weight": torch.zeros(3, 8),
            "norm.bias": torch.zeros(8).bfloat16(),
        },
    )
    model = make_model(2)
    with pytest.raises(StartMismatch) as told:
        load_start(binding_of(model), file)
    text = str(told.value)
    for part in (
        "missing: gate.bias",
        "missing: seen",
        "unexpected: gates.bias",
        "shape of gate.weight: [3, 8] there, [2, 8] here",
        "dtype of norm.bias: torch.bfloat16 there, torch.float32 here",
    ):
        assert part in text
    assert same(model.state_dict(), make_model(2).state_dict())


def test_many_differences_are_counted(tmp_path: Path) -> None:
    save_file({f"w{i}": torch.zeros(1) for i in range(20)}, tmp_path / "m.safetensors")
    with pytest.raises(StartMismatch, match=r"missing: embed\.weight.*; and 19 more$"):
        load_start(binding_of(make_model(2)), tmp_path / "m.safetensors")


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("/nowhere/model", "/nowhere/model does not exist"),
        ("memory://start-from/job/none/import", r"has no import\.json"),
        ("{tmp_path}", r"holds no model\.safetensors"),
        ("gopher://host/model", "gopher"),
    ],
)
def test_what_cannot_be_read_is_said(tmp_path: Path, source: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        load_start(binding_of(make_model(2)), source.format(tmp_path=tmp_path))


def test_a_damaged_import_is_refused(tmp_path: Path) -> None:
    file = saved(tmp_path / "m.safetensors")
    with open_import(file, model_key="", optimizer_key="") as found:
        import_to_folder(found, tmp_path / "set")
    stored = tmp_path / "set" / "model.safetensors"
    data = bytearray(stored.read_bytes())
    data[-2] ^= 1
    stored.write_bytes(data)
    with pytest.raises(ValueError, match=r"start_from=.*seen in .* is damaged"):
        load_start(binding_of(make_model(2)), tmp_path / "set")


def test_masters_follow_the_parameters(tmp_path: Path) -> None:
    """Otherwise the first step would write the old masters over the loaded weights."""
    wanted = torch.randn(4, 4).bfloat16()
    save_file({"weight": wanted, "bias": torch.ones(4).bfloat16()}, tmp_path / "m.safetensors")
    model = nn.Linear(4, 4).bfloat16()
    masters = {n: p.detach().float().clone() for n, p in model.named_parameters()}
    optimizer = torch.optim.SGD(list(masters.values()), lr=0.1)
    load_start(LiveState(model, [optimizer], masters), tmp_path / "m.safetensors")
    assert torch.equal(model.weight, wanted)
    assert torch.equal(masters["weight"], wanted.float())


def test_masters_and_state_of_the_optimizer_lie_beside_the_model(tmp_path: Path) -> None:
    """A master has bits that the parameter has not; what is of no master, or of another shape, is refused."""
    wanted, finer = torch.ones(3, 4).bfloat16(), torch.full((3, 4), 1.0001)
    save_file({"weight": wanted}, tmp_path / "model.safetensors")
    moment = torch.randn(3, 4)
    extra = {"master.weight": finer, "state.weight.momentum_buffer": moment}
    save_file(extra, tmp_path / "optimizer.safetensors")
    model = nn.Linear(4, 3, bias=False).bfloat16()
    master = model.weight.detach().float().clone()
    optimizer = torch.optim.SGD([master], lr=0.1, momentum=0.9)
    binding = LiveState(model, [optimizer], {"weight": master})
    load_start(binding, tmp_path)
    assert torch.equal(model.weight, wanted)
    assert torch.equal(master, finer)
    assert torch.equal(optimizer.state[master]["momentum_buffer"], moment)
    plain = nn.Linear(4, 3, bias=False).bfloat16()
    with pytest.raises(StartMismatch, match=r"unexpected: master\.weight; dtype of state\.weight"):
        load_start(
            LiveState(plain, [torch.optim.SGD(plain.parameters(), 0.1, momentum=0.9)], None),
            tmp_path,
        )
    save_file({"state.weight.momentum_buffer": torch.zeros(3)}, tmp_path / "optimizer.safetensors")
    with pytest.raises(StartMismatch, match=r"shape of state\.weight\.momentum_buffer: \[3\] there"):
        load_start(binding, tmp_path)


def test_a_sharded_parameter_gets_its_shard(tmp_path: Path) -> None:
    """Each rank reads the whole and keeps what is its own; here there is one rank, and it holds all rows."""
    wanted = torch.randn(4, 3)
    save_file({"weight": wanted}, tmp_path / "m.safetensors")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        model = nn.Linear(3, 4, bias=False)
        shards = distribute_tensor(torch.zeros(4, 3), mesh, [Shard(0)])
        model.weight = nn.Parameter(shards)
        load_start(binding_of(model), tmp_path / "m.safetensors")
        assert isinstance(model.weight, DTensor)
        assert torch.equal(model.weight.to_local(), wanted)
    finally:
        dist.destroy_process_group()


# -- with the rest of the client -----------------------------------------------------------------


def test_a_start_resumes_nothing_and_a_resume_needs_no_start(
    endpoint: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The first start of a run begins at the model; a restart goes on from snapshots, even if the
    file is gone.
    """
    file = saved(tmp_path / "model.safetensors")
    options = grouped(job="start", run=tmp_path.name, daemon=endpoint, window=1, start_from=file)
    model = make_model(2)
    optimizer = make_adamw(model)
    with (
        caplog.at_level(logging.WARNING, "ckptd.client.checkpointer"),
        Checkpointer(model, optimizer, **options) as ckpt,
    ):
        assert f"starting from {file}: 7 tensors" in caplog.text
        assert ckpt.resumed_from is None
        assert same(model.state_dict(), make_model(1).state_dict())
        for step in ckpt.steps(4):
            step_once(model, optimizer, step)
    reached = {k: v.clone() for k, v in model.state_dict().items()}
    file.unlink()
    model = make_model(3)
    optimizer = make_adamw(model)
    with Checkpointer(model, optimizer, **options) as ckpt:
        assert ckpt.resumed_from == 4
        for step in ckpt.steps(4):
            step_once(model, optimizer, step)
        assert same(model.state_dict(), reached)


def test_a_run_without_a_daemon_begins_there_too(tmp_path: Path) -> None:
    file = saved(tmp_path / "model.safetensors")
    model = make_model(2)
    Checkpointer(model, [make_adamw(model)], daemon=None, recovery=RecoveryOptions(start_from=file))
    assert same(model.state_dict(), make_model(1).state_dict())


def test_a_mismatch_ends_the_constructor(endpoint: str, tmp_path: Path) -> None:
    file = saved(tmp_path / "model.safetensors", **{"gate.bias": None})
    model = make_model(2)
    options = grouped(job="start", run=tmp_path.name, daemon=endpoint, start_from=file)
    with pytest.raises(StartMismatch, match=r"missing: gate\.bias"):
        Checkpointer(model, make_adamw(model), **options)


@pytest.mark.usefixtures("forked_child")
def test_an_exported_and_imported_run_goes_on_at_the_exact_bits(endpoint: str, tmp_path: Path) -> None:
    """DCP there, a set here: parameters, optimizer state and options; what is of another optimizer
    is refused.
    """
    trained = train(endpoint, TOTAL, window=1)
    with trained.snapshot(AT) as source:
        export_dcp(source, tmp_path / "dcp")
        export_hf(source, tmp_path / "hf")
    with open_import(tmp_path / "dcp", kind="dcp", model_key="model", optimizer_key="optim") as found:
        report = import_to_folder(found, tmp_path / "set")
    assert (report.format, report.tensors, report.optimizer_tensors) == ("dcp", 8, 18)
    model = make_model(2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5, betas=(0.5, 0.5), weight_decay=0.0)
    text = load_start(binding_of(model, optimizer), tmp_path / "set")
    assert text.endswith("8 tensors of the model, 18 of the optimizer's state")
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.999)
    for step in range(AT, TOTAL):
        step_once(model, optimizer, step)
    assert same(model.state_dict(), trained.live[TOTAL])
    model = make_model(2)
    load_start(binding_of(model), tmp_path / "hf")
    assert same(model.state_dict(), trained.live[AT])
    other = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(StartMismatch, match=r"unexpected: optimizer state state\.embed\.weight"):
        load_start(binding_of(model, other), tmp_path / "set")
