"""A small real training job, run as a process by the end-to-end tests and killed by them.

``python tests/e2e/job.py <case> --out FILE --total N [--kill-at STEP] [--seed S] [--daemon
ENDPOINT|none] [--set key=value]`` trains the model of ``<case>``, kills itself abruptly (SIGKILL)
inside step ``--kill-at`` if asked, and otherwise writes every parameter, buffer, optimizer tensor
and random state to ``--out``.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import itertools
import json
import os
import random
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.e2e.cases import Data, Job, find_case
from tests.e2e.patience import (
    let_copies_come,
    let_memory_come,
    let_snapshot_come,
    let_them_come,
    let_what_is_beside_come,
)

_MEASURED = 4  # the first steps, from which the window follows
_LINGER_S = 120.0  # until somebody ends it
_TOLD_S = 1.0  # until the daemon has heard of a change, from all ranks


def final_state(job: Job) -> dict[str, Any]:
    """Everything that must be identical to the bit."""
    from ckptd.client.optimizers.value_trees import flat_state
    from ckptd.client.rng_state import capture_rng

    state: dict[str, Any] = {f"param/{n}": _plain(p) for n, p in job.model.named_parameters()}
    state.update({f"buffer/{n}": _plain(b) for n, b in job.model.named_buffers()})
    for oi, optimizer in enumerate(job.optimizers):
        keeper = getattr(optimizer, "optim", optimizer)  # ZeroRedundancyOptimizer's own part
        for gi, group in enumerate(optimizer.param_groups):
            for pi, param in enumerate(group["params"]):
                state[f"held/{oi}.{gi}.{pi}"] = _plain(param)
                of_param = keeper.state.get(param, {})
                state[f"kinds/{oi}.{gi}.{pi}"] = {k: type(v).__name__ for k, v in of_param.items()}
                for key, value in flat_state(of_param).items():
                    state[f"optim/{oi}.{gi}.{pi}.{key}"] = _plain(value)
            state[f"group/{oi}.{gi}"] = {k: v for k, v in group.items() if k != "params"}
    state["rng"] = capture_rng()
    state["stateful"] = {n: s.state_dict() for n, s in job.state.items()}
    return state


def _plain(value: Any) -> Any:
    """A copy that needs no process group to be read: of a DTensor, the local shard and how it is placed."""
    if hasattr(value, "to_local"):
        placed = f"{value.placements} of {tuple(value.shape)} over {value.device_mesh}"
        return {"shard": value.to_local().detach().clone(), "placed": placed}
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def replace_text(path: Path, text: str) -> None:
    """Write a file that a reader sees whole or not at all."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text)
    temporary.rename(path)


def make_job(case: str, seed: int, store: Path | None) -> Job:
    """The job of this process; with ``store``, of this rank of torchrun's environment.

    Cases that know nothing of ranks are trained with DDP then, each rank on data of its own.
    """
    if store is None:
        return find_case(case)(seed)
    from torch import distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    # Several ranks share one device here, which NCCL refuses.
    backend = "nccl" if Data.device == "cuda" and world_size == 1 else "gloo"
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=world_size)
    job = find_case(case)(seed)
    if "/" not in case:
        job.model = DistributedDataParallel(job.model, find_unused_parameters=True)
        job.state["data"].position = 10_000 * rank
    return job


@contextlib.contextmanager
def odd_step(job: Job, odd: str, step: int) -> Iterator[None]:
    """In one step the optimizers update nothing and keep their gradients, or update twice."""
    at, _, what = odd.partition(":")
    if at != str(step):
        yield
        return
    # Nothing of the patch is left behind: what an optimizer has as an attribute of its own is
    # captured and compared.
    plain = [(optimizer, optimizer.step, dict(vars(optimizer))) for optimizer in job.optimizers]
    for optimizer, update, _ in plain:
        if what == "skip":
            optimizer.step = optimizer.zero_grad = lambda: None
        else:
            optimizer.step = lambda update=update: (update(), update())
    yield
    for optimizer, _, own in plain:
        for name in ("step", "zero_grad"):
            if name in own:
                setattr(optimizer, name, own[name])
            else:
                vars(optimizer).pop(name, None)


def flip_bit(job: Job, what: str) -> None:
    """Flip a bit of the mantissa in the first element of ``PARAM`` or ``KEY/PARAM`` (optimizer state); with
    ``params/SEED`` a bit that is drawn of a parameter, with ``states/SEED`` of an optimizer's state, too.
    """
    kind, _, seed = what.partition("/")
    if kind in ("params", "states"):
        _flip_drawn(random.Random(seed), "state", _states(job, moments=kind == "states"))
        return
    *key, name = what.split("/")
    param = next(p for n, p in job.model.named_parameters() if n.endswith(name))
    state = next(o.state[param] for o in job.optimizers if param in o.state)
    _flip(state[key[0]] if key else param)


def _flip(tensor: torch.Tensor) -> None:
    tensor.data.view(-1)[:1].view(torch.int32).bitwise_xor_(1 << 18)


def _updated(job: Job) -> dict[str, tuple[torch.Tensor, Mapping[str, Any]]]:
    """What optimizers update, and what they keep of it."""
    names = {param: name for name, param in job.model.named_parameters()}
    held = [
        (p, o.state.get(p, {})) for o in job.optimizers for group in o.param_groups for p in group["params"]
    ]
    return {names.get(param, f"param {i}"): (param, kept) for i, (param, kept) in enumerate(held)}


def _states(job: Job, *, moments: bool) -> dict[str, torch.Tensor]:
    """Parameters that an optimizer updates, with or without what it keeps of them."""
    found = {}
    for name, (param, kept) in _updated(job).items():
        found[name] = param.data
        if moments:
            found |= {f"{key}/{name}": value for key, value in kept.items() if torch.is_tensor(value)}
    return found


def _gradients(job: Job) -> dict[str, torch.Tensor]:
    return {name: param.grad for name, (param, _) in _updated(job).items() if param.grad is not None}


def _flip_drawn(rng: random.Random, kind: str, tensors: Mapping[str, torch.Tensor]) -> None:
    """Flip one bit of one element; of a float so that it stays finite and does not grow beyond all others."""
    name = rng.choice(sorted(name for name, tensor in tensors.items() if tensor.numel()))
    tensor = tensors[name]
    index, size = rng.randrange(tensor.numel()), tensor.element_size()
    at = tuple(int(i) for i in np.unravel_index(index, tensor.shape)) if tensor.dim() else ()
    before = tensor[at].item()
    raw = tensor[at].reshape(1).clone().view(torch.uint8)
    for bit in rng.sample(range(8 * size), 8 * size):
        changed = raw.clone()
        changed[bit // 8] ^= 1 << bit % 8
        value = changed.view(tensor.dtype)
        if tensor.is_floating_point() and not abs(value.item()) <= 10 * abs(before) + 1e-3:
            continue
        if tensor.dim() or value.item() >= 0:  # a count of steps stays one
            with torch.no_grad():
                tensor[at] = value[0]
            print(f"flipped bit {bit} of {kind} {name}{list(at)}: {before} is {value.item()}", flush=True)  # noqa: T201
            return
    raise ValueError(f"no bit of {name} can be flipped")


@contextlib.contextmanager
def flipped_in(job: Job, where: str, step: int) -> Iterator[None]:
    """In one step a bit flips in a gradient that is about to be used (``grad/PARAM``; one that is drawn:
    ``grads/SEED``), or in what a module returns (``output/MODULE``).
    """
    at, _, what = where.partition(":")
    if at != str(step):
        yield
        return
    kind, _, name = what.partition("/")
    if kind == "grads":
        draw = random.Random(name)
        hook = job.optimizers[0].register_step_pre_hook(
            lambda *_: _flip_drawn(draw, "gradient", _gradients(job))
        )
    elif kind == "grad":
        param = next(p for n, p in job.model.named_parameters() if n.endswith(name))
        optimizer = next(o for o in job.optimizers if param in o.state)

        def flip(*_: Any) -> None:
            assert param.grad is not None
            _flip(param.grad)

        hook = optimizer.register_step_pre_hook(flip)
    else:
        module = next(m for n, m in job.model.named_modules() if n.endswith(name))
        hook = module.register_forward_hook(lambda _module, _inputs, output: _flip(output))
    yield
    hook.remove()


def slow_down_copies(ms_per_mib: float) -> None:
    """As if the host's memory were slow: larger snapshots take longer."""
    from ckptd.cuda import engine

    plain = engine._to_host

    def slow(item: engine.CopyItem, memory: engine.HostMemory, base: int) -> None:
        plain(item, memory, base)
        time.sleep(ms_per_mib * item.nbytes / 2**20 / 1e3)

    engine._to_host = slow


def set_wakeup() -> None:
    """Be told of signals by a descriptor, in place of whoever is told of them now."""
    writer = os.pipe2(os.O_NONBLOCK)[1]
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)


def tear_snapshot(iteration: int) -> None:
    """One anchored parameter of that snapshot is recorded with a bit flipped, before its digest is made."""
    from ckptd.client.capture import slot_writer

    plain = slot_writer.write_image

    def torn(segment: Any, index: int, plan: Any, header: Any, packed: bytes) -> None:
        if header.iteration == iteration:
            known = [(s, o) for s, o in zip(plan.sources, plan.offsets, strict=False) if s]
            anchored = {s.name for s, _ in known if s.kind == "optim"}
            victims = [o for s, o in known if s.kind == "param" and s.name in anchored]
            for victim in victims[:1]:  # ranks that share operators may have none in it
                segment.slot(index)[victim + 2] ^= 0x40  # the mantissa of a float32
        plain(segment, index, plan, header, packed)

    slot_writer.write_image = torn


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("case", help="a name in cases.py or hf_cases.py, or family/name of parallel/")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--total", type=int, default=12)
    parser.add_argument("--kill-at", type=int, default=-1)
    parser.add_argument(
        "--kill-point", default="step", choices=["top", "inside", "backward", "step", "after"]
    )
    parser.add_argument("--kill-begun", type=int, default=0, help="die in the n-th step of this life")
    parser.add_argument("--kill-delay-ms", type=float, default=0.0, help="live on so long before")
    parser.add_argument(
        "--kill-sealed", action="store_true", help="live on until that step's snapshot is sealed"
    )
    parser.add_argument(
        "--patient-until", type=int, default=-1, help="as before --kill-at: let memory come first"
    )
    parser.add_argument("--linger-at", type=int, default=-1, help="sleep at the top of that step")
    parser.add_argument("--trace", type=Path, help="add a line for each step begun and ended")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--daemon", default="none")
    parser.add_argument("--run", default="r")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--step-ms", type=float, default=0.0)
    parser.add_argument("--progress", type=Path)
    parser.add_argument("--states", type=Path, help="keep the state at the top of each step in this folder")
    parser.add_argument("--hold", type=Path, help="the last step waits until this file is gone")
    parser.add_argument("--stats", type=Path, help="keep the Checkpointer's counters in this file")
    parser.add_argument("--nan-at", type=int, default=-1, help="make a weight NaN after that step")
    parser.add_argument("--flip-at", default="", help="STEP:[KEY/]PARAM: flip a bit of it after that step")
    parser.add_argument(
        "--flip-in", default="", help="STEP:grad/PARAM or STEP:output/MODULE: within that step"
    )
    parser.add_argument("--store", type=Path, help="one of several ranks, meeting over gloo at this file")
    parser.add_argument("--leave-out", help="restore without this (see parallel/sabotage.py)")
    parser.add_argument("--received", type=Path, help="write what pipeline stages receive to this folder")
    parser.add_argument("--break-at", type=int, default=-1, help="end the chain in that step")
    parser.add_argument(
        "--slow-copies", type=float, default=0.0, help="each copied MiB takes so many ms longer"
    )
    parser.add_argument(
        "--kill-after-new-window",
        type=int,
        default=0,
        help="die so many steps after the window has changed",
    )
    parser.add_argument(
        "--kill-after-wider-window",
        type=int,
        default=0,
        help="die so many steps after the window has become wider",
    )
    parser.add_argument(
        "--kill-after-new-interval",
        type=int,
        default=0,
        help="die so many steps after the interval of snapshots has changed",
    )
    parser.add_argument(
        "--kill-after-new-policy",
        type=int,
        default=0,
        help="die so many steps after experts are selected by tokens at risk",
    )
    parser.add_argument("--until-window", type=int, default=0, help="leave the loop at this window")
    parser.add_argument("--odd-step", default="", help="STEP:skip or STEP:twice: what the optimizers do then")
    parser.add_argument("--tear-at", type=int, default=-1, help="record something wrong in that snapshot")
    parser.add_argument("--hidden", help="a state that no snapshot holds (see hidden.py)")
    parser.add_argument("--verify-at", type=int, default=-1)
    parser.add_argument("--split", type=int, default=0)
    parser.add_argument("--verify", action="store_true")
    parser.add_argument(
        "--wakeup", action="store_true", help="have wakeup descriptors for signals, as asyncio"
    )
    parser.add_argument("--set", action="append", default=[], help="Checkpointer argument as key=json")
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    torch.use_deterministic_algorithms(True)
    if args.device == "cuda":
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # cuBLAS asks for it where bits must repeat
        Data.device = args.device
    job = make_job(args.case, args.seed, args.store)
    if args.hidden:
        from tests.e2e.hidden import HIDDEN

        HIDDEN[args.hidden](job)
    if args.leave_out:
        from tests.e2e.parallel.sabotage import LEAVE_OUT

        LEAVE_OUT[args.leave_out]()
    random.seed(99)
    np.random.seed(99)
    options = {k: json.loads(v) for k, v in (pair.split("=", 1) for pair in args.set)}
    options = {"window": 4, "job": "e2e", "run": args.run, **job.options, **options}
    if "partial" in options:
        from ckptd.client import PartialOptions

        options["partial"] = PartialOptions(**options["partial"])
    if args.daemon == "none":
        options["daemon"] = None
    else:
        options["daemon"] = args.daemon
    from ckptd.client import Checkpointer
    from tests.option_groups import grouped

    if args.tear_at >= 0:
        tear_snapshot(args.tear_at)
    if args.slow_copies:
        slow_down_copies(args.slow_copies)
    if args.wakeup:
        set_wakeup()
    ckpt = Checkpointer(job.model, job.optimizers, job.state, **grouped(**options))
    job.ckpt = ckpt
    job.extra["received"] = args.received
    job.start(ckpt)

    def maybe_die(step: int, point: str) -> None:
        if step == args.kill_at and point == args.kill_point:
            trace(f"dies {step}")
            if args.kill_sealed:
                let_snapshot_come(ckpt)
            time.sleep(args.kill_delay_ms / 1e3)
            os.kill(os.getpid(), signal.SIGKILL)

    def trace(what: str) -> None:
        if args.trace is not None:
            with args.trace.open("a") as out:
                out.write(f"{what}\n")

    replayed_with_frozen = 0
    first_window = steps_since_change = 0
    # A loop that is left and entered again goes on where it was.
    for step in (
        itertools.chain(ckpt.steps(args.split), ckpt.steps(args.total))
        if args.split
        else ckpt.steps(args.total)
    ):
        if args.wakeup:  # as a loop of events that is begun after ckptd has its own
            args.wakeup = False
            set_wakeup()
        if args.kill_begun:
            args.kill_at, args.kill_begun = step + args.kill_begun - 1, 0
        trace(f"begin {step} {int(ckpt.replaying)}")
        if args.states is not None:
            torch.save(final_state(job), args.states / "new")
            (args.states / "new").rename(args.states / f"{step}.pt")  # whole, whenever this rank is killed
        maybe_die(step, "top")
        replayed_with_frozen += ckpt.replaying
        if step == args.break_at:
            assert ckpt._loop.recorder is not None
            ckpt._loop.recorder.break_chain()  # as when a snapshot found no slot
        if args.progress is not None:
            replace_text(args.progress, f"{step} {int(ckpt.replaying)}")
        if args.stats is not None:
            replace_text(args.stats, json.dumps({"step": step, **ckpt.stats()}))
        if args.until_window and int(ckpt.stats()["window"]) >= args.until_window:
            break
        last_change = (
            args.kill_after_new_window or args.kill_after_wider_window or args.kill_after_new_interval
        )
        if last_change:
            window = int(ckpt.stats()["every" if args.kill_after_new_interval else "window"])
            first_window = first_window or window
            if args.kill_after_wider_window:
                first_window = min(first_window, window)
            steps_since_change += window != first_window
            if steps_since_change > last_change:
                time.sleep(_TOLD_S)
                os.kill(os.getpid(), signal.SIGKILL)
        if args.kill_after_new_policy:
            steps_since_change += ckpt.stats()["selectable_experts"] > 0
            if steps_since_change > args.kill_after_new_policy:
                os.kill(os.getpid(), signal.SIGKILL)
        if step == args.linger_at:
            time.sleep(_LINGER_S)
        if args.step_ms:
            time.sleep(args.step_ms / 1e3)
        told: dict[str, float] = {}
        while args.hold is not None and step == args.total - 1 and args.hold.exists():
            time.sleep(0.01)
            if args.stats is not None and told != ckpt.scalars():
                told = ckpt.scalars()
                replace_text(args.stats, json.dumps({"step": step, **ckpt.stats(), **told}))
        if step < max(args.kill_at, args.patient_until) and ckpt.resumed_from is None:
            let_memory_come(ckpt)
            let_what_is_beside_come(ckpt)
            if step > _MEASURED:
                let_them_come(ckpt)
        if args.kill_sealed and step == args.kill_at:
            let_copies_come(ckpt)
        with odd_step(job, args.odd_step, step), flipped_in(job, args.flip_in, step):
            job.step(step, functools.partial(maybe_die, step))
        if step == args.nan_at:
            with torch.no_grad():
                next(job.model.parameters()).view(-1)[0] = float("nan")
        if args.flip_at.startswith(f"{step}:"):
            flip_bit(job, args.flip_at.partition(":")[2])
        if step == args.verify_at:
            midway = ckpt.verify(lambda step: job.step(step, lambda point: None))
            assert midway.identical, midway
        maybe_die(step, "after")
        trace(f"end {step}")
    report: dict[str, Any] = {
        "resumed_from": ckpt.resumed_from,
        "replayed_with_frozen": replayed_with_frozen,
        "describe": ckpt.describe(),
        **ckpt.stats(),
        **ckpt.scalars(),
    }
    if (lost := ckpt.lost_updates) is not None:
        report["lost"] = dataclasses.asdict(lost)
    if args.verify:
        certificate = ckpt.verify(lambda step: job.step(step, lambda point: None))
        report["identical"] = certificate.identical
        report["certificate"] = str(certificate)
    torch.save(final_state(job), args.out)
    ckpt.close()
    args.out.with_suffix(".json").write_text(json.dumps(report))


if __name__ == "__main__":
    main()
