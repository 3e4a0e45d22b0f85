"""`make demo`, `python -m ckptd.demo`: train a Mixture-of-Experts model twice, kill one run, compare.

The first run is not touched by ckptd at all. The second one is SIGKILLed at seeded random moments: the
trainer, the trainer together with the daemon, the daemon alone, and the trainer once more while it is
still recovering. Every life initialises the model from another seed, so nothing that survives can have
come from anywhere but the daemon's memory. The demo fails unless every tensor of both runs is identical.

The second run has a host (`python -m ckptd.host`), which forks the next trainer from a process with
everything imported as soon as one has died. With `--plain` there is none: each life is a new interpreter.
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ckptd.core.recovery.recovery_phases import describe_phases, phases_in_metrics
from ckptd.demo.lab import DemoDaemon, Event, ProcessDied, Trainer, daemon_folders
from ckptd.demo.model import PRECISIONS, MoEConfig, native_precision
from ckptd.demo.report import (
    Kill,
    differing_tensors,
    draw,
    losses_by_step,
    phase_table,
    recoveries,
    redone_steps,
    step_time_ms,
    table,
)
from ckptd.demo.train import build_model

RUN_TIMEOUT_S = 900.0
PROGRESS_EVERY = 20
BASE_INIT_SEED = 1234
# The first one with which forward and backward last at most so long; else the last one. The two runs do
# some 480 iterations, recoveries included, and shall take less than five minutes.
_BATCH_SIZES = (12, 6, 3)
_PASS_S = 0.45
_TRIED = 6


@dataclass(frozen=True, slots=True)
class PlannedKill:
    """Strike `delay_s` after iteration `step` was logged, or after the first replayed iteration."""

    victim: str
    step: int
    delay_s: float
    during_replay: bool = False


def plan_kills(rng: random.Random, *, steps: int, window: int, count: int) -> list[PlannedKill]:
    """`count` kills spread over the run at random moments, and one in the middle of a recovery.

    The third one also kills the daemon; one more strikes the daemon alone.
    """
    # Before the first full window was sealed there is nothing to come back to.
    first, last = 3 * window + 5, int(steps * 0.93)
    width = (last - first) / (count + 1)
    if width < 2 * window + 4:
        raise ValueError(f"{steps} steps are too few for {count} kills; use more --steps")
    plan = []
    for index in range(count + 1):
        step = first + int(index * width + rng.random() * (width - window - 4))
        delay_s = rng.random() * 0.25
        daemon_alone = index == count // 2 + 1
        victim = "daemon" if daemon_alone else "trainer + daemon" if index == 2 else "trainer"
        plan.append(PlannedKill(victim, step, delay_s))
    plan.append(PlannedKill("trainer", plan[-1].step, rng.random() * 0.2, during_replay=True))
    return plan


def choose_batch_size(pass_s: float) -> tuple[int, float]:
    """The batch size with which a slow machine is done in minutes, too, and the seconds of its pass.

    Args:
        pass_s: seconds of forward and backward with a batch of six.
    """
    fits = (size for size in _BATCH_SIZES if pass_s * size / _TRIED <= _PASS_S)
    batch_size = next(fits, _BATCH_SIZES[-1])
    return batch_size, pass_s * batch_size / _TRIED


def _measure_pass_s(precision: str) -> float:
    """The quickest of some times forward and backward, the kernels made, with as many threads as now."""
    model, _ = build_model(0, precision)
    config = MoEConfig()
    tokens_BT = torch.randint(config.vocab_size, (_TRIED, config.context))
    each_s: list[float] = []
    while len(each_s) < 2 or (len(each_s) < 5 and sum(each_s) < 2):
        begun = time.perf_counter()
        model(tokens_BT, tokens_BT).backward()
        each_s.append(time.perf_counter() - begun)
    return min(each_s)


def _describe(precision: str) -> str:
    """The precision, and why it is not the usual one."""
    forced = precision == "fp32" and native_precision() == "fp32"
    return PRECISIONS[precision] + (", since this CPU does not multiply bf16" if forced else "")


class ProgressLines:
    """Live lines for a reader who has never seen the program."""

    def __init__(self) -> None:
        self._begun = time.monotonic()
        self._last: tuple[int, float] | None = None  # the iteration that was told last, and when it ended
        self._struck: Kill | None = None  # the last kill of the trainer, until it is back

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self._begun:6.1f} s] {text}", flush=True)

    def strike(self, kill: Kill) -> None:
        self.say(f"--> SIGKILL to the {kill.victim} after iteration {kill.last_step} {kill.note}".rstrip())
        if kill.hit_trainer:
            self._struck = kill

    def follow(self, event: Event, total: int) -> None:
        """Tell what the trainer has logged."""
        if event["event"] == "attached":
            self._tell_of_life(event)
        elif event["event"] == "back" and self._struck is not None:
            self.say(f"    back {event['time_s'] - self._struck.time_s:.2f} s after the kill; of these:")
            self.say(f"    {describe_phases(phases_in_metrics(event['phases']))}")
            self._struck = None
        elif event["event"] == "step" and event["replaying"]:
            self.say(f"    replaying iteration {event['step']}   loss {event['loss']:.4f}")
        elif event["event"] == "step" and (event["step"] + 1) % PROGRESS_EVERY == 0:
            left = self._left(event, total)
            self.say(f"    iteration {event['step'] + 1:4d} of {total}   loss {event['loss']:.4f}   {left}")

    def _left(self, event: Event, total: int) -> str:
        """How long the rest of the run takes, as quickly as the last iterations."""
        before, self._last = self._last, (event["step"], float(event["time_s"]))
        if before is None or before[0] >= event["step"]:
            return ""
        each_s = (self._last[1] - before[1]) / (event["step"] - before[0])
        left_s = each_s * (total - 1 - event["step"])
        return f"about {left_s:.0f} s left" if left_s >= 1 else ""

    def _tell_of_life(self, event: Event) -> None:
        text = f"    process {event['pid']}, initialised from seed {event['init_seed']}"
        if self._struck is not None:
            text += f", is attached {event['time_s'] - self._struck.time_s:.2f} s after the kill"
        self.say(text)


def run_to_end(trainer: Trainer, progress: ProgressLines, steps: int) -> None:
    for event in trainer.follow(lambda e: e["event"] == "finished", timeout_s=RUN_TIMEOUT_S):
        progress.follow(event, steps)
    trainer.wait(timeout_s=60)


def run_undisturbed(folder: Path, common: list[str], progress: ProgressLines, steps: int) -> Trainer:
    progress.say("Run 1: undisturbed. ckptd takes no part in it.")
    trainer = Trainer("undisturbed", folder, [*common, "--daemon", "none"])
    trainer.start(init_seed=BASE_INIT_SEED)
    try:
        run_to_end(trainer, progress, steps)
    finally:
        trainer.stop()
    return trainer


def strike(
    planned: PlannedKill, trainer: Trainer, daemon: DemoDaemon, progress: ProgressLines, steps: int
) -> Kill:
    """Follow the run to the planned moment, deliver the kill, and say so."""

    def reached(event: Event) -> bool:
        if event["event"] != "step":
            return False
        return planned.during_replay or bool(event["step"] >= planned.step)

    for event in trainer.follow(reached, timeout_s=RUN_TIMEOUT_S):
        progress.follow(event, steps)
    time.sleep(planned.delay_s)
    if planned.victim == "daemon":
        daemon.kill()
        killed_s = time.time()
    else:
        killed_s = trainer.kill()
        if planned.victim == "trainer + daemon":
            daemon.kill()
    last_step = max(event["step"] for event in trainer.drain() if event["event"] == "step")
    note = "while it was recovering" if planned.during_replay else ""
    kill = Kill(killed_s, planned.victim, last_step, note)
    progress.strike(kill)
    return kill


def run_killed(
    folder: Path,
    common: list[str],
    plan: Sequence[PlannedKill],
    progress: ProgressLines,
    *,
    steps: int,
    plain: bool,
) -> tuple[Trainer, list[Kill]]:
    """The second run, in which each life follows the one before: started by the host; if ``plain``, by us."""
    progress.say(f"Run 2: the same training, with {len(plan)} kills at random moments.")
    kills: list[Kill] = []
    with daemon_folders() as (runtime, segments):
        if plain:
            progress.say(
                "    no host: after each kill a new interpreter begins, and imports everything again"
            )
        else:
            rehearse(folder, runtime, common, progress)
        daemon = DemoDaemon(runtime, segments)
        own = [*common, "--daemon", daemon.endpoint]
        trainer = Trainer("killed", folder, own, host_folder=None if plain else runtime)
        try:
            progress.say(f"    daemon up in {daemon.start():.2f} s")
            trainer.start(init_seed=BASE_INIT_SEED)
            for number, planned in enumerate(plan, start=1):
                kill = strike(planned, trainer, daemon, progress, steps)
                kills.append(kill)
                if "daemon" in kill.victim:
                    progress.say(f"    daemon up again in {daemon.start():.2f} s")
                if kill.hit_trainer and plain:
                    trainer.start(init_seed=BASE_INIT_SEED + number)
            run_to_end(trainer, progress, steps)
        finally:
            trainer.stop()
            daemon.stop()
    return trainer, kills


def rehearse(folder: Path, runtime: Path, common: list[str], progress: ProgressLines) -> None:
    """Start the script under a host once: it writes down what the script imports, and a later host's zygote
    imports that before its first trainer. Otherwise it does so some seconds after the first start, and
    whoever is killed meanwhile waits for it.
    """
    begun = time.monotonic()
    own = [*common, "--steps", "1", "--daemon", "none"]
    trainer = Trainer("rehearsal", folder, own, host_folder=runtime)
    trainer.start(init_seed=BASE_INIT_SEED)
    try:
        trainer.wait(timeout_s=RUN_TIMEOUT_S)
    finally:
        trainer.stop()
    progress.say(
        f"    with a host, which has learned in {time.monotonic() - begun:.1f} s what the script imports; its"
        " first start is slower, for everything is imported ahead"
    )


def print_kills(kills: Sequence[Kill], events: Sequence[Event]) -> None:
    rows = []
    phases = {}
    for number, (kill, recovery) in enumerate(zip(kills, recoveries(kills, events), strict=True), start=1):
        if recovery is None:
            note = "training went on"
            rows.append([number, kill.victim, kill.last_step, None, None, None, None, note])
            continue
        note = kill.note if recovery.back_s is not None else "killed again before it was back"
        rows.append(
            [
                number,
                kill.victim,
                kill.last_step,
                recovery.resumed_at,
                recovery.redone,
                recovery.start_s,
                recovery.back_s,
                note,
            ]
        )
        if recovery.back_s is not None:
            phases[f"#{number}"] = recovery.phases, recovery.back_s
    header = ["#", "killed", "after iteration", "resumed at", "redone", "attached s", "back s", ""]
    print("\n" + table(header, rows))
    print(
        "\nattached s: from the kill until the new process was attached (process, imports, model);"
        "\nback s: from the kill until the first iteration that had not been done before was complete."
    )
    print(f"\nWhere the time went (docs/recovery.md has the phases):\n\n{phase_table(phases)}")
    print(
        "\nrest: from the kill until the daemon, or else the new process, was aware of anything; and from the"
        "\noptimizer's first new step to the end of that iteration."
    )


def print_summary(kills: Sequence[Kill], undisturbed: Trainer, killed: Trainer) -> None:
    finished = next(event for event in reversed(killed.events) if event["event"] == "finished")
    stats = finished["stats"]
    backs = [r.back_s for r in recoveries(kills, killed.events) if r and r.back_s is not None]
    redone, different = redone_steps(killed.events)
    trainer_hits = sum(kill.hit_trainer for kill in kills)
    daemon_hits = sum("daemon" in kill.victim for kill in kills)
    undisturbed_ms, killed_ms = step_time_ms(undisturbed.events), step_time_ms(killed.events)
    snapshot, dense = stats["snapshot_bytes"], stats["dense_bytes"]
    rows: list[list[object]] = [
        ["kills", f"{trainer_hits} of the trainer, {daemon_hits} of the daemon"],
        ["iterations done again", f"{redone}, of which with another loss or norm: {different}"],
        ["seconds to be back", f"{min(backs):.2f} to {max(backs):.2f}" if backs else "-"],
        [
            "stall per step (ours)",
            f"{stats['stall_ms_mean']:.2f} ms mean, {stats['stall_ms_max']:.2f} ms max",
        ],
        [
            "iteration, median",
            f"{undisturbed_ms:.0f} ms undisturbed, {killed_ms:.0f} ms with a snapshot every time",
        ],
        [
            "snapshot bytes per step",
            f"{snapshot / 1e6:.1f} MB; dense: {dense / 1e6:.1f} MB ({snapshot / dense:.0%})",
        ],
    ]
    width = max(len(str(row[0])) for row in rows)
    print()
    for name, value in rows:
        print(f"{name!s:<{width}}  {value}")


def compare(undisturbed: Trainer, killed: Trainer) -> list[str]:
    """What differs between the two runs: tensors of the final state, and losses on the way."""
    problems = differing_tensors(
        torch.load(undisturbed.final, weights_only=True),
        torch.load(killed.final, weights_only=True),
    )
    expected, actual = losses_by_step(undisturbed.events), losses_by_step(killed.events)
    problems += [
        f"loss of iteration {step}: {expected.get(step)!r} and {actual.get(step)!r}"
        for step in sorted(expected.keys() | actual.keys())
        if expected.get(step) != actual.get(step)
    ]
    _, different = redone_steps(killed.events)
    if different:
        problems.append(f"{different} iterations gave another loss or norm when done again")
    return problems


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m ckptd.demo", description=__doc__.splitlines()[0] if __doc__ else None
    )
    parser.add_argument("--steps", type=int, default=210, help="iterations of each run")
    parser.add_argument("--kills", type=int, default=5, help="random kills of the trainer")
    parser.add_argument("--seed", type=int, default=None, help="seed of the kills; default: random")
    parser.add_argument("--window", type=int, default=4, help="snapshots per window")
    parser.add_argument("--batch-size", type=int, help="default: what this machine can do in five minutes")
    parser.add_argument(
        "--precision", choices=list(PRECISIONS), default=native_precision(), help="default: what the CPU has"
    )
    parser.add_argument("--plain", action="store_true", help="no host: each life is a new interpreter")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for the picture")
    return parser.parse_args()


def main() -> int:
    args = parse_args()
    seed = args.seed if args.seed is not None else random.SystemRandom().randrange(10**6)
    plan = plan_kills(random.Random(seed), steps=args.steps, window=args.window, count=args.kills)
    threads = min(4, len(os.sched_getaffinity(0)))
    batch_size, expected = args.batch_size, ""
    if batch_size is None:
        torch.set_num_threads(threads)
        batch_size, pass_s = choose_batch_size(_measure_pass_s(args.precision))
        expected = f", about {pass_s * 2 * args.steps / 60 + 1:.0f} minutes"
    common = ["--steps", str(args.steps), "--batch-size", str(batch_size)]
    common += ["--window", str(args.window), "--threads", str(threads), "--precision", args.precision]
    progress = ProgressLines()
    print(
        f"A byte-level MoE transformer (3.8 M parameters, top-2 of 8 experts, {_describe(args.precision)},"
        f" dropout)\nlearns the Python standard library twice, {args.steps} iterations each;"
        f" batches of {batch_size}, {threads} threads{expected}."
        f"\nKills from seed {seed} (repeat them with --seed {seed}).\n"
    )
    with tempfile.TemporaryDirectory(prefix="ckptd-demo-") as scratch:
        folder = Path(scratch)
        undisturbed = run_undisturbed(folder, common, progress, args.steps)
        killed, kills = run_killed(folder, common, plan, progress, steps=args.steps, plain=args.plain)
        print_kills(kills, killed.events)
        print_summary(kills, undisturbed, killed)
        picture = args.out / "demo.png"
        try:
            draw(picture, losses_by_step(undisturbed.events), losses_by_step(killed.events), kills)
        except ImportError as error:
            print(f"picture                  none ({error}): pip install matplotlib")
        else:
            print(f"picture                  {picture}")
        problems = compare(undisturbed, killed)
        count = len(torch.load(undisturbed.final, weights_only=True))
    if problems:
        print(f"\nFAILED: the runs differ in {len(problems)} places (kill seed {seed}):")
        for line in problems[:20]:
            print(f"  {line}")
        return 1
    print(
        f"\nIDENTICAL: all {count} tensors (weights, masters, optimizer, schedule, data position, random"
        f" states)\nand all {args.steps} losses are equal, bit for bit."
    )
    return 0


def run() -> int | str:
    """The exit status of the demo, or why it failed."""
    try:
        return main()
    except ProcessDied as error:
        return f"\nFAILED: {error}"
