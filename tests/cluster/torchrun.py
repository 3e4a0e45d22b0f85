"""A torchrun job over the hosts of a cluster, with spare hosts, that outlives the loss of any of them.

One agent (`torchrun`) per host, one worker per agent. The rendezvous store is a process of its own
on the head host, so that no worker host carries it. `nnodes` agents train; the others wait in
torchelastic's redundancy list and take the place of a lost one. A destroyed host comes back by
`boot()` and `join()`, and is then the next spare.

What was found with torch 2.13 (see `SETTINGS`), gloo, one rank per host:

* **A dead agent is noticed by its heartbeat alone**: `keep_alive_interval` x `keep_alive_max_attempt`. The
  default, 5 s x 3, is most of a restart; 1 s x 3 restarts in about 8 s. A suspended machine would be
  taken for a dead one sooner, too.
* **`TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1` is needed.** By default the agent of rank 0 keeps one TCP
  store for all rounds, and the other agents keep its address from their first round on: when the
  host of rank 0 is lost, they send their workers to the dead address (`MASTER_ADDR`), and the job
  hangs until the store's timeout. With the variable set, every round makes a new store on its own
  rank 0 and publishes the address.
* **Ranks follow the order of addresses**, as text, among those present: the place of a lost host is
  closed up, and survivors change rank. Host 2 of (1, 2, 3) is lost, spare 4 comes: 1, 3, 4 are
  ranks 0, 1, 2.
* **A survivor may lose its place.** A round is open from the moment at which all have left the one
  before; whoever is first gets in, once a second. If the destroyed host returns before the new
  round is complete, it competes with the survivors, and one of those may end as the spare. Bring
  hosts back after `wait_until_running`, unless that is what you test. A spare may replace a
  survivor in the same way when only a worker failed: all agents leave the round for that.
* Keep to one spare: with more agents waiting than places free, the waiting ones and a new round can
  disturb each other for good.
* torchrun reads unknown options as abbreviations of its own (`--log` is "ambiguous"): put `--`
  before the worker, as in `["-m", "--", "package.module", "--log", "x"]`.
* Membership changes do not count as restarts, failed workers do: `--max-restarts` counts for each agent
  by itself, and must be large.
* `--local-addr` sets what the agent publishes; otherwise the machine's host name decides, which all
  namespaces share. `is_host=0` keeps agents from becoming the store's server because of that name.
* gloo listens on the address of `GLOO_SOCKET_IFNAME`, and connects to what the peer published.
* A worker whose peer was killed fails at once (its connection is reset). One whose peer lost power
  hangs in its collective until the spare joins, at which its agent ends it with SIGTERM; so both
  kinds of loss take about equally long.
* At the end, a waiting spare leaves "gracefully" and then stumbles over its own missing result:
  exit code 1 with `AttributeError: 'NoneType' object has no attribute 'is_failed'`. That is
  accepted here; the end of the job needs the success of another agent.
* Measured on two cores, 3 hosts + 1 spare: 6 s from the loss until the new ranks have met, 8 to 12
  s until their first step; 3 s of it the heartbeat, the rest the interpreters' and torch's imports.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from tests.cluster.forked_torchrun import ForkedModule
from tests.cluster.hosts import Cluster, Host
from tests.ports import free_port

__all__ = ["SETTINGS", "JobFailed", "TorchrunJob"]

STORE_PORT = 29400
START_TIMEOUT_S = 60.0
POLL_S = 0.02
TAIL_BYTES = 4000
SPARE_AT_THE_END = b"'NoneType' object has no attribute 'is_failed'"

# Options of every agent; see above for why.
SETTINGS: dict[str, str] = {
    "--rdzv-backend": "c10d",
    "--rdzv-conf": "is_host=0,keep_alive_interval=1,keep_alive_max_attempt=3,join_timeout=300",
    "--max-restarts": "1000",
    "--monitor-interval": "0.2",
    "--nproc-per-node": "1",
    "--shutdown-timeout": "5",
}
ENVIRONMENT = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}


class JobFailed(RuntimeError):
    """An agent ended when it should not, or a wait took too long; with the end of every log."""


@dataclass(slots=True)
class _Agent:
    host: Host
    process: subprocess.Popen[bytes] | ForkedModule
    log: Path


class TorchrunJob:
    """Agents of one job; hosts join and are lost while it runs.

    Args:
        command: the worker, as torchrun takes it: `["-m", "package.module", "--flag"]` or `["script.py"]`.
        nnodes: how many hosts train at a time; or a range, such as ``"2:5"``: then all that are there do.
        folder: where logs go, `<host>.log`; made by the caller.
        env: more environment for the agent of a host (its daemon's folders, say), and so for its worker.
        settings: options of every agent.
        forked: processes begin with torch imported where they can (`tests.cluster.forked_torchrun`): a start takes a
            tenth of a second, and no measurement may do so.
    """

    def __init__(
        self,
        cluster: Cluster,
        command: Sequence[str],
        *,
        nnodes: int | str,
        folder: Path,
        env: Callable[[Host], Mapping[str, str]] = lambda host: {},
        run_id: str = "",
        settings: Mapping[str, str] = MappingProxyType(SETTINGS),
        forked: bool = False,
    ) -> None:
        self._cluster, self._command, self._nnodes = cluster, list(command), nnodes
        self._folder, self._env, self._settings, self._forked = folder, env, settings, forked
        self.run_id = run_id or f"run-{secrets.token_hex(4)}"
        self._agents: dict[str, _Agent] = {}
        self._store: subprocess.Popen[bytes] | ForkedModule | None = None
        self._port = STORE_PORT

    def start(self, hosts: Sequence[Host] | None = None) -> None:
        """Start the store, and agents on these hosts (default: on all); returns before they have met."""
        self._start_store()
        for host in self._cluster.hosts if hosts is None else hosts:
            self.join(host)

    def _start_store(self) -> None:
        head, log = self._cluster.head, self._folder / "store.log"
        if head.interface == "lo":  # the port is shared with the whole machine
            self._port = free_port(head.address)
        self._store = head.module(
            "tests.cluster.torchrun_store", head.address, str(self._port), log=log, forked=self._forked
        )
        deadline = time.monotonic() + START_TIMEOUT_S
        while "listening" not in log.read_text():
            if self._store.poll() is not None or time.monotonic() > deadline:
                raise JobFailed(f"the rendezvous store did not start:\n{log.read_text()}")
            time.sleep(POLL_S)

    def join(self, host: Host) -> None:
        """Start an agent on a host that has none: it takes a free place, or waits as a spare."""
        assert host.name not in self._agents or not self.alive(host), f"{host} has an agent"
        log = self._folder / f"{host.name}.log"
        options = [word for option in self._settings.items() for word in option]
        endpoint = f"{self._cluster.head.address}:{self._port}"
        arguments = [
            *("torch.distributed.run", *options, "--nnodes", str(self._nnodes)),
            *("--rdzv-id", self.run_id, "--rdzv-endpoint", endpoint, "--local-addr", host.address),
            *self._command,
        ]
        self._agents[host.name] = _Agent(
            host, host.module(*arguments, env=self._environment(host), log=log, forked=self._forked), log
        )

    def warm(self, host: Host) -> subprocess.Popen[bytes] | ForkedModule:
        """Start what imports ahead of the agent on a host, where workers are under `ckptd.host`; `join` when
        it has ended.
        """
        words = self._command[self._command.index("ckptd.host") + 1 :]
        return host.module(
            *("ckptd.host", "--warm", self._settings["--nproc-per-node"], *words),
            env=self._environment(host),
            log=self._folder / f"{host.name}.warm.log",
            forked=False,
        )

    def _environment(self, host: Host) -> dict[str, str]:
        return {**ENVIRONMENT, "GLOO_SOCKET_IFNAME": host.interface, **self._env(host)}

    def alive(self, host: Host) -> bool:
        """Whether the host's agent runs."""
        agent = self._agents.get(host.name)
        return agent is not None and agent.process.poll() is None

    def lost(self, host: Host) -> None:
        """The host was destroyed on purpose: its agent's end is none of the job."""
        self._agents.pop(host.name, None)

    def check(self) -> None:
        """Nothing has ended that was not lost.

        Raises:
            JobFailed: an agent or the store did, in whichever way.
        """
        for agent in self._agents.values():
            code = agent.process.poll()
            if code not in (None, 0) and not _was_spare(agent.log):
                raise JobFailed(
                    f"the agent on {agent.host} ended with {agent.process.returncode}\n{self.logs()}"
                )
        if self._store is not None and self._store.poll() is not None:
            raise JobFailed(f"the rendezvous store ended with {self._store.returncode}")

    def until(self, condition: Callable[[], bool], what: str, *, timeout_s: float) -> float:
        """Wait until the condition holds; the seconds that took.

        Raises:
            JobFailed: it took too long, or an agent ended meanwhile.
        """
        begun = time.monotonic()
        while not condition():
            self.check()
            if time.monotonic() - begun > timeout_s:
                raise JobFailed(f"{what}: not within {timeout_s:.0f} s\n{self.logs()}")
            time.sleep(POLL_S)
        return time.monotonic() - begun

    def wait(self, *, timeout_s: float) -> None:
        """Wait until every agent, those of spares included, has ended successfully.

        Raises:
            JobFailed: one did not.
        """
        agents = list(self._agents.values())
        self.until(
            lambda: all(agent.process.poll() is not None for agent in agents),
            "the end of the job",
            timeout_s=timeout_s,
        )
        self.check()
        if not any(agent.process.returncode == 0 for agent in agents):
            raise JobFailed(f"no agent has succeeded\n{self.logs()}")

    def stop(self) -> None:
        """End whatever still runs, in whatever state."""
        processes = [agent.process for agent in self._agents.values()]
        processes += [self._store] if self._store is not None else []
        for process in processes:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
            process.wait(timeout=20)
        for agent in self._agents.values():
            if agent.host.up:
                _kill_workers(agent.host, self.run_id)
        self._agents.clear()

    def logs(self) -> str:
        """The end of every agent's log, with what its workers said."""
        texts = []
        for agent in self._agents.values():
            tail = agent.log.read_bytes()[-TAIL_BYTES:].decode(errors="replace")
            texts.append(f"--- {agent.host} ---\n{tail}")
        return "\n".join(texts)


def _was_spare(log: Path) -> bool:
    return SPARE_AT_THE_END in log.read_bytes()[-TAIL_BYTES:]


def _kill_workers(host: Host, run_id: str) -> None:
    """Workers of a killed agent go on by themselves: end those of this run, and no daemon of the host."""
    wanted = f"TORCHELASTIC_RUN_ID={run_id}".encode()
    for pid in host.pids():
        try:
            if wanted in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                os.kill(pid, signal.SIGKILL)
        except OSError:
            continue  # it ended meanwhile
