"""Scripts as users write and start them: a file of their own, with a command line, in a folder.

With a launcher, fresh interpreters run them; without one, forks that have torch imported.
"""

from __future__ import annotations

import atexit
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from ckptd.client import identity
from tests.e2e.harness import DaemonProcess
from tests.forked import FORKED
from tests.forked_hosts import ForkedProgram

__all__ = ["SCRIPT", "Started", "start"]

ROOT = Path(__file__).resolve().parents[2]

SCRIPT = """\
import os, signal, sys
import torch
from torch import nn
from ckptd.client import Checkpointer, DaemonOptions, RecoveryOptions, RunOptions, SnapshotOptions

if "RANK" in os.environ:
    torch.distributed.init_process_group("gloo")
torch.manual_seed(0)
torch.set_num_threads(1)
model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.001)
sched = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
ckpt = Checkpointer(model, optimizer, state={"sched": sched}, snapshots=SnapshotOptions(window=2))
for step in ckpt.steps(12):
    generator = torch.Generator().manual_seed(step)
    loss = model(torch.randn(4, 8, generator=generator)).square().mean()
    loss.backward()
    if step == int(os.environ.get("KILL_AT", "-1")):
        os.kill(os.getpid(), signal.SIGKILL)
    optimizer.step()
    sched.step()
    optimizer.zero_grad()
    print("step", step, "lr", optimizer.param_groups[0]["lr"], flush=True)
ckpt.close()
"""


class Started:
    """A command that has ended: its exit code and what it printed."""

    def __init__(self, code: int, printed: str) -> None:
        self.code, self.printed = code, printed

    @property
    def lines(self) -> list[str]:
        """Those of ours, in order."""
        return [line for line in self.printed.splitlines() if line.startswith("ckptd: ")]

    def about(self, text: str) -> list[str]:
        """Our lines that say this."""
        return [line for line in self.lines if text in line]

    @property
    def steps(self) -> list[int]:
        """The steps that were run."""
        return [int(line.split()[1]) for line in self.printed.splitlines() if line[:5] == "step "]


def environment(daemon: DaemonProcess | None, **more: str) -> dict[str, str]:
    """Of a user whose daemon this is."""
    own = {k: v for k, v in os.environ.items() if not k.startswith(("CKPTD_", "TORCHELASTIC"))}
    own["PYTHONPATH"] = str(ROOT)
    if daemon is not None:
        own["CKPTD_RUNTIME_DIR"] = str(daemon.runtime_dir)
        own["CKPTD_SEGMENT_DIR"] = str(daemon.segment_dir)
    return own | more


def start(
    script: Path,
    daemon: DaemonProcess | None,
    *arguments: str,
    launcher: tuple[str, ...] = (),
    cwd: Path | None = None,
    variables: Mapping[str, str] | None = None,
    fresh: bool = False,
) -> Started:
    """Run a script to its end; ``fresh``: in interpreters that have imported nothing, the launcher's too."""
    env, cwd = environment(daemon, **(variables or {})), cwd or script.parent
    if not launcher and not fresh:
        with tempfile.NamedTemporaryFile() as log:
            process = FORKED.Process(
                target=_run_script, args=([str(script), *arguments], env, cwd, log.name), daemon=False
            )
            process.start()
            process.join(300)
            hangs = process.is_alive()
            process.kill()
            process.join()
            printed = Path(log.name).read_text()
            assert not hangs, printed
            return Started(process.exitcode or 0, printed)
    if launcher and not fresh:
        with tempfile.NamedTemporaryFile() as log:
            words = [*launcher, str(script), *arguments]
            forked = ForkedProgram(words, cwd=cwd, env=env, log=Path(log.name))
            try:
                code = forked.wait(300)
            finally:
                forked.kill()
            return Started(code, Path(log.name).read_text())
    done = subprocess.run(
        [sys.executable, *launcher, str(script), *arguments],
        env=env,
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
    )
    return Started(done.returncode, done.stdout)


def _run_script(words: list[str], env: dict[str, str], cwd: Path, log: str) -> None:
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    identity._begun_in = cwd  # found out when it is imported
    descriptor = os.open(log, os.O_WRONLY)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.argv = words
    sys.path[0] = str(Path(words[0]).parent)
    try:
        runpy.run_path(words[0], run_name="__main__")
    finally:
        atexit._run_exitfuncs()  # which a fork leaves out
