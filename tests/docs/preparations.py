"""What single Python blocks of the documentation need beyond the names of `tests.docs.training`.

A key is a part of the block that no other block has.
"""

from __future__ import annotations

__all__ = ["NOT_RUN", "PREPARATIONS"]

# -- what several need ----------------------------------------------------------------------------

_LOSS = """
class WithLoss(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, batch):
        batch = batch[0] if isinstance(batch, list | tuple) else batch
        return self.inner(batch).float().square().mean()


model = WithLoss(model)
"""

_STAGE = """
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

stages = nn.ModuleList([model])
schedule = ScheduleGPipe(PipelineStage(model, 0, 1, torch.device("cpu")), 1, loss_fn=nn.functional.mse_loss)
"""

_REROUTED = """
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

from ckptd.core.reroute.pipeline_grid import PipelineGrid, StageCosts
from ckptd.core.reroute.reroute_plan import plan_reroute

loss_fn, ranks, batch, labels = nn.functional.mse_loss, [[0]], inputs[:8], targets[:8]
rows = torch.zeros(4, 4)
stage = PipelineStage(
    model, 0, 1, torch.device("cpu"), input_args=rows, output_args=rows.clone().requires_grad_()
)
schedule = ScheduleGPipe(stage, 2, loss_fn=loss_fn)


def plan_of(step):
    return plan_reroute(PipelineGrid(1, (StageCosts(1, 1, 1),), 2)) if step > 1 else None


def micro_batch(step, pipeline, number):
    return batch.chunk(2)[number]


def target(step, pipeline, number):
    return labels.chunk(2)[number]
"""

_ELASTIC = """
import numpy as np

from ckptd.client.elastic import ElasticExperts, ExpertShards, HandWritten, replace_moe_blocks
from ckptd.client.elastic.job import ElasticJob, GlobalBatches
from ckptd.core.elastic.allocation import allocate, split_over_ranks
from ckptd.core.elastic.elastic_types import Cluster
from ckptd.core.elastic.expert_placement import place

LAYERS, EXPERTS = 2, 4
cluster = Cluster.uniform(1, EXPERTS, ranks=1)
loads = np.ones((LAYERS, EXPERTS), dtype=np.int64)
plan = place(allocate(loads, cluster, 1), loads, cluster)
placement = split_over_ranks(plan.placement, cluster)


def make_expert(number):
    torch.manual_seed(number)
    return nn.Linear(4, 4)
"""

_MIXTRAL = f"""{_ELASTIC}
from transformers import MixtralConfig, MixtralForCausalLM

path = "mixtral"
sizes = dict(vocab_size=16, hidden_size=8, intermediate_size=8, num_attention_heads=2, num_key_value_heads=2)
config = MixtralConfig(num_hidden_layers=LAYERS, num_local_experts=EXPERTS, **sizes)
model = MixtralForCausalLM(config)
token_ids = torch.arange(8)[None]
"""

_SHARDS = f"""{_MIXTRAL}
layers = replace_moe_blocks(model, placement)
shards = ExpertShards(layers, lambda named: torch.optim.AdamW(named, lr=1e-3))
optimizer = torch.optim.AdamW(model.parameters())
"""

# One rank has room for all experts.
_JOB = f"""{_ELASTIC}
from functools import partial


class Mixtures(nn.Module):
    def __init__(self, job):
        super().__init__()
        self.blocks = nn.ModuleList([nn.ModuleDict({{"moe": job.layer(n, make_expert)}}) for n in job.layers.names])
        self.gate = nn.Linear(4, 8)

    def forward(self, tokens):
        for block in self.blocks:
            weights, experts = self.gate(tokens).softmax(-1).topk(2)
            tokens = tokens + block["moe"](tokens, experts, weights)
        return tokens


build, data, batch_size = Mixtures, inputs, 8
sched = torch.optim.lr_scheduler.StepLR(optimizer, 2)


class ElasticJob(ElasticJob):
    def __init__(self, experts, slots):
        super().__init__(experts, slots=max(experts.values()))


def loss_of(model, samples):
    return model(samples).square().mean(1)
"""

# -- each block -----------------------------------------------------------------------------------

# Code that runs before the block, with the names of the training.
PREPARATIONS: dict[str, str] = {
    'kept = {"best": float("inf")': "ema = [0.0]",
    "if (step + 1) % len(loader) == 0:": (
        "epochs, sched = 1, torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)\n"
        "def validate(model):\n    return 1.0\n"
    ),
    'run="r1-warm"': "from torch.optim import SGD, AdamW",
    "runner = ReroutedStage(": _REROUTED,
    "reader = LogReader(": """
import os
from ckptd.client.identity import identify

ckpt = Checkpointer(model, optimizer, snapshots=SnapshotOptions(window=1))
log = ckpt.boundary_log()
for step in ckpt.steps(total):
    log.activation(train_step((inputs[:4], targets[:4])), micro_batch=0, dest=1)
    optimizer.step()
ckpt.close()
found = identify(None, None, None, None)
job, run, rank = found.job, found.run, found.rank
segment_dir = os.environ["CKPTD_SEGMENT_DIR"]
""",
    "layer = ElasticExperts(mine": f"""{_ELASTIC}
mine = {{number: make_expert(number) for number in range(EXPERTS)}}
tokens, experts, weights = inputs, torch.randint(EXPERTS, (len(inputs), 2)), torch.rand(len(inputs), 2)
""",
    "MixtralForCausalLM.from_pretrained(path)": f"{_MIXTRAL}\nmodel.save_pretrained(path)\n",
    "blocks={MyBlock: HandWritten(": f"""{_ELASTIC}


class MyBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.ffn = nn.Linear(4, EXPERTS), nn.ModuleList(make_expert(n) for n in range(EXPERTS))

    def router(self, tokens):
        return self.gate(tokens).softmax(-1).topk(2)


model = nn.Sequential(MyBlock(), MyBlock())
""",
    'or {"name": ElasticExperts(...)}': _MIXTRAL,
    "shards.reduce_gradients()": f"{_SHARDS}\nmodel(token_ids, labels=token_ids).loss.backward()\n",
    'both = nn.ModuleDict({"model"': _SHARDS,
    "batches = GlobalBatches(len(data), batch_size)": _JOB,
    "shards = job.shards(": f"""{_JOB}
job = ElasticJob({{"blocks.0.moe": 8, "blocks.1.moe": 8}}, slots=8)
""",
    "masters = {name: p.detach().clone()": f"{_LOSS}\nbatch = inputs.bfloat16()\n",
    "(model(next(batches)) / accumulate)": f"""{_LOSS}
ckpt, accumulate = Checkpointer(model, optimizer), 2
batches = ckpt.batches(loader)
""",
    "with ckpt.quiet():": "sent, received = torch.ones(4), torch.zeros(4)",
    "LayoutOptions(replicated=same)": """
from torch.distributed.device_mesh import init_device_mesh

mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("data",))
model = nn.ModuleDict({"dense": nn.Linear(4, 4), "experts": nn.ModuleList([nn.Linear(4, 4)])})
optimizer = torch.optim.AdamW(model.parameters())
""",
    "stages = nn.ModuleList(parts)": f"""{_STAGE}


class Loader:
    def __init__(self):
        self.position = 0

    def state_dict(self):
        return dict(position=self.position)

    def load_state_dict(self, state):
        self.position = state["position"]


loader = Loader()
parts, inputs, targets = [model], [inputs], targets
""",
    "norm of all stages": f"{_STAGE}\ntrain_step((inputs, targets))\n",
    "ckpt.log_boundaries(schedule)  # or its stages": _STAGE,
    "ckpt.copy_in_bubbles(schedule)  # any schedule": _STAGE,
    "write_scalars(writer, ckpt.scalars(), step)": """
from types import SimpleNamespace

loss = torch.zeros(())
writer = SimpleNamespace(add_scalar=lambda name, value, step: None)
run = accelerator = SimpleNamespace(log=lambda values, step: None)
""",
    "CkptdCallback(log_scalars=True)": """
from functools import partial

from transformers import Trainer, TrainingArguments

Trainer = partial(Trainer, args=TrainingArguments("out", report_to=[], use_cpu=True))
""",
    "trainer = Trainer(model=model, args=args": f"""{_LOSS}
from transformers import Trainer, TrainingArguments


class ForTrainer(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return {{"loss": self.inner(x)}}


model = ForTrainer(model)
data = [{{"x": each}} for each in inputs]
args = TrainingArguments("out", max_steps=total, report_to=[], disable_tqdm=True, use_cpu=True, save_strategy="no")
""",
    "loader, scheduler = accelerator.prepare(": """
from types import SimpleNamespace

from accelerate import Accelerator


class WithLabels(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x, labels):
        return SimpleNamespace(loss=nn.functional.mse_loss(self.inner(x), labels))


model = WithLabels(model)
loader = torch.utils.data.DataLoader([{"x": x, "labels": y} for x, y in zip(inputs, targets)], batch_size=4)
accelerator, scheduler = Accelerator(cpu=True), sched
""",
    "of `lightning` or of `pytorch_lightning`": """
from lightning.pytorch import LightningModule
from lightning.pytorch import Trainer as Unset


class Module(LightningModule):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def training_step(self, batch):
        return self.inner(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


class Trainer(Unset):
    def __init__(self, **given):
        quiet = dict(enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
        super().__init__(accelerator="cpu", devices=1, logger=False, **quiet, **given)


module, steps = Module(), total
""",
    "recovery=RecoveryOptions(in_process=connect)": """
from torch.nn.parallel import DistributedDataParallel

loader = torch.utils.data.DataLoader(inputs, batch_size=4)
""",
}

_SCHEDULED = """
import itertools
import os

batches = itertools.cycle(loader)
"""
_DCP = """
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict, get_state_dict, set_model_state_dict, set_state_dict
)
from torch.distributed.checkpoint.stateful import Stateful
"""
PREPARATIONS |= {
    'if os.path.exists("last.pt"):': f"""{_SCHEDULED}
torch.save({"{"}"step": 1, "model": model.state_dict(), "optimizer": optimizer.state_dict(), "sched": sched.state_dict(){"}"}, "last.pt")
total = 1000
""",
    "ckpt.steps(total, start=saved[": """
torch.save(dict(step=1, model=model.state_dict(), optimizer=optimizer.state_dict()), "last.pt")
""",
    'load_file("model.safetensors")': """
from safetensors.torch import save_file

save_file(model.state_dict(), "model.safetensors")
""",
    "class AppState(Stateful):": f"{_DCP}\nbatches = iter(loader)\n",
    'RecoveryOptions(start_from="./start")': f"""{_DCP}
from ckptd.ctl.main import main

train_step((inputs, targets))
optimizer.step()
optimizer.zero_grad()
saved = dict(zip(("model", "optim"), get_state_dict(model, optimizer)))
dcp.save(dict(app=saved), checkpoint_id="checkpoints/2")
keys = ("--model-key", "app.model", "--optimizer-key", "app.optim")
assert main(["import", "--from", "checkpoints/2", "--format", "dcp", "--to", "./start", *keys]) == 0
""",
    'dcp.load(state, checkpoint_id="./exported")': f"""{_DCP}
dcp.save(dict(model=get_model_state_dict(model)), checkpoint_id="./exported")
""",
}

# Blocks of which only the imports are executed, with the reason.
NOT_RUN: dict[str, str] = {
    'DdpCheckpointer("/checkpoints")': "what a user of DLRover has, which is not installed",
    'LocalCheckpointManager("/mnt/ramdisk"': "what a user of NVRx has, which is not installed",
    'RunOptions(job="tutorial"': "killed and resumed: tests/docs/test_tutorial.py",
    'slots=3, run=RunOptions(name="elastic"': "two ranks, then three: tests/e2e/test_elastic_docs.py",
    "optimizer = get_megatron_optimizer(": "two ranks of Megatron-Core: tests/e2e/test_integrations_megatron.py",
    "engine, *_ = deepspeed.initialize(": "two ranks of DeepSpeed: tests/habits/test_deepspeed.py",
    "accelerator = Accelerator(deepspeed_plugin=": "two ranks of DeepSpeed: tests/habits/test_deepspeed_through.py",
    'TrainingArguments("out", deepspeed=': "two ranks of DeepSpeed: tests/habits/test_deepspeed_through.py",
    "fed = FedLogs(": "a part of a localized recovery: tests/client/pipeline",
    "training = ReroutedTraining(": "under hosts: tests/client/rerouting",
    "if not log.receive_activation(buffer": "two ranks that send each other: tests/e2e/parallel/logged.py",
    "if log.activation(output, micro_batch=m": "two ranks that send each other: tests/e2e/parallel/logged.py",
}
