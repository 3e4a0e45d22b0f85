"""How long torchrun's agents take to meet again after one of two nodes is lost, by their rendezvous settings.

Two agents on one machine with ``--nnodes 1:2``, each with a worker without torch. One agent is killed together
with its worker, and the other's worker fails at once, as one does whose peer is gone. Measured is the time
until the remaining worker runs again. Beside it is what the settings alone amount to: the time until a lost
node counts as lost, and the time that is waited for others.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from bench.common import emit, median, parser, scratch_folder, table

__all__ = ["main"]

USUAL = {"last_call_timeout": 30, "keep_alive_interval": 5, "keep_alive_max_attempt": 3}
VARIANTS: dict[str, dict[str, int]] = {
    "default": {},
    "keep_alive": {"keep_alive_interval": 1, "keep_alive_max_attempt": 2},
    "last_call": {"last_call_timeout": 3},
    "quick": {"last_call_timeout": 3, "keep_alive_interval": 1, "keep_alive_max_attempt": 2},
}
WAIT_S = 180.0
SETTLE_S = 2.0
WORKER = """
import os, pathlib, sys, time
folder, nodes = pathlib.Path(sys.argv[1]), os.environ["GROUP_WORLD_SIZE"]
(folder / f"{nodes}-{os.getpid()}").touch()
while not (folder / "end").exists():
    time.sleep(0.01)
    if nodes == "2" and (folder / "fail").exists():
        sys.exit(1)
"""


class Agents:
    """Two agents of one job."""

    def __init__(self, folder: Path, settings: Mapping[str, int]) -> None:
        self._folder = folder
        folder.mkdir()
        script = folder / "worker.py"
        script.write_text(WORKER)
        with socket.create_server(("localhost", 0)) as free:
            port = free.getsockname()[1]
        conf = ",".join(f"{name}={value}" for name, value in settings.items())
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "1:2", "--nproc-per-node", "1"),
            *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{port}", "--rdzv-id", "bench"),
            *("--max-restarts", "9", *(["--rdzv-conf", conf] if conf else []), str(script), str(folder)),
        ]
        self._output = (folder / "output").open("wb")
        self._agents: list[subprocess.Popen[bytes]] = []
        for _ in range(2):
            self._agents.append(
                subprocess.Popen(command, stdout=self._output, stderr=self._output, start_new_session=True)
            )
            # The store is the first one's, which is not lost.
            self._until(lambda: _listens(port), "the store")

    def meet_again_s(self) -> float:
        """Lose the second agent; seconds until the first one's worker runs again."""
        self._until(lambda: self._workers(2) >= 2, "two nodes")
        time.sleep(SETTLE_S)
        alone = self._workers(1)
        killed = time.monotonic()
        self._kill(self._agents[1])
        (self._folder / "fail").touch()
        self._until(lambda: self._workers(1) > alone, "the node that is left")
        return time.monotonic() - killed

    def _workers(self, nodes: int) -> int:
        return len(list(self._folder.glob(f"{nodes}-*")))

    def _until(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + WAIT_S
        while not condition():
            if time.monotonic() > deadline:
                raise RuntimeError(f"{what}: nothing came\n{(self._folder / 'output').read_text()[-3000:]}")
            time.sleep(0.01)

    def _kill(self, agent: subprocess.Popen[bytes]) -> None:
        """It, and its workers, which lead sessions of their own."""
        workers = Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()
        agent.kill()
        for worker in workers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(worker), signal.SIGKILL)
        agent.wait()

    def close(self) -> None:
        (self._folder / "end").touch()
        for agent in self._agents:
            if agent.poll() is None:
                self._kill(agent)
        self._output.close()


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("localhost", port)) == 0


def main() -> None:
    options = parser(__doc__)
    options.set_defaults(rounds=2)
    options.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    args = options.parse_args()
    samples: dict[str, list[float]] = {name: [] for name in args.variants}
    with scratch_folder() as scratch:
        for number in range(args.rounds):
            for name, found in samples.items():
                agents = Agents(Path(scratch) / f"{name}-{number}", VARIANTS[name])
                try:
                    found.append(agents.meet_again_s())
                finally:
                    agents.close()
                print(f"{name}: {found[-1]:.1f} s", flush=True)
    metrics: dict[str, float | int | str] = {}
    rows = []
    for name, found in samples.items():
        settings = USUAL | VARIANTS[name]
        amount_s = settings["keep_alive_interval"] * settings["keep_alive_max_attempt"]
        amount_s += settings["last_call_timeout"]
        metrics[f"rendezvous_{name}_s"] = median(found)
        metrics[f"rendezvous_{name}_vs_settings"] = median(found) / amount_s
        rows.append(
            [",".join(f"{k}={v}" for k, v in settings.items()), f"{median(found):.1f}", str(amount_s)]
        )
    print("\n" + table(["settings", "met again after, s", "of the settings, s"], rows))
    emit("rendezvous", metrics, as_json=args.json)


if __name__ == "__main__":
    main()
