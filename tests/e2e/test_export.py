"""Models of Hugging Face transformers, trained a few steps and exported: what stock tools load is
what was live, to the bit.
"""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict_loader import load

from ckptd.client import Checkpointer
from ckptd.ctl.main import main
from tests.ckptd.running import DaemonProcess, eventually, running_daemon
from tests.forked_child import forked_child
from tests.option_groups import grouped

__all__ = ["forked_child"]

transformers: Any = pytest.importorskip(
    "transformers", reason="transformers is not installed: pip install ckptd[test]"
)

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # the libraries' own warnings are theirs
    pytest.mark.usefixtures("forked_child"),
]

TOTAL = 9


@dataclass
class Trained:
    """A run that has ended, what was live at the top of each iteration, and its model's configuration."""

    daemon: DaemonProcess
    model: Any
    config: Path
    live: dict[int, dict[str, Tensor]] = field(default_factory=dict)

    def export(self, *options: str) -> dict[str, Any]:
        """By `ckptctl` in this process, whose child with torch is forked."""
        words = ["export", "--endpoint", self.daemon.endpoint, "--job", "hf", "--run", "run", "--json"]
        with contextlib.redirect_stdout(io.StringIO()) as told:
            assert main([*words, *options]) == 0
        report: dict[str, Any] = json.loads(told.getvalue())
        return report

    def check(self, state: dict[str, Tensor], iteration: int) -> None:
        live = self.live[iteration]
        assert state.keys() >= live.keys()
        assert all(torch.equal(state[name], tensor) for name, tensor in live.items())


@pytest.fixture(
    scope="module",
    params=[("hf_mixtral", {"window": 3}), ("hf_qwen3_moe", {"window": 1})],
    ids=["mixtral-sparse", "qwen3_moe-dense"],
)
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trained]:
    from tests.e2e.hf_cases import HF_CASES
    from tests.e2e.patience import let_memory_come, let_them_come

    case, options = request.param
    folder = tmp_path_factory.mktemp("export")
    store = f"file://{folder}/store"
    often = {"store": store, "persist_every": "4", "persist_every_s": "0"}
    with running_daemon(memory="256MiB", **often) as daemon:
        job = HF_CASES[case](1)
        found = Trained(daemon, job.model, folder / "config")
        found.model.config.save_pretrained(found.config)
        options = {"job": "hf", "run": "run", "daemon": daemon.endpoint, **options}
        with Checkpointer(job.model, job.optimizers, job.state, **grouped(**options)) as ckpt:
            job.ckpt = ckpt
            job.start(ckpt)
            for step in ckpt.steps(TOTAL):
                found.live[step] = {k: v.clone() for k, v in job.model.state_dict().items()}
                let_memory_come(ckpt)
                let_them_come(ckpt)
                job.step(step, lambda point: None)
        yield found


def test_from_pretrained_gives_the_live_model(trained: Trained, tmp_path: Path) -> None:
    target = tmp_path / "model"
    config = ("--config", str(trained.config), "--max-shard-size", "12kB")
    report = trained.export("--iteration", "7", "--format", "hf", "--to", str(target), *config)
    assert report["files"] > 1
    assert (target / "model.safetensors.index.json").exists()
    model, told = type(trained.model).from_pretrained(target, output_loading_info=True)
    assert not told["missing_keys"]
    assert not told["mismatched_keys"]
    # What a state dict leaves out: tables that a model computes from its configuration.
    assert all("rotary_emb" in name for name in told["unexpected_keys"])
    trained.check(model.state_dict(), 7)


def test_stock_dcp_loads_the_live_model(trained: Trained, tmp_path: Path) -> None:
    report = trained.export("--iteration", "8", "--format", "dcp", "--to", str(tmp_path / "ckpt"))
    assert (report["optimizer_tensors"] > 0) == ("Qwen3" in type(trained.model).__name__)
    state = {name: torch.zeros_like(tensor) for name, tensor in trained.live[8].items()}
    load({"model": state}, checkpoint_id=tmp_path / "ckpt", no_dist=True)
    trained.check(state, 8)


def test_what_is_durable_is_the_model_of_its_iteration(trained: Trained, tmp_path: Path) -> None:
    """Out of the store by way of the child with torch, which is given what the store holds."""
    trained.live[TOTAL] = trained.model.state_dict()

    def committed() -> bool:
        return '"committed"' in trained.daemon.ctl("checkpoints", "list", "hf", "run", "--json").stdout

    eventually(committed, "a committed checkpoint", timeout_s=60)
    report = trained.export("--durable", "--format", "dcp", "--to", str(tmp_path / "ckpt"))
    assert report["place"].startswith("file://")
    assert (report["optimizer_tensors"] > 0) == ("Qwen3" in type(trained.model).__name__)
    live = trained.live[report["iteration"]]
    state = {name: torch.zeros_like(tensor) for name, tensor in live.items()}
    load({"model": state}, checkpoint_id=tmp_path / "ckpt", no_dist=True)
    trained.check(state, report["iteration"])
