"""`make demo-policies`: the same training and the same kills under four policies, side by side.

`sliding` and `dense` are exact: their runs end with the bits of one that nobody disturbed, or the demo fails.
`partial` (MoC-System's) and `selected` (MoEtion's) replay nothing and lose updates of experts; the table says
how many tokens of them, and what that does to the loss on text that is not trained on.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from ckptd.demo.kills import BASE_INIT_SEED, RUN_TIMEOUT_S, ProgressLines, run_to_end
from ckptd.demo.lab import DemoDaemon, Event, ProcessDied, Trainer, daemon_folders
from ckptd.demo.report import Kill, differing_tensors, losses_by_step, recoveries, redone_steps, table
from examples.demo_progress import failed

__all__ = ["main"]

VALIDATED_BATCHES = 24


@dataclass(frozen=True, slots=True)
class Policy:
    """What is shown, and how the trainer is told."""

    name: str
    arguments: tuple[str, ...]
    exact: bool


POLICIES = (
    Policy("sliding, W=4", ("--policy", "sliding", "--window", "4"), exact=True),
    Policy("dense, every 5", ("--policy", "dense", "--every", "5"), exact=True),
    Policy("partial, K=1 of 8", ("--policy", "partial", "--experts", "1"), exact=False),
    Policy("selected, K=1 of 8", ("--policy", "selected", "--experts", "1"), exact=False),
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """One finished run."""

    trainer: Trainer
    kills: Sequence[Kill]

    @property
    def validation_loss(self) -> float:
        """On text that is not trained on."""
        found = next(event for event in reversed(self.trainer.events) if event["event"] == "validated")
        return float(found["loss"])

    @property
    def stats(self) -> Mapping[str, float]:
        """The counters of its last process."""
        found: Mapping[str, float] = next(
            event for event in reversed(self.trainer.events) if event["event"] == "finished"
        )["stats"]
        return found

    def row(self, name: str, verdict: str) -> list[object]:
        """Of the table."""
        events = self.trainer.events
        lives = [event for event in events if event["event"] == "attached"]
        backs = [r.back_s for r in recoveries(self.kills, events) if r is not None and r.back_s is not None]
        stats = self.stats
        return [
            name,
            f"{stats['snapshot_bytes'] / 1e6:.1f}",
            f"{stats['stall_ms_mean']:.2f}",
            redone_steps(events)[0],
            sum(life["lost_tokens"] for life in lives),
            f"{lives[-1]['plt']:.2%}",
            sum(backs) / len(backs) if backs else None,
            f"{self.validation_loss:.4f}",
            verdict,
        ]


def _reached(step: int, event: Event) -> bool:
    return event["event"] == "step" and bool(event["step"] >= step)


def play(
    name: str, folder: Path, arguments: Sequence[str], at: Sequence[int], progress: ProgressLines, steps: int
) -> Outcome:
    """Train to the end, with a SIGKILL to the trainer after each of these iterations."""
    kills: list[Kill] = []
    with daemon_folders() as (runtime, segments):
        daemon = DemoDaemon(runtime, segments)
        daemon.start()
        trainer = Trainer(name, folder, [*arguments, "--daemon", daemon.endpoint])
        try:
            trainer.start(init_seed=BASE_INIT_SEED)
            for number, step in enumerate(at, start=1):
                for event in trainer.follow(partial(_reached, step), timeout_s=RUN_TIMEOUT_S):
                    progress.follow(event, steps)
                killed_s = trainer.kill()
                last = max(event["step"] for event in trainer.drain() if event["event"] == "step")
                kills.append(Kill(killed_s, "trainer", last))
                progress.strike(kills[-1])
                trainer.start(init_seed=BASE_INIT_SEED + number)
            run_to_end(trainer, progress, steps)
        finally:
            trainer.stop()
            daemon.stop()
    return Outcome(trainer, kills)


def draw_losses(path: Path, losses: Mapping[str, Mapping[int, float]], at: Sequence[int]) -> None:
    """The loss of each run, and its distance from the undisturbed one."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (above, below) = pyplot.subplots(2, 1, figsize=(10, 7), sharex=True, layout="constrained")
    undisturbed = losses["undisturbed"]
    for name, found in losses.items():
        steps = sorted(found)
        above.plot(steps, [found[step] for step in steps], label=name, linewidth=1)
        if name != "undisturbed":
            below.plot(steps, [found[step] - undisturbed[step] for step in steps], label=name, linewidth=1)
    for step in at:
        above.axvline(step, color="#c1121f", linestyle=":", linewidth=1)
        below.axvline(step, color="#c1121f", linestyle=":", linewidth=1)
    above.set_ylabel("training loss (nats per byte)")
    below.set_ylabel("less the undisturbed run's")
    below.set_xlabel("iteration (dotted: SIGKILL)")
    above.legend()
    below.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=130)
    parser.add_argument("--kill-after", type=int, nargs="+", default=[45, 80, 105], metavar="ITERATION")
    parser.add_argument("--batch-size", type=int, default=12)
    parser.add_argument("--out", type=Path, default=Path("out"))
    return parser.parse_args()


def main() -> int:
    args = parse_args()
    threads = min(4, len(os.sched_getaffinity(0)))
    common = ["--steps", str(args.steps), "--batch-size", str(args.batch_size), "--threads", str(threads)]
    common += ["--validate", str(VALIDATED_BATCHES)]
    progress = ProgressLines()
    problems: list[str] = []
    rows: list[list[object]] = []
    print(
        f"{len(POLICIES)} policies, each with a SIGKILL to the trainer after iterations "
        f"{', '.join(map(str, args.kill_after))} of {args.steps}.\n"
    )
    with tempfile.TemporaryDirectory(prefix="ckptd-demo-") as scratch:
        folder = Path(scratch)
        progress.say("undisturbed, without ckptd")
        plain = Trainer("undisturbed", folder, [*common, "--daemon", "none"])
        plain.start(init_seed=BASE_INIT_SEED)
        try:
            run_to_end(plain, progress, args.steps)
        finally:
            plain.stop()
        undisturbed = Outcome(plain, ())
        expected = torch.load(plain.final, weights_only=True)
        losses = {"undisturbed": losses_by_step(plain.events)}
        for policy in POLICIES:
            progress.say(policy.name)
            name = policy.name.replace(",", "").replace(" ", "-").replace("=", "")
            found = play(name, folder, [*common, *policy.arguments], args.kill_after, progress, args.steps)
            different = differing_tensors(expected, torch.load(found.trainer.final, weights_only=True))
            if policy.exact and different:
                problems += [f"{policy.name}: {line}" for line in different]
            verdict = f"{len(different)} tensors differ" if different else "identical"
            rows.append(found.row(policy.name, verdict))
            losses[policy.name] = losses_by_step(found.trainer.events)
    blank = [None] * 6
    rows.append(["undisturbed", *blank, f"{undisturbed.validation_loss:.4f}", ""])
    header = [
        "policy",
        "snapshot MB",
        "stall ms",
        "redone",
        "lost tokens",
        "PLT",
        "back s",
        "validation loss",
    ]
    print("\n" + table([*header, "final state"], rows))
    print(
        "\nredone: iterations that were run again; lost tokens: those whose updates of an expert are lost, each"
        "\ncounted once for each of its experts; PLT: the mean over layers of their share of all tokens so far;"
        "\nback s: from the kill until the first iteration that had not been done before was complete."
    )
    picture = args.out / "policies.png"
    draw_losses(picture, losses, args.kill_after)
    print(f"\npicture: {picture}")
    if problems:
        return failed(problems, f"an exact policy ended with other bits, in {len(problems)} places")
    print("\nThe exact policies end with the bits of the undisturbed run.")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ProcessDied as error:
        sys.exit(f"\nFAILED: {error}")
