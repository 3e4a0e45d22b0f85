"""Checkpoints that stock torch wrote, as an import reads them."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_saver import save

from ckptd.client.interchange.dcp_import import StoredState
from ckptd.export.dcp_wire import ReadJob
from tests.client.exporting import MoE, make_model, step_once


def saved(folder: Path, state: dict[str, Any]) -> str:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        save(state, checkpoint_id=folder, no_dist=True)
    return str(folder)


def trained() -> tuple[MoE, torch.optim.Optimizer]:
    model = make_model(0)
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    groups: list[dict[str, Any]] = [
        {"params": decayed, "lr": torch.tensor(0.25)},
        {"params": others, "betas": (0.5, 0.9)},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.125)
    step_once(model, optimizer, 0)
    return model, optimizer


@pytest.mark.parametrize("flat", [True, False])
def test_both_layouts_of_an_optimizer_give_the_same(tmp_path: Path, flat: bool) -> None:
    model, optimizer = trained()
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    state = get_optimizer_state_dict(model, optimizer, options=options)
    folder = saved(tmp_path / "ckpt", {"model": model.state_dict(), "optim": state, "step": 3})
    stored = StoredState(ReadJob(folder, "model", "optim"))
    found = stored.contents()
    assert found.notes == ["passed over: step"]
    kinds = [tensor.kind for tensor in found.tensors]
    assert (kinds.count("model"), kinds.count("optim")) == (8, 18)
    assert found.groups["embed.weight"]["lr"] == 0.25
    assert found.groups["gate.bias"]["lr"] == 0.125
    assert found.groups["gate.bias"]["betas"] == [0.5, 0.9]
    at = {tensor.name: index for index, tensor in enumerate(found.tensors)}
    assert torch.equal(stored.tensor(at["embed.weight"]), model.embed.weight)
    moment = optimizer.state[model.gate.bias]["exp_avg"]
    assert torch.equal(stored.tensor(at["state.gate.bias.exp_avg"]), moment)


def test_a_model_at_the_root_or_under_another_key(tmp_path: Path) -> None:
    model, _ = trained()
    folder = saved(tmp_path / "root", dict(model.state_dict()))
    names = {t.name for t in StoredState(ReadJob(folder, "", "")).contents().tensors}
    assert names == set(model.state_dict())
    folder = saved(tmp_path / "app", {"app": {"net": model.state_dict()}})
    found = StoredState(ReadJob(folder, "app.net", "")).contents()
    assert {t.name for t in found.tensors} == names
    with pytest.raises(ValueError, match=r"no tensor under the key 'model\.'; keys are like app"):
        StoredState(ReadJob(folder, "model", "optim")).contents()


def test_a_dtype_that_safetensors_cannot_hold_is_named(tmp_path: Path) -> None:
    folder = saved(tmp_path / "ckpt", {"model": {"w": torch.zeros(2, dtype=torch.complex128)}})
    with pytest.raises(ValueError, match=r"model\.w is torch\.complex128"):
        StoredState(ReadJob(folder, "model", "")).contents()
