"""What a host is told: its command line, and its place among the ranks, from the launcher's environment."""

from __future__ import annotations

import math
import os
import re
import sys
import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from ckptd.host.zygotes.script_main import Script

USAGE = (
    "usage: python -m ckptd.host [--max-restarts N] [--min-ranks N | --reroute] [--no-fork] "
    "[-m] script [arguments]\n"
    "       python -m ckptd.host --warm RANKS [--warm-for SECONDS] [-m] script [arguments]"
)
_MODULE = "ckptd.host"
_PORT_MAX = (1 << 16) - 1
_STEP_PORTS = range(10_000, 30_000)  # below those that Linux gives to connections
_SILENCE_MAX_S = 3600


class UsageError(ValueError):
    """The host cannot do what its command line or its environment says; the message names what."""


@dataclass(frozen=True, slots=True)
class HostOptions:
    """Where this host is in its job, and what its limits are."""

    script: Script

    rank: int
    world_size: int

    local_rank: int

    one_machine: bool
    """All ranks of the job are on this machine."""

    job: str
    """Equal for the hosts of one start of a job on this machine, and for no others."""

    restarts_before: int
    """Restarts by the launcher (``TORCHELASTIC_RESTART_COUNT``)."""

    launched: bool
    """By torchrun: the host ends when its parent does."""

    has_store: bool
    """The trainers meet in a store (``MASTER_PORT``)."""

    store: tuple[str, int]
    """Address and port of that store in the first epoch; ("", 0) if the environment does not say both."""

    run_id: str
    """Of torchrun, whose store may be that of several jobs; else ""."""

    error_file: str
    """Where torch's `record` writes the error of a trainer; "" if nowhere."""

    max_restarts: int
    """How many failures are followed by a new epoch; an epoch that lasted ``steady_s`` begins the count
    anew."""

    steady_s: float

    min_ranks: int
    """The job can go on with so many ranks when nodes are lost: ``world_size`` unless it is elastic."""

    stop_s: float
    """How long a trainer that shall end may park, before SIGKILL."""

    silence_s: int
    """After how long the host of another machine that has gone without a word counts as lost."""

    step_deadline_s: float | None
    """How long nothing of a trainer's step may change before it counts as hanging; None: learned from the
    steps before; infinite: any time."""

    node: int | None
    """Which of the job's nodes this is, so that the ranks of one count as lost together; None: unknown."""

    may_fork: bool
    """Trainers are forked from a zygote, unless the script is no place for that."""

    warm: int = 0
    """This is no host: for so many ranks of this machine modules are imported ahead of torchrun."""

    warm_s: int = 600
    """How long what was imported waits for a host."""

    reroute: bool = False
    """The trainers go on without those that fail, until these are back (docs/rerouting.md)."""


def options_from(words: Sequence[str], environ: Mapping[str, str]) -> HostOptions:
    """The options of this process.

    Args:
        words: its command line without the interpreter's part.
    Raises:
        UsageError: something is missing, unknown or out of range.
    """
    left, may_fork, reroute = list(words), True, False
    numbers = {
        "--max-restarts": _integer(environ, "CKPTD_HOST_MAX_RESTARTS", 5),
        "--min-ranks": _integer(environ, "CKPTD_HOST_MIN_RANKS", 0),
        "--warm": 0,
        "--warm-for": 600,
    }
    while left and left[0].startswith("--"):
        option = left.pop(0)
        if option == "--":
            break
        if option == "--no-fork":
            may_fork = False
        elif option == "--reroute":
            reroute = True
        elif option in numbers and left and left[0].isdecimal():
            numbers[option] = int(left.pop(0))
        else:
            raise UsageError(f"{option}: unknown, or without a number\n{USAGE}")
    if reroute and numbers["--min-ranks"]:
        raise UsageError(
            "--reroute and --min-ranks (or CKPTD_HOST_MIN_RANKS): a job whose workers stand in for each "
            f"other keeps its ranks; leave one of them out\n{USAGE}"
        )
    is_module = left[:1] == ["-m"]
    left = left[1:] if is_module else left
    if not left:
        raise UsageError(f"there is no script\n{USAGE}")
    world_size = _integer(environ, "WORLD_SIZE", 1)
    if world_size > 1 and not environ.get("RANK"):
        raise UsageError("WORLD_SIZE is set and RANK is not")
    rank = _integer(environ, "RANK", 0)
    if rank >= world_size:
        raise UsageError(f"RANK={rank} is not below WORLD_SIZE={world_size}")
    return HostOptions(
        script=Script(left[0], is_module, tuple(left[1:]), interpreter_flags(sys.orig_argv)),
        rank=rank,
        world_size=world_size,
        local_rank=_integer(environ, "LOCAL_RANK", rank),
        one_machine=_on_one_machine(environ, world_size),
        job=_job_key(environ),
        restarts_before=_integer(environ, "TORCHELASTIC_RESTART_COUNT", 0),
        launched="TORCHELASTIC_RUN_ID" in environ,
        has_store=bool(environ.get("MASTER_PORT")),
        store=_store(environ),
        run_id=environ.get("TORCHELASTIC_RUN_ID", ""),
        error_file=environ.get("TORCHELASTIC_ERROR_FILE", ""),
        max_restarts=numbers["--max-restarts"],
        min_ranks=min(numbers["--min-ranks"] or world_size, world_size),
        steady_s=_integer(environ, "CKPTD_HOST_STEADY_S", 300),
        stop_s=_integer(environ, "CKPTD_HOST_STOP_S", 30),
        silence_s=_silence_s(environ),
        step_deadline_s=_step_deadline_s(environ),
        node=_node(environ),
        may_fork=may_fork,
        warm=numbers["--warm"],
        warm_s=numbers["--warm-for"],
        reroute=reroute,
    )


def place_in_step(environ: Mapping[str, str]) -> dict[str, str]:
    """What a task of a Slurm step lacks for ``init_process_group("env://")``, from the variables of `srun`.

    Nothing where a launcher has set RANK, or where this is no task of a step: a batch script has
    SLURM_PROCID, too. The port is one for each step of each start of a job, so that two jobs on a node seldom
    meet; MASTER_PORT sets another.

    Raises:
        UsageError: WORLD_SIZE is not the number of tasks, or the variables of `srun` cannot be read.
    """
    tasks = environ.get("SLURM_STEP_NUM_TASKS", "")
    if not tasks or environ.get("RANK"):
        return {}
    if environ.get("WORLD_SIZE", tasks) != tasks:
        raise UsageError(
            f"WORLD_SIZE={environ['WORLD_SIZE']}, and this step of Slurm has {tasks} tasks: unset WORLD_SIZE"
        )
    start = [environ.get(name, "0") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")]
    one_node = environ.get("SLURM_STEP_NUM_NODES") == "1"
    place = {
        "RANK": f"{_integer(environ, 'SLURM_PROCID', 0)}",
        "LOCAL_RANK": f"{_integer(environ, 'SLURM_LOCALID', 0)}",
        "WORLD_SIZE": tasks,
        "MASTER_ADDR": "127.0.0.1" if one_node else _first_host(environ.get("SLURM_STEP_NODELIST", "")),
        "MASTER_PORT": f"{_STEP_PORTS[zlib.crc32('.'.join(start).encode()) % len(_STEP_PORTS)]}",
    }
    return {name: text for name, text in place.items() if not environ.get(name)}


def _first_host(nodes: str) -> str:
    """Of a node list as ``gpu[007-009,12]-a,login``: here ``gpu007-a``."""
    first = re.match(r"(?:[^,\[\]]|\[[^\]]*\])+", nodes)
    if first is None:
        raise UsageError(f"SLURM_STEP_NODELIST={nodes!r} names no node: set MASTER_ADDR")
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first[0])


def interpreter_flags(command: Sequence[str]) -> tuple[str, ...]:
    """The interpreter's own options in the command of this process, such as ``-u``."""
    for index, word in enumerate(command):
        if word == f"-m{_MODULE}" or list(command[index : index + 2]) == ["-m", _MODULE]:
            return tuple(command[1:index])
    return ()


def _integer(environ: Mapping[str, str], name: str, default: int) -> int:
    text = environ.get(name, "")
    if not text:
        return default
    if not text.isdecimal():
        raise UsageError(f"{name}={text!r} is not a number from 0 on")
    return int(text)


def _silence_s(environ: Mapping[str, str]) -> int:
    name = "CKPTD_HOST_SILENCE_S"
    silence_s = _integer(environ, name, 2)
    if not 1 <= silence_s <= _SILENCE_MAX_S:
        raise UsageError(f"{name}={silence_s}: a host may be silent for 1 to {_SILENCE_MAX_S} seconds")
    return silence_s


def _step_deadline_s(environ: Mapping[str, str]) -> float | None:
    name = "CKPTD_HOST_STEP_DEADLINE_S"
    text = environ.get(name, "") or "learned"
    if text == "off":
        return math.inf
    if text == "learned":
        return None
    deadline_s = _integer(environ, name, 0)
    if not deadline_s:
        raise UsageError(f"{name}=0: pass seconds from 1 on, 'learned' or 'off'")
    return float(deadline_s)


def _store(environ: Mapping[str, str]) -> tuple[str, int]:
    address, port = environ.get("MASTER_ADDR", ""), _integer(environ, "MASTER_PORT", 0)
    if port > _PORT_MAX:
        raise UsageError(f"MASTER_PORT={port} is not a port")
    return (address, port) if address and port else ("", 0)


def _node(environ: Mapping[str, str]) -> int | None:
    for name in ("GROUP_RANK", "SLURM_NODEID"):
        if environ.get(name):
            return _integer(environ, name, 0)
    return None


def _on_one_machine(environ: Mapping[str, str], world_size: int) -> bool:
    for nodes in ("GROUP_WORLD_SIZE", "SLURM_STEP_NUM_NODES", "SLURM_NNODES"):
        if environ.get(nodes):
            return environ[nodes] == "1"
    return world_size == 1 or environ.get("LOCAL_WORLD_SIZE") == str(world_size)


def place_without(
    environ: Mapping[str, str], ranks: Collection[int], nodes: Collection[int]
) -> dict[str, str]:
    """What a trainer's environment says of its place in the job when ranks and nodes of the start are lost.

    Those that are left keep their order, so they close up. Without losses nothing is to be said.
    """
    if not ranks:
        return {}
    place = {}
    for lost, of, number in (
        (ranks, "RANK", "WORLD_SIZE"),
        (ranks, "ROLE_RANK", "ROLE_WORLD_SIZE"),
        (nodes, "GROUP_RANK", "GROUP_WORLD_SIZE"),
    ):
        if environ.get(of) and environ.get(number):
            own = int(environ[of])
            place[of] = str(own - sum(each < own for each in lost))
            place[number] = str(int(environ[number]) - len(lost))
    return place


def _job_key(environ: Mapping[str, str]) -> str:
    names = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE")
    slurm = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
    parts = [environ.get(name, "") for name in (*names, *slurm)]
    if "TORCHELASTIC_RUN_ID" in environ:
        parts.append(f"{os.getppid()}")  # the agent: another torchrun is another job
    return f"{zlib.crc32(os.fsencode(chr(0).join(parts))):08x}-{environ.get('MASTER_PORT', '0')}"
