"""`make demo-pipeline`: lose workers of a pipeline; only stages that lost their state work again.

Four stages of two replicas train as eight processes under torchrun. At seeded random moments
processes are SIGKILLed: one worker, both workers of one stage, and all workers of two stages next
to each other. The same losses strike twice: once the survivors park their state and recovery is
localized, once they do not and all ranks replay. Every life is initialised from another seed. The
demo fails unless every tensor of all ranks and every loss is identical to those of a run without
ckptd.

Both runs with ckptd have hosts (`torchrun … -m ckptd.host`), which fork the next trainers from processes with
everything imported as soon as one has died. With `--plain`, torchrun starts new interpreters.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from ckptd.core.recovery.recovery_phases import RecoveryPhase, describe_phases, phases_in_metrics
from ckptd.demo.lab import (
    MAX_RESTARTS,
    REPOSITORY,
    SHARED_CORES,
    DemoDaemon,
    Event,
    daemon_folders,
    read_events,
)
from ckptd.demo.report import (
    differing_tensors,
    losses_by_step,
    phase_table,
    step_time_ms,
    table,
)
from examples.demo_progress import Progress, failed, seed_of

__all__ = ["Loss", "PipelineRun", "Return", "main", "plan_losses", "return_of"]

# Of torchrun: with the store that it shares over restarts, gloo goes to the addresses of the
# processes that were ended.
ENVIRONMENT = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
RUN_TIMEOUT_S = 600.0
POLL_S = 0.02
TAIL_BYTES = 4000
BASE_INIT_SEED = 1234


class RunFailed(RuntimeError):
    """The job ended, or made no progress, when it should have run."""


@dataclass(frozen=True, slots=True)
class PlannedLoss:
    """Kill all workers of these stages, of all replicas or of one, `delay_s` after iteration `step`
    was logged.
    """

    step: int
    delay_s: float
    stages: tuple[int, ...]
    replicas: tuple[int, ...]

    def ranks(self, num_stages: int) -> list[int]:
        return [replica * num_stages + stage for replica in self.replicas for stage in self.stages]


@dataclass(frozen=True, slots=True)
class Loss:
    """Workers that were killed: when, and the last iteration that each rank had completed."""

    time_s: float
    ranks: tuple[int, ...]
    last_steps: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Return:
    """How a job came back from a loss: per rank the iterations done again, seconds until all ranks did new
    ones, and the phases of the rank that did so last.
    """

    again: tuple[int, ...]
    back_s: float
    last: int = 0
    phases: Mapping[RecoveryPhase, float] = field(default_factory=dict)


def plan_losses(
    rng: random.Random, *, steps: int, window: int, num_stages: int, num_replicas: int
) -> list[PlannedLoss]:
    """One worker; one whole stage; two whole stages next to each other."""
    everywhere = tuple(range(num_replicas))
    first = rng.randrange(num_stages - 1)
    victims = [
        ((rng.randrange(num_stages),), (rng.randrange(num_replicas),)),
        ((rng.randrange(num_stages),), everywhere),
        ((first, first + 1), everywhere),
    ]
    begin = 4 * window + 4  # before the first windows are complete there is nothing to come back to
    width = (steps - begin - 2) // len(victims)
    if width < 2 * window:
        raise ValueError(f"{steps} steps are too few for {len(victims)} losses; use more --steps")
    return [
        PlannedLoss(begin + i * width + rng.randrange(width - window), rng.random() * 0.3, *victim)
        for i, victim in enumerate(victims)
    ]


class PipelineRun:
    """One run of the example pipeline under torchrun, followed by the logs of its ranks.

    Args:
        host_folder: if given, ranks have hosts, with their files in this folder.
    """

    def __init__(
        self,
        name: str,
        folder: Path,
        args: argparse.Namespace,
        *,
        daemon: str,
        options: Sequence[str] = (),
        host_folder: Path | None = None,
    ) -> None:
        self.name, self.num_ranks = name, args.stages * args.replicas
        self._folder = folder / name
        self._folder.mkdir()
        self._output = self._folder / "torchrun.log"
        self._host_folder = host_folder
        hosts = [] if host_folder is None else ["ckptd.host", "--max-restarts", MAX_RESTARTS, "-m"]
        self._command = [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", str(self.num_ranks), "--max-restarts", "6"),
            *("--monitor-interval", "0.1", "-m", "--", *hosts, "examples.moe_pipeline.train"),
            *("--stages", str(args.stages), "--steps", str(args.steps)),
            *("--window", str(args.window), "--init-seed", str(BASE_INIT_SEED)),
            *("--run", name, "--daemon", daemon, *options),
            *("--log", str(self._folder / "rank.jsonl"), "--final", str(self._folder / "rank.pt")),
        ]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        path = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
        env = {**os.environ, **SHARED_CORES, **ENVIRONMENT, "PYTHONPATH": path}
        if self._host_folder is not None:
            env["CKPTD_RUNTIME_DIR"] = str(self._host_folder)
        with self._output.open("ab") as sink:
            self._process = subprocess.Popen(
                self._command,
                cwd=REPOSITORY,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
            )

    def events(self, rank: int) -> list[Event]:
        return read_events(self._folder / f"rank-r{rank}.jsonl")

    def steps(self, rank: int) -> list[Event]:
        """The iterations that the rank has completed, in the order in which it did."""
        return [event for event in self.events(rank) if event["event"] == "step"]

    def last_step(self, rank: int) -> int:
        """The newest iteration that the rank has completed; -1 for none."""
        return max((e["step"] for e in self.steps(rank)), default=-1)

    def until(self, reached: Callable[[], bool], what: str, *, poll_s: float = POLL_S) -> None:
        """Wait for it.

        Raises:
            RunFailed: the job ended before, or took too long.
        """
        deadline = time.monotonic() + RUN_TIMEOUT_S
        while not reached():
            assert self._process is not None, "until() before start()"
            if self._process.poll() is not None and not reached():
                raise RunFailed(f"the {self.name} run ended before {what}; it said:\n{self._tail()}")
            if time.monotonic() > deadline:
                raise RunFailed(f"the {self.name} run did not reach {what}; it said:\n{self._tail()}")
            time.sleep(poll_s)

    def kill(self, ranks: Sequence[int]) -> Loss:
        """SIGKILL the present processes of these ranks."""
        begun = time.time()
        for rank in ranks:
            attached = [e for e in self.events(rank) if e["event"] == "attached"]
            os.kill(attached[-1]["pid"], signal.SIGKILL)
        last_steps = tuple(self.last_step(rank) for rank in range(self.num_ranks))
        return Loss(begun, tuple(ranks), last_steps)

    def wait(self) -> None:
        """Wait until the job has ended by itself, successfully.

        Raises:
            RunFailed: it failed, or took too long.
        """
        assert self._process is not None, "wait() before start()"
        try:
            code = self._process.wait(timeout=RUN_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise RunFailed(f"the {self.name} run hangs; it said:\n{self._tail()}") from None
        if code:
            raise RunFailed(f"the {self.name} run ended with code {code}; it said:\n{self._tail()}")

    def stop(self) -> None:
        """End it, if it still runs: torchrun ends its workers on SIGTERM."""
        if self._process is None or self._process.poll() is not None:
            return
        self._process.terminate()
        try:
            self._process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(timeout=30)

    def final(self, rank: int) -> dict[str, torch.Tensor]:
        state: dict[str, torch.Tensor] = torch.load(self._folder / f"rank-r{rank}.pt", weights_only=True)
        return state

    def _tail(self) -> str:
        return self._output.read_bytes()[-TAIL_BYTES:].decode(errors="replace").strip()


def back_at(loss: Loss, run: PipelineRun) -> list[tuple[float, float]] | None:
    """When each rank was attached again, and when it had done an iteration that none had before;
    None while one has not.
    """
    attached, before = list[float](), list(loss.last_steps)
    for rank in range(run.num_ranks):
        later = [e for e in run.events(rank) if e["time_s"] > loss.time_s]
        found = next((e["time_s"] for e in later if e["event"] == "attached"), None)
        if found is None:
            return None
        attached.append(found)
        # Survivors may have ended a step since the loss was counted.
        before += [e["step"] for e in later if e["event"] == "step" and e["time_s"] < found]
    newest, fresh = max(before), list[float]()
    for rank, since in enumerate(attached):
        steps = [e for e in run.events(rank) if e["event"] == "step" and e["time_s"] >= since]
        done = next((e["time_s"] for e in steps if e["step"] > newest), None)
        described = any(e["event"] == "back" and e["time_s"] >= since for e in run.events(rank))
        if done is None or not described:
            return None
        fresh.append(done)
    return list(zip(attached, fresh, strict=True))


def return_of(loss: Loss, run: PipelineRun) -> Return:
    """What the logs tell of the life after a loss, once all ranks are back."""
    times, again = back_at(loss, run), []
    assert times is not None, "until() has seen it"
    for rank, (last_step, (attached, fresh)) in enumerate(zip(loss.last_steps, times, strict=True)):
        steps = [e for e in run.events(rank) if e["event"] == "step"]
        again.append(sum(e["step"] <= last_step and attached <= e["time_s"] < fresh for e in steps))
    last = max(range(run.num_ranks), key=lambda rank: times[rank][1])
    attached, fresh = times[last]
    lived = [e for e in run.events(last) if e["event"] == "back" and e["time_s"] >= attached]
    phases = phases_in_metrics(lived[0]["phases"]) if lived else {}
    return Return(tuple(again), fresh - loss.time_s, last, phases)


def strike(run: PipelineRun, planned: PlannedLoss, num_stages: int, say: Callable[[str], None]) -> Loss:
    """Kill at the planned moment, and wait until every rank does new iterations again."""
    ranks = planned.ranks(num_stages)
    run.until(lambda: run.last_step(0) >= planned.step, f"iteration {planned.step}")
    time.sleep(planned.delay_s)
    loss = run.kill(ranks)
    newest = max(loss.last_steps)
    say(f"--> SIGKILL to rank{'s' * (len(ranks) > 1)} {_list(ranks)} after iteration {newest}")
    run.until(lambda: back_at(loss, run) is not None, f"all ranks beyond iteration {newest}")
    found = return_of(loss, run)
    say(f"    back in {found.back_s:.2f} s; iterations done again by rank: {_list(found.again)}")
    say(f"    rank {found.last} came last: {describe_phases(found.phases)}")
    return loss


def _list(items: Sequence[object]) -> str:
    return ", ".join(map(str, items))


def print_losses(
    plan: Sequence[PlannedLoss], runs: Sequence[tuple[PipelineRun, list[Loss]]], num_stages: int
) -> None:
    """Per loss and run: what every rank did again, and how long it took."""
    rows: list[list[object]] = []
    phases = {}
    for number, planned in enumerate(plan, start=1):
        for run, losses in runs:
            found = return_of(losses[number - 1], run)
            lost = _list(planned.ranks(num_stages))
            rows.append([number, lost, run.name, *found.again, found.back_s])
            phases[f"#{number} {run.name}"] = found.phases, found.back_s
    ranks = [f"r{rank}" for rank in range(runs[0][0].num_ranks)]
    print("\niterations done again, by rank (rank r holds stage", f"r % {num_stages}):\n")
    print(table(["#", "killed ranks", "recovery", *ranks, "back s"], rows))
    print("\nback s: from the kill until every rank had completed an iteration that none had before.")
    print(
        "\nWhere the time went for the rank that came last (docs/recovery.md has the phases):"
        f"\n\n{phase_table(phases)}"
    )
    print(
        "\nrest: from the kill until the daemon, or else the new process, was aware of anything; and from the"
        "\noptimizer's first new step to the end of that iteration, or of one that another rank had not done."
    )


def print_summary(undisturbed: PipelineRun, localized: PipelineRun, everybody: PipelineRun) -> None:
    finished = [
        next(e for e in reversed(localized.events(rank)) if e["event"] == "finished")["stats"]
        for rank in range(localized.num_ranks)
    ]
    times = [
        statistics.median(step_time_ms(run.steps(rank)) for rank in range(run.num_ranks))
        for run in (undisturbed, localized, everybody)
    ]
    print(
        f"\niteration, median     {times[0]:.0f} ms without ckptd, {times[1]:.0f} ms with it, eight processes on"
        f" {os.cpu_count()} cores"
        f"\nboundary logs         {_mib(finished, 'log_memory_bytes')} per rank"
        f"\nparked state          {_mib(finished, 'park_memory_bytes')} per rank reserved"
    )


def _mib(stats: Sequence[dict[str, float]], name: str) -> str:
    sizes = [each.get(name, 0) / 2**20 for each in stats]
    return f"{min(sizes):.2f} to {max(sizes):.2f} MiB"


def compare(expected: PipelineRun, actual: PipelineRun) -> list[str]:
    """What differs between two runs: tensors of the final states, and losses on the way."""
    problems = []
    for rank in range(expected.num_ranks):
        found = differing_tensors(expected.final(rank), actual.final(rank))
        losses, others = (losses_by_step(run.events(rank)) for run in (expected, actual))
        found += [
            f"loss of iteration {step}: {losses.get(step)!r} and {others.get(step)!r}"
            for step in sorted(losses.keys() | others.keys())
            if losses.get(step) != others.get(step)
        ]
        problems += [f"{actual.name}, rank {rank}: {line}" for line in found]
    return problems


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Lose workers of a pipeline; compare the bits.")
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--steps", type=int, default=90)
    parser.add_argument("--window", type=int, default=4, help="snapshots per window")
    parser.add_argument("--seed", type=int, default=None, help="of the losses; default: random")
    parser.add_argument("--plain", action="store_true", help="no hosts: torchrun starts new interpreters")
    return parser.parse_args(argv)


def rehearse(folder: Path, args: argparse.Namespace, hosts: Path, say: Callable[[str], None]) -> None:
    """Start the script under hosts once: they write down what it imports, and the zygotes of later hosts
    import that before their first trainers. Otherwise they do so some seconds after the first start, and
    whoever is killed meanwhile waits for it.
    """
    begun = time.monotonic()
    run = PipelineRun("rehearsal", folder, args, daemon="none", options=["--steps", "1"], host_folder=hosts)
    run.start()
    try:
        run.wait()
    finally:
        run.stop()
    say(
        f"    with hosts, which have learned in {time.monotonic() - begun:.1f} s what the script imports; their"
        " first start is slower, for everything is imported ahead"
    )


def play(args: argparse.Namespace, plan: Sequence[PlannedLoss]) -> list[str]:
    """All three runs and the report; what differs between them."""
    say = Progress().say
    with (
        tempfile.TemporaryDirectory(prefix="ckptd-pipeline-") as scratch,
        daemon_folders() as (runtime, segments),
    ):
        daemon = DemoDaemon(runtime, segments)
        daemon.start()
        folder = Path(scratch)
        hosts = None if args.plain else runtime
        undisturbed = PipelineRun("undisturbed", folder, args, daemon="none")
        localized = PipelineRun("localized", folder, args, daemon=daemon.endpoint, host_folder=hosts)
        everybody = PipelineRun(
            "global", folder, args, daemon=daemon.endpoint, options=["--no-park"], host_folder=hosts
        )
        told: list[tuple[PipelineRun, list[Loss]]] = []
        try:
            for run in (undisturbed, localized, everybody):
                losses_of_run = [] if run is undisturbed else list(plan)
                say(f"The {run.name} run{', without ckptd' * (run is undisturbed)}.")
                if run is localized and hosts is not None:
                    rehearse(folder, args, hosts, say)
                run.start()
                told.append((run, [strike(run, p, args.stages, say) for p in losses_of_run]))
                run.wait()
        finally:
            for run in (undisturbed, localized, everybody):
                run.stop()
            daemon.stop()
        print_losses(plan, told[1:], args.stages)
        print_summary(undisturbed, localized, everybody)
        return compare(undisturbed, localized) + compare(undisturbed, everybody)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    seed = seed_of(args.seed)
    plan = plan_losses(
        random.Random(seed),
        steps=args.steps,
        window=args.window,
        num_stages=args.stages,
        num_replicas=args.replicas,
    )
    print(
        f"{args.stages} stages, {args.replicas} replicas of each: a byte-level MoE transformer as a pipeline (1F1B)."
        f"\nLosses from seed {seed} (repeat them with --seed {seed}).\n"
    )
    problems = play(args, plan)
    if problems:
        return failed(problems, f"the runs differ in {len(problems)} places (seed {seed})")
    ranks = args.stages * args.replicas
    print(
        f"\nIDENTICAL: every tensor of all {ranks} ranks (weights, optimizer, schedule, data position, random"
        f"\nstates) and every loss are equal in all three runs, bit for bit."
    )
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except RunFailed as error:
        sys.exit(f"\nFAILED: {error}")
