"""What cannot be captured of Megatron-Core's optimizers is refused, and what each of them keeps is found.

Through a kill: tests/e2e/test_integrations_megatron.py.
"""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from importlib.util import find_spec

import pytest
import torch
from torch import nn

from ckptd.client import Checkpointer
from tests.ckptd.running import ROOT

pytestmark = pytest.mark.skipif(
    find_spec("megatron") is None, reason="megatron-core is not installed: pip install 'ckptd[megatron]'"
)

# Megatron takes seconds to import, warns, and asks for CUDA: once, in a process of its own.
SCRIPT = """
import json, warnings
from types import SimpleNamespace
warnings.simplefilter("ignore")
import torch
from torch import nn
from megatron.core.optimizer.optimizer import ChainedOptimizer, FP32Optimizer, MegatronOptimizer
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from ckptd.client import Checkpointer
from ckptd.client.frameworks import megatron

def around(inner, **settings):
    part = FP32Optimizer.__new__(FP32Optimizer)
    part.config, part.optimizer, part.is_stub_optimizer = SimpleNamespace(**settings), inner, inner is None
    return part

def chain(*parts):
    chained = ChainedOptimizer.__new__(ChainedOptimizer)
    chained.chained_optimizers = list(parts)
    return chained

net = nn.Linear(2, 2)
adam = torch.optim.AdamW(net.parameters())
fsdp = around(adam)
fsdp.ddp_config = SimpleNamespace(use_megatron_fsdp=True)
scaled = around(adam)
scaled.grad_scaler = SimpleNamespace(state_dict=dict, load_state_dict=print)
said = {}
for name, made, state in (
    ("precision aware", around(adam, use_precision_aware_optimizer=True), None),
    ("offload", chain(around(adam), around(adam, optimizer_cpu_offload=True)), None),
    ("fsdp", fsdp, None),
    ("torch's", adam, None),
    ("inside", around(SimpleNamespace()), None),
    ("stubs", chain(around(None)), None),
    ("twice", scaled, {"megatron_scaler.0": scaled.grad_scaler}),
):
    try:
        megatron.checkpointer(net, made, state, daemon=None)
    except ValueError as error:
        said[name] = str(error)
try:
    Checkpointer(net, chain(around(adam)), daemon="ipc:///nowhere")  # checked before anybody is asked
except ValueError as error:
    said["directly"] = str(error)
said["steps"] = list(megatron.checkpointer([net], chain(around(None), scaled), daemon=None).steps(2))
half = nn.Linear(2, 2).bfloat16()
mixed = SimpleNamespace(float16_groups=[[half.weight], [half.bias]], fp32_from_float16_groups=[[1], [2]])
said["masters"] = dict(megatron._masters(nn.ModuleList([net, half]), [around(adam), mixed]))

tracker, states = get_cuda_rng_tracker(), megatron._TrackedRandomStates()
generator = torch.Generator().manual_seed(1)
tracker.set_states({"plain": torch.arange(4), "graphs": generator})
told = states.state_dict()
torch.rand(3, generator=generator)
tracker.states_["plain"].add_(1)
states.load_state_dict(told)
said["states"] = tracker.get_states()["graphs"] is generator and tracker.get_states()["plain"].tolist()
said["drawn"] = torch.rand(2, generator=generator).equal(torch.rand(2, generator=torch.Generator().manual_seed(1)))
print(json.dumps(said))
"""


@cache
def said() -> dict[str, object]:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("precision aware", ("OptimizerConfig.use_precision_aware_optimizer", "set it to False")),
        ("offload", ("OptimizerConfig.optimizer_cpu_offload", "set it to False")),
        ("fsdp", ("Megatron-FSDP", "use_distributed_optimizer=True")),
        ("torch's", ("AdamW", "get_megatron_optimizer", "ckptd.client.Checkpointer")),
        ("inside", ("FP32Optimizer", "SimpleNamespace", "no torch optimizer")),
        ("stubs", ("updates no parameter of this rank",)),
        ("twice", ("megatron_scaler.0", "captures itself")),
        ("directly", ("ChainedOptimizer", "ckptd.client.frameworks.megatron.checkpointer(model, optimizer")),
    ],
)
def test_what_cannot_be_captured_is_refused(case: str, words: tuple[str, ...]) -> None:
    text = said()[case]
    assert isinstance(text, str)
    for word in words:
        assert word in text


def test_parts_without_parameters_are_left_out() -> None:
    assert said()["steps"] == [0, 1]


def test_fp32_weights_are_found_by_parameter_and_not_by_value() -> None:
    assert said()["masters"] == {"1.weight": 1, "1.bias": 2}


def test_random_states_come_back_into_the_generators_that_are_there() -> None:
    assert said()["states"] == [0, 1, 2, 3]
    assert said()["drawn"] is True


def test_another_class_of_the_same_name_is_not_megatrons() -> None:
    """The hint is for Megatron's optimizers only."""

    class ChainedOptimizer(torch.optim.SGD):
        pass

    net = nn.Linear(2, 2)
    assert list(Checkpointer(net, ChainedOptimizer(net.parameters(), lr=0.1), daemon=None).steps(1)) == [0]
