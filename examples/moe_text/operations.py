"""`make demo-ops`: what whoever is on call sees of a job of two nodes while faults happen.

Two hosts train, each a network namespace of this machine with a daemon and processes of its own
(`tests.cluster`). Prometheus scrapes both daemons, with the rules of `deploy/alerts.yml`, of which minutes
are made seconds. Then faults happen, one after the other; after each the demo waits until Prometheus tells of
its alert, mends what is not mended by itself, and waits until the alert has ended. At the end there are a
table, a picture of the alerts over time, and one of the page that `ckptctl dash` serves. The demo fails if an
alert does not fire, or does not end, or if training stops.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ckptd.demo.report import table
from ckptd.transport import messages as m
from ckptd.transport.wire import ControlClient, RefusedError
from examples.demo_progress import Progress
from examples.moe_text.cluster_run import JOB, ClusterRun
from tests.browser import open_page, why_no_browser
from tests.ckptd.running import attach
from tests.ckptd.snapshots import flip
from tests.cluster.daemons import DaemonFailed, HostDaemon
from tests.cluster.hosts import Cluster, Host
from tests.cluster.torchrun import JobFailed

__all__ = ["main", "rules_in_seconds"]

RULES = Path(__file__).resolve().parents[2] / "deploy" / "alerts.yml"
NUM_RANKS = 2
RUN = "operations"
METRICS_PORT, PROMETHEUS_PORT = 9464, 9090
STEPS = 1_000_000  # the demo ends the job
ALERT_TIMEOUT_S = 180.0
BACK_TIMEOUT_S = 120.0
POLL_S = 0.25


def rules_in_seconds(text: str) -> str:
    """Alert rules of which each duration, of `for:` and of a range, is a sixtieth; limits stay as they are."""

    def shorter(found: re.Match[str]) -> str:
        seconds = int(found[2]) * {"m": 1, "h": 60}[found[3]]
        return f"{found[1]}{seconds}s"

    return re.sub(r"(for: |\[)(\d+)([mh])\b", shorter, text)


class Prometheus:
    """A Prometheus on the head host, which scrapes the daemons every second."""

    def __init__(self, head: Host, daemons: Mapping[str, Host], folder: Path) -> None:
        self._url = f"http://{head.address}:{PROMETHEUS_PORT}"
        (folder / "rules.yml").write_text(rules_in_seconds(RULES.read_text()))
        targets = [
            {"targets": [f"{host.address}:{METRICS_PORT}"], "labels": {"instance": name}}
            for name, host in daemons.items()
        ]
        config = {
            "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(folder / "rules.yml")],
            "scrape_configs": [{"job_name": "ckptd", "static_configs": targets}],
        }
        file = folder / "prometheus.yml"
        file.write_text(json.dumps(config))  # JSON is YAML
        self._log = folder / "prometheus.log"
        self._process = head.start(
            [
                "prometheus",
                f"--config.file={file}",
                f"--storage.tsdb.path={folder / 'series'}",
                f"--web.listen-address={head.address}:{PROMETHEUS_PORT}",
            ],
            log=self._log,
        )

    def ask(self, path: str, **query: str) -> Any:
        """The data of an answer of the HTTP API; None while it does not listen.

        Raises:
            JobFailed: it has ended.
        """
        if self._process.poll() is not None:
            raise JobFailed(f"Prometheus has ended:\n{self._log.read_text()[-2000:]}")
        try:
            url = f"{self._url}/api/v1/{path}?{urllib.parse.urlencode(query)}"
            with urllib.request.urlopen(url, timeout=10) as answer:
                return json.load(answer)["data"]
        except OSError:
            return None

    def scraped(self) -> int:
        """How many daemons it has read."""
        found = self.ask("query", query='up{job="ckptd"} == 1')
        return len(found["result"]) if found else 0

    def firing(self) -> set[str]:
        """The names of the alerts that fire."""
        found = self.ask("alerts")
        alerts = found["alerts"] if found else []
        return {each["labels"]["alertname"] for each in alerts if each["state"] == "firing"}

    def history(self, begun_s: float, ended_s: float) -> dict[str, list[float]]:
        """Of each alert the seconds, after the beginning, at which it fired."""
        found = self.ask(
            "query_range",
            query='group by (alertname) (ALERTS{alertstate="firing"})',
            start=str(begun_s),
            end=str(ended_s),
            step="1",
        )
        return {
            series["metric"]["alertname"]: [float(at) - begun_s for at, _ in series["values"]]
            for series in found["result"]
        }


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens, the alert that tells of it, and what an operator does then.

    Attributes:
        repair: None: it mends itself, or there is nothing to do.
    """

    what: str
    alert: str
    happen: Callable[[ClusterRun], None]
    repair: Callable[[ClusterRun], None] | None = None


@dataclass(slots=True)
class Told:
    """When things happened, in seconds after the beginning."""

    fault: Fault
    at_s: float
    fired_s: float = 0.0
    ended_s: float = 0.0
    others: set[str] = field(default_factory=set)


# -- the faults -----------------------------------------------------------------------------------


def _daemons(run: ClusterRun) -> list[HostDaemon]:
    return list(run.daemons.values())


def kill_daemon(run: ClusterRun) -> None:
    _daemons(run)[1].kill()


def start_daemon(run: ClusterRun) -> None:
    _daemons(run)[1].start()


def kill_keeper(run: ClusterRun) -> None:
    with ControlClient(_daemons(run)[0].endpoint, timeout_s=20) as client:
        durable = client.ask(m.GetStatus(), m.Status).durable
    assert durable is not None
    os.kill(durable.keeper_pid, signal.SIGKILL)


def damage_replica(run: ClusterRun) -> None:
    """Change a bit of each replica on the second host, and let the first one's drill read them. Trainers are
    stopped meanwhile: otherwise the snapshots would be replaced before anybody reads them."""
    trainers = [pid for host in run.cluster.hosts for pid in _trainers(host)]
    for pid in trainers:
        os.kill(pid, signal.SIGSTOP)
    try:
        replicas = list(_daemons(run)[1].host.segment_dir.glob("*.rep"))
        assert flip(replicas, range(STEPS)) > 0, "there is no replica to damage"
        subprocess.run(
            [sys.executable, "-m", "ckptd.ctl", "drill", "--job", JOB, "--run", RUN, "--rank", "0"],
            env={**os.environ, **_daemons(run)[0].env},
            capture_output=True,
            timeout=60,
            check=False,  # it reports the damage by its exit code
        )
    finally:
        for pid in trainers:
            os.kill(pid, signal.SIGCONT)


def _trainers(host: Host) -> list[int]:
    """The processes of ranks; torchrun, whose command line names the module, too, is not one of them."""
    found = []
    for pid in host.pids():
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        if b"ckptd.demo.train" in words and b"torch.distributed.run" not in words:
            found.append(pid)
    return found


def ask_for_too_much(run: ClusterRun) -> None:
    with ControlClient(_daemons(run)[0].endpoint, timeout_s=20) as client:
        try:
            attach(client, run="huge", needed_bytes=1 << 40)
        except RefusedError:
            return
    raise JobFailed("a trainer that needs 1 TiB was not refused")


FAULTS = (
    Fault("the daemon of host1 is killed", "CkptdPeerDown", kill_daemon, start_daemon),
    Fault("the process that writes to storage is killed", "CkptdPersistFailing", kill_keeper),
    Fault("a bit of each replica on host1 changes", "CkptdDigestFailure", damage_replica),
    Fault("a trainer needs more memory than the quota", "CkptdTrainersRefused", ask_for_too_much),
)


# -- the run --------------------------------------------------------------------------------------


def lose_a_trainer(run: ClusterRun, progress: Progress) -> None:
    """No alert tells of it: this is what ckptd is for. The page shows the recovery."""
    last_step = run.last_step()
    pid = _trainers(run.cluster.hosts[1])[0]
    os.kill(pid, signal.SIGKILL)
    progress.say(f"--> killed the trainer of rank 1 (process {pid}) after iteration {last_step}")
    run.job.until(
        lambda: run.last_step() > last_step + 5, f"iteration {last_step + 5}", timeout_s=BACK_TIMEOUT_S
    )
    resumed = [event for event in run.events() if event["event"] == "attached"][-1]
    progress.say(f"    training goes on (rank 0 is now process {resumed.get('pid', 'unknown')})")


def strike(fault: Fault, run: ClusterRun, prometheus: Prometheus, progress: Progress) -> Told:
    """The fault, its alert, the repair, the end of the alert."""
    told = Told(fault, progress.seconds)
    fault.happen(run)
    progress.say(f"--> {fault.what}")

    def fires() -> bool:
        firing = prometheus.firing()
        told.others |= firing - {fault.alert}
        return fault.alert in firing

    run.job.until(fires, f"the alert {fault.alert}", timeout_s=ALERT_TIMEOUT_S)
    told.fired_s = progress.seconds
    progress.say(f"    {fault.alert} fires")
    if fault.repair is not None:
        fault.repair(run)
        progress.say("    repaired")
    run.job.until(
        lambda: not fires() and not prometheus.firing(), "the end of all alerts", timeout_s=ALERT_TIMEOUT_S
    )
    told.ended_s = progress.seconds
    progress.say("    no alert fires any more")
    return told


def picture_of_page(daemon: HostDaemon, picture: Path, folder: Path) -> str:
    """Write what a browser shows of the page; what was done, or why not, in one line."""
    if why := why_no_browser():
        return f"no picture of the page: {why}"
    command = [sys.executable, "-m", "ckptd.ctl", "dash", "--whole-job"]
    with subprocess.Popen(
        command, env={**os.environ, **daemon.env}, stdout=subprocess.PIPE, text=True
    ) as dash:
        try:
            assert dash.stdout is not None
            line = dash.stdout.readline()
            found = re.search(r"http://\S+", line)
            if found is None:
                raise JobFailed(f"ckptctl dash says {line!r}, without an address")
            time.sleep(11)  # it asks the other nodes every 10 s
            open_page(found[0], folder, f"--screenshot={picture}")
        finally:
            dash.terminate()
    return f"the page          {picture}"


def draw_alerts(told: Sequence[Told], fired: Mapping[str, Sequence[float]], picture: Path) -> None:
    """A row per alert: when it fired; and when each fault happened."""
    from matplotlib.figure import Figure  # an extra

    figure = Figure(figsize=(9, 1.2 + 0.45 * len(fired)), layout="constrained")
    axes = figure.add_subplot()
    for row, seconds in enumerate(fired.values()):
        axes.broken_barh([(at, 1.0) for at in seconds], (row - 0.3, 0.6), color="tab:red")
    axes.set_yticks(range(len(fired)), list(fired))
    for number, each in enumerate(told, start=1):
        axes.axvline(each.at_s, color="black", linewidth=0.8)
        axes.annotate(str(number), (each.at_s, len(fired) - 0.5), ha="right", fontsize=8)
    axes.set(
        xlabel="seconds", ylim=(-0.6, len(fired) - 0.2), title="Faults (lines) and the alerts that fired"
    )
    figure.savefig(picture, dpi=110)


def report(told: Sequence[Told]) -> str:
    """The table of faults."""
    rows: list[list[object]] = [
        [
            number,
            each.fault.what,
            each.fault.alert,
            each.fired_s - each.at_s,
            each.ended_s - each.at_s,
            ", ".join(sorted(each.others)) or "-",
        ]
        for number, each in enumerate(told, start=1)
    ]
    return table(["#", "fault", "alert", "fired after s", "ended after s", "others that fired"], rows)


def play(args: argparse.Namespace, cluster: Cluster, folder: Path) -> None:
    """The run, and everything that it leaves in `args.out`."""
    settings = {
        "replicas": "1",
        "metrics": f"0.0.0.0:{METRICS_PORT}",
        "store": f"file://{folder}/store",
        "persist_every": "20",
        "persist_every_s": "0",
    }
    progress = Progress()
    run = ClusterRun(RUN, cluster, folder, args, num_ranks=NUM_RANKS, settings=settings, peers=True)
    try:
        run.start()
        progress.say("Two hosts begin to train.")
        hosts = {host.name: host for host in cluster.hosts}
        prometheus = Prometheus(cluster.head, hosts, folder)
        run.job.until(
            lambda: run.last_step() >= args.begin and prometheus.scraped() == NUM_RANKS,
            f"iteration {args.begin}, and metrics of both daemons",
            timeout_s=ALERT_TIMEOUT_S,
        )
        run.job.until(lambda: not prometheus.firing(), "a quiet beginning", timeout_s=ALERT_TIMEOUT_S)
        progress.say(f"Iteration {run.last_step()}; Prometheus reads both daemons, and no alert fires.")
        begun_s = time.time() - progress.seconds
        told = [strike(fault, run, prometheus, progress) for fault in FAULTS]
        lose_a_trainer(run, progress)
        fired = prometheus.history(begun_s, time.time())
        page = picture_of_page(_daemons(run)[0], args.out / "page.png", folder / "browser")
    finally:
        run.stop()
    draw_alerts(told, fired, args.out / "alerts.png")
    print(f"\n{report(told)}\n\nthe alerts        {args.out / 'alerts.png'}\n{page}")


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Faults of a job of two nodes, and the alerts they fire.")
    parser.add_argument("--out", type=Path, default=Path("out/operations"), help="folder for the pictures")
    parser.add_argument("--begin", type=int, default=30, help="iteration after which faults begin")
    parser.add_argument("--window", type=int, default=4, help="snapshots per window")
    parser.add_argument("--batch-size", type=int, default=1, help="per rank")
    parser.set_defaults(steps=STEPS)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    if shutil.which("prometheus") is None:
        print("This demo needs Prometheus (Debian's package prometheus, or a binary on the PATH).")
        return 1
    args.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="ckptd-ops-") as scratch, Cluster(NUM_RANKS) as cluster:
        print(f"{NUM_RANKS} hosts: {cluster}; Prometheus reads {RULES.name}, with seconds for minutes.\n")
        play(args, cluster, Path(scratch))
    print("\nEvery fault had its alert, every alert ended, and training went on.")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (DaemonFailed, JobFailed) as error:
        sys.exit(f"\nFAILED: {error}")
