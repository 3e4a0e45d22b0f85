"""A real Slurm, with the scripts of `deploy/slurm` as shipped, in the machine of `tests.systemd`: munged,
slurmctld and a slurmd for each node, all on loopback, in a configuration of their own.
"""

from __future__ import annotations

import secrets
import shutil
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from tests.ckptd.running import eventually
from tests.ports import free_ports
from tests.systemd import ENVIRONMENT, PYTHON, SOURCE, Systemd, why_no_systemd

__all__ = ["SCRIPTS", "Slurm", "why_no_slurm"]

SCRIPTS = "/etc/ckptd/slurm"
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scancel", "scontrol", "squeue")
# A requeued job waits until the credentials of its last start have expired: two minutes by default.
_CONFIGURATION = """
ClusterName=tested
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmUser=root
StateSaveLocation=/var/tmp/slurmctld
SlurmctldPidFile=/run/slurmctld.pid
SlurmctldLogFile=/var/tmp/slurmctld.log
SlurmdSpoolDir=/var/tmp/slurmd-%n
SlurmdPidFile=/run/slurmd-%n.pid
SlurmdLogFile=/var/tmp/slurmd-%n.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
AuthInfo=cred_expire=10
MpiDefault=none
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
MailProg=/bin/true
KillWait=10
Prolog={scripts}/prolog.sh
Epilog={scripts}/epilog.sh
TaskProlog={scripts}/task_prolog.sh
PrologFlags=Alloc
PartitionName=all Nodes=ALL Default=YES PriorityTier=1
PartitionName=urgent Nodes=ALL PriorityTier=2
"""


@cache
def why_no_slurm() -> str:
    """Why none can be started here; "" if it can."""
    missing = [name for name in PROGRAMS if not shutil.which(name)]
    if missing:
        return f"Slurm is not installed: no {', '.join(missing)}"
    return why_no_systemd()


class Slurm:
    """Started in a machine that runs, and ends with it.

    Args:
        nodes: how many; each has four CPUs and all have this machine's address.
        settings: lines for `settings.env` that differ from the shipped ones.
    """

    def __init__(self, machine: Systemd, nodes: int = 1, settings: Sequence[str] = ()) -> None:
        self.machine = machine
        self.names = [f"n{index + 1}" for index in range(nodes)]
        self._install(settings)
        controller, *ports = free_ports(1 + nodes)
        host = machine.run("hostname").stdout.strip()
        text = _CONFIGURATION.format(host=host, controller=controller, scripts=SCRIPTS)
        for name, port in zip(self.names, ports, strict=True):
            text += f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=4\n"
        self._write("/etc/slurm/slurm.conf", text)
        self._write(
            "/etc/slurm/cgroup.conf", "CgroupPlugin=cgroup/v1\n"
        )  # not used; found by itself it may fail
        for name in self.names:
            machine.run("bash", "-c", f"echo 127.0.0.1 {name} >> /etc/hosts")
        self._start()

    def _install(self, settings: Sequence[str]) -> None:
        for name in ("ckptd", "ckptctl"):
            module = {"ckptd": "ckptd", "ckptctl": "ckptd.ctl"}[name]
            words = f"exec env {' '.join(ENVIRONMENT)} {PYTHON}/bin/python3 -m {module}"
            self._write(f"/usr/local/bin/{name}", f'#!/bin/sh\n{words} "$@"\n', mode="755")
        self.machine.run("mkdir", "-p", "/etc/ckptd", "/etc/slurm", "/var/tmp/slurmctld")
        self.machine.run("cp", "-rT", f"{SOURCE}/deploy/slurm", SCRIPTS)
        lines = "\n".join(("CKPTD_SLURM_MEMORY=64MiB", *settings))
        self.machine.run("bash", "-c", f"cat >> {SCRIPTS}/settings.env <<'E'\n{lines}\nE")

    def _write(self, path: str, text: str, mode: str = "644") -> None:
        self.machine.run("mkdir", "-p", str(Path(path).parent))
        (self.machine.root / path.lstrip("/")).write_text(text)
        self.machine.run("chmod", mode, path)

    def _start(self) -> None:
        munge = "/var/tmp/munge"
        self.machine.run("mkdir", "-p", "-m", "755", munge, "/run/munge")
        self._write(f"{munge}/key", secrets.token_hex(64), mode="600")
        files = [f"--{name}-file={munge}/{name}" for name in ("key", "pid", "log", "seed")]
        self.machine.run("munged", "--force", "--socket=/run/munge/munge.socket.2", *files)
        self.machine.run("slurmctld", "-c")
        for name in self.names:
            self.machine.run("slurmd", "-N", name)
        eventually(lambda: self.nodes_that_are("idle") == self.names, "all nodes are idle")

    def nodes_that_are(self, state: str) -> list[str]:
        return sorted(set(self.machine.run("sinfo", "-hN", "-t", state, "-o", "%N").stdout.split()))

    # -- jobs, all of alice's --------------------------------------------------------------------

    def submit(self, script: str, *options: str) -> str:
        """Submit a batch script; the job's id."""
        path = f"/tmp/{secrets.token_hex(4)}.sbatch"
        self._write(path, f"#!/bin/bash\n{script}\n")
        output = ("--output=/tmp/job-%j.out", "--open-mode=append", "--chdir=/tmp")
        words = ("sbatch", "--parsable", *output, *options, path)
        return self.machine.run(*words, user="alice").stdout.strip()

    def output(self, job: str) -> str:
        path = self.machine.root / f"tmp/job-{job}.out"
        return path.read_text(errors="replace") if path.exists() else ""

    def state(self, job: str) -> str:
        """Such as RUNNING; also of a job that has ended a moment ago."""
        text = self.machine.run("scontrol", "--oneliner", "show", "job", job).stdout
        return text.partition("JobState=")[2].split()[0]

    def until(self, job: str, state: str) -> None:
        def reached() -> bool:
            now = self.state(job)
            assert now == state or now not in ("FAILED", "COMPLETED"), f"{now}:\n{self.report(job)}"
            return now == state

        eventually(reached, lambda: f"{state}:\n{self.report(job)}", timeout_s=120)

    def report(self, job: str) -> str:
        """What Slurm says of a job and its nodes now, and what the job has printed."""
        asked = (("scontrol", "show", "job", job), ("sinfo", "-N", "-o", "%N %T %E"))
        said = [self.machine.run(*command, check=False).stdout for command in asked]
        return "\n".join((*said, self.logs(), self.output(job)))

    def requeue(self, job: str) -> None:
        """As after the failure of a node; returns when the last epilog has ended."""
        self.run("scontrol", "requeue", job)
        self.until(job, "PENDING")

    def start_now(self, job: str) -> None:
        """A requeued job, whose last credentials are still valid: slurmd runs no prolog then.

        Credentials and their revocation are dated in whole seconds: one of the second in which the last
        was revoked counts as revoked, and the job fails.
        """
        time.sleep(2)
        self.run("scontrol", "update", f"job={job}", "StartTime=now")

    def run(self, *command: str, user: str = "root") -> str:
        return self.machine.run(*command, user=user).stdout

    def logs(self) -> str:
        """Of slurmctld and all slurmd, for messages of failed tests."""
        return self.machine.run("bash", "-c", "tail -n 40 /var/tmp/slurm*.log").stdout
