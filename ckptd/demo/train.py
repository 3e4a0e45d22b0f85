"""Train the example model: an ordinary loop in which three lines are ckptd's.

bf16 weights are what forward and backward read; AdamW works on fp32 masters that this script keeps itself
(`--precision fp32`, the default where the CPU does not multiply bf16: on the weights). Run it twice with the
same `--run`, kill it as often as you like in between, and it ends with the same bits. `--init-seed` may
differ between restarts: nothing that matters comes from re-initialisation.
A host (`python -m ckptd.host -m ckptd.demo.train …`) starts it again by itself: then each life adds
its number to the seed.

    python -m ckptd.demo.train --steps 200 --log out/loss.jsonl --final out/final.pt

With `--ddp`, torchrun starts one of these per rank: the same loop under DistributedDataParallel
over gloo, with data, dropout, log and final state of each rank's own (`<log>-r<rank>.jsonl`).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import xxhash
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from ckptd.client import (
    Checkpointer,
    LayoutOptions,
    PartialOptions,
    RecoveryOptions,
    RunOptions,
    SnapshotOptions,
)
from ckptd.demo.data import ByteLoader, load_corpus, load_held_out
from ckptd.demo.model import PRECISIONS, MoEConfig, MoETransformer, native_precision

WARMUP_STEPS = 20
CONTEXT = 128


def build_model(init_seed: int, precision: str = "bf16") -> tuple[MoETransformer, dict[str, Tensor]]:
    """The model, and what the optimizer updates for each of its parameters, by the parameter's name: an fp32
    master of a bf16 parameter, or the parameter.
    """
    torch.manual_seed(init_seed)
    random.seed(init_seed)
    np.random.seed(init_seed)
    model = MoETransformer(MoEConfig())
    if precision == "fp32":
        return model, dict(model.named_parameters())
    masters = {name: param.detach().clone() for name, param in model.named_parameters()}
    return model.bfloat16(), masters


def gradients_to_masters(model: nn.Module, masters: Mapping[str, Tensor]) -> None:
    """Give every master the fp32 gradient of its bf16 parameter; none where there is none."""
    for name, param in model.named_parameters():
        masters[name].grad = None if param.grad is None else param.grad.float()


@torch.no_grad()
def masters_to_model(model: nn.Module, masters: Mapping[str, Tensor]) -> None:
    """Round every master into its bf16 parameter."""
    for name, param in model.named_parameters():
        param.copy_(masters[name])


def warmup_cosine(total_steps: int) -> Any:
    def factor(step: int) -> float:
        if step < WARMUP_STEPS:
            return (step + 1) / WARMUP_STEPS
        progress = (step - WARMUP_STEPS) / max(1, total_steps - WARMUP_STEPS)
        return 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, progress)))

    return factor


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train the example model on the Python library.")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--init-seed", type=int, default=0, help="seed of the weights and dropout")
    parser.add_argument("--batch-size", type=int, default=12)
    parser.add_argument("--precision", choices=list(PRECISIONS), default=native_precision())
    parser.add_argument("--threads", type=int, default=0, help="torch threads; 0: torch's default")
    parser.add_argument("--job", default="demo")
    parser.add_argument("--run", default="r1")
    parser.add_argument("--daemon", default="auto", help="auto, none, or an endpoint")
    parser.add_argument("--window", type=int, help="snapshots per window; default: measured")
    parser.add_argument(
        "--policy", default="sliding", help="sliding, aligned, dense, partial or selected (docs/policies.md)"
    )
    parser.add_argument("--every", type=int, default=1, help="iterations between two snapshots")
    parser.add_argument(
        "--experts", type=int, help="of each layer in a partial snapshot, however many tokens a failure loses"
    )
    parser.add_argument(
        "--validate", type=int, default=0, metavar="N", help="batches of other text to try at the end"
    )
    parser.add_argument("--ddp", action="store_true", help="data parallel, under torchrun")
    parser.add_argument(
        "--in-process", action="store_true", help="with --ddp: stay when another rank has failed"
    )
    parser.add_argument(
        "--period-ms", type=float, default=0.0, help="a step takes at least so long, as on a device"
    )
    parser.add_argument("--stats-every", type=int, default=0, metavar="N", help="log counters every N steps")
    parser.add_argument("--log", type=Path, help="append one JSON line per event to this file")
    parser.add_argument("--final", type=Path, help="write the whole final state to this file")
    return parser.parse_args()


class TrainingLog:
    """Appends one JSON line per event; a line is whole in the file as soon as `write` returns.

    A SIGKILL may tear the last line: the next process ends it first, and readers skip it.
    """

    def __init__(self, path: Path | None, **always: object) -> None:
        self._fd: int | None = None
        self._always = always
        if path is None:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        torn = path.exists() and not path.read_bytes().endswith(b"\n")
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        if torn:
            os.write(self._fd, b"\n")

    def write(self, event: str, **fields: object) -> None:
        if self._fd is not None:
            record = {
                "event": event,
                "pid": os.getpid(),
                "time_s": time.time(),
                **self._always,
                **fields,
            }
            os.write(self._fd, (json.dumps(record) + "\n").encode())

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def train(args: argparse.Namespace, log: TrainingLog) -> dict[str, Tensor]:
    """Run the loop to its end and return the complete final state."""
    rank = dist.get_rank() if args.ddp else 0
    model, masters = build_model(args.init_seed, args.precision)
    net: nn.Module = distribute(model, args.init_seed) if args.ddp else model

    def connect() -> None:
        """What this script does before its Checkpointer to meet the other ranks, for a rank that stays."""
        nonlocal net
        meet(args)
        net = distribute(model, args.init_seed)

    optimizer = torch.optim.AdamW(list(masters.values()), lr=2e-3, weight_decay=0.05)
    sched = torch.optim.lr_scheduler.LambdaLR(optimizer, warmup_cosine(args.steps))
    loader = ByteLoader(load_corpus(), batch_size=args.batch_size, context=CONTEXT, seed=7 + rank)
    partial = None
    if args.experts is not None:
        partial = PartialOptions(experts=args.experts, lost_tokens_limit=None)

    ckpt = Checkpointer(
        model,
        optimizer,
        state={"sched": sched, "loader": loader},
        run=RunOptions(job=args.job, name=args.run),
        daemon=None if args.daemon == "none" else args.daemon,
        snapshots=SnapshotOptions(policy=args.policy, window=args.window, every=args.every, partial=partial),
        layout=LayoutOptions(masters=masters if args.precision == "bf16" else None),
        recovery=RecoveryOptions(in_process=connect if args.in_process else None),
    )
    lost = ckpt.lost_updates
    log.write(
        "attached",
        init_seed=args.init_seed,
        lost_tokens=0 if lost is None else sum(lost.tokens.values()),
        plt=0.0 if lost is None else lost.cumulative_plt,
    )
    phases: dict[str, float] = {}
    for step in ckpt.steps(args.steps):
        with ckpt.restartable():
            ends_s = time.monotonic() + args.period_ms / 1e3
            inputs, targets = next(loader)
            loss = net(inputs, targets)
            loss.backward()
            gradients_to_masters(model, masters)
            norm = clip_grad_norm_(masters.values(), 1.0)
            optimizer.step()
            masters_to_model(model, masters)
            sched.step()
            model.zero_grad()
            if args.period_ms:
                time.sleep(max(0.0, ends_s - time.monotonic()))
            log.write("step", step=step, loss=loss.item(), norm=float(norm), replaying=bool(ckpt.replaying))
            if args.stats_every and step % args.stats_every == 0:
                log.write("stats", stats=ckpt.stats())
            if phases != (phases := phase_counters(ckpt)):
                log.write("back", phases=phases)
    if args.validate:
        log.write("validated", loss=validation_loss(model, args.validate, args.batch_size))
    log.write("finished", resumed_from=ckpt.resumed_from, stats=ckpt.stats())
    state = final_state(model, masters, optimizer, {"sched": sched, "loader": loader})
    ckpt.close()
    return state


def validation_loss(model: MoETransformer, batches: int, batch_size: int) -> float:
    """The mean loss on text that is not trained on; changes nothing that training depends on."""
    loader = ByteLoader(load_held_out(), batch_size=batch_size, context=CONTEXT, seed=11)
    model.eval()
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(11)  # the gates' noise
        losses = [float(model(*next(loader))) for _ in range(batches)]
    model.train()
    return sum(losses) / len(losses)


def phase_counters(ckpt: Checkpointer) -> dict[str, float]:
    """The seconds that each phase of this start took; empty until its first new iteration is done."""
    return {name: value for name, value in ckpt.stats().items() if name.startswith("phase_")}


def distribute(model: nn.Module, init_seed: int) -> nn.Module:
    """The model, to be called in its place: gradients are averaged over the ranks; dropout differs
    between them.

    Which experts get no token differs too, hence `find_unused_parameters`. It also keeps DDP from
    regrouping gradients after its first iteration, which would add them up in another order after a
    restart than before it.
    """
    net = DistributedDataParallel(model, find_unused_parameters=True)
    torch.manual_seed(1000 * init_seed + dist.get_rank())
    return net


def of_this_rank(args: argparse.Namespace) -> dict[str, object]:
    """Join the other ranks, and turn names of files into this rank's own; what every line of the
    log shall say.

    A rank that has a log already has lived before, perhaps elsewhere: this life is initialised with
    another seed, so that nothing right can come from there.
    """
    rank = int(os.environ["RANK"])
    for option in ("log", "final"):
        path: Path | None = getattr(args, option)
        if path is not None:
            setattr(args, option, path.with_name(f"{path.stem}-r{rank}{path.suffix}"))
    if args.log is not None and args.log.exists():
        args.init_seed += args.log.read_bytes().count(b'"event": "attached"')
    meet(args)
    return {"rank": rank, "node": os.environ.get("CKPTD_NODE_ID", "")}


def meet(args: argparse.Namespace) -> None:
    """Join the other ranks, and agree on the seed, also where one of them died before it had written that
    it was here.
    """
    dist.init_process_group("gloo")
    seeds: list[int | None] = [None] * dist.get_world_size()
    dist.all_gather_object(seeds, args.init_seed)
    args.init_seed = max(seed for seed in seeds if seed is not None)


def final_state(
    model: nn.Module,
    masters: Mapping[str, Tensor],
    optimizer: torch.optim.Optimizer,
    stateful: Mapping[str, Any],
) -> dict[str, Tensor]:
    """Everything a further step would depend on, as one flat mapping from name to tensor."""
    out = {f"model/{name}": value.detach() for name, value in model.state_dict().items()}
    out |= {f"master/{name}": value.detach() for name, value in masters.items()}
    for name, master in masters.items():
        for key, value in optimizer.state[master].items():
            out[f"optim/{key}/{name}"] = torch.as_tensor(value)
    for index, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            if isinstance(value, int | float):
                out[f"optim_group/{index}/{key}"] = torch.tensor(value, dtype=torch.float64)
    for name, holder in stateful.items():
        for key, value in holder.state_dict().items():
            if isinstance(value, int | float):
                out[f"state/{name}/{key}"] = torch.tensor(value, dtype=torch.float64)
    out["rng/torch"] = torch.get_rng_state()
    out["rng/python"] = torch.tensor(random.getstate()[1])
    numpy_state = np.random.get_state(legacy=False)
    out["rng/numpy"] = torch.from_numpy(numpy_state["state"]["key"].astype(np.int64))
    out["rng/numpy_position"] = torch.tensor(numpy_state["state"]["pos"])
    return out


def digest(state: Mapping[str, Tensor]) -> str:
    """xxh3_128 over names, dtypes, shapes and bytes, in the order of names."""
    hasher = xxhash.xxh3_128()
    for name in sorted(state):
        tensor = state[name].contiguous()
        hasher.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        hasher.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return hasher.hexdigest()


def main() -> None:
    args = parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)  # the number of threads changes the bits of a sum
    if args.ddp:
        always = of_this_rank(args)
    else:
        args.init_seed += int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))  # grows under a host
        always = {}
    log = TrainingLog(args.log, **always)
    state = train(args, log)
    if args.final is not None:
        args.final.parent.mkdir(parents=True, exist_ok=True)
        torch.save(state, args.final)
    print(f"final state: {len(state)} tensors, digest {digest(state)}")
    log.close()
    if args.ddp:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
