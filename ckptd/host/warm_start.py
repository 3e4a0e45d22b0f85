"""``python -m ckptd.host --warm RANKS script``: import what a script needs before torchrun starts it here.

A machine that joins a running job spends most of its start with imports, while the other machines, which
torchrun has stopped for its sake, wait. So the zygotes of its ranks are made before torchrun is started. They
wait at sockets in the hosts' folder, the hosts take them over (`ckptd.host.zygotes.zygote_handover`), and end
by themselves if none comes.
"""

from __future__ import annotations

import logging
import os
import select
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from ckptd.host.host_options import HostOptions, UsageError
from ckptd.host.trainer_host import hosts_folder, record_name
from ckptd.host.zygotes.preload import environment_set_by, read_record
from ckptd.host.zygotes.script_main import script_file
from ckptd.host.zygotes.zygote_handover import warm_name
from ckptd.host.zygotes.zygote_link import ZygoteLink, start_zygote

logger = logging.getLogger("ckptd.host")

_RANKS_MAX = 1024
_IMPORT_S = 120.0
_FLAGS = ("-u",)  # with which torchrun starts Python
_OF_WORKERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_RUN_ID")


def workers_environment(environ: Mapping[str, str], ranks: int) -> dict[str, str]:
    """The environment as torchrun passes it to its workers, but for what it says of places and starts."""
    found = dict(environ)
    if ranks > 1:
        found.setdefault("OMP_NUM_THREADS", "1")
    return found


def warm_up(options: HostOptions) -> int:
    """Start the zygotes, wait until they are ready, and leave them behind; the exit code.

    Raises:
        UsageError: the command line cannot be meant.
        UnusableFolder: the runtime folder cannot be used.
    """
    if options.warm > _RANKS_MAX:
        raise UsageError(f"--warm {options.warm}: a machine has at most {_RANKS_MAX} ranks")
    if inside := [name for name in _OF_WORKERS if name in os.environ]:
        raise UsageError(
            f"--warm is a command of its own, before torchrun: {inside[0]} is set, as in a worker"
        )
    options = replace(options, script=replace(options.script, flags=_FLAGS))
    folder, file = hosts_folder(), script_file(options.script)
    if set_early := environment_set_by(file):
        logger.error(
            "nothing is imported ahead: %s sets %s and imports afterwards", file, ", ".join(set_early)
        )
        return 1
    record = folder / record_name(file, os.getcwd())
    _, unfit = read_record(record)
    if unfit:
        logger.info("only torch is imported ahead: %s", unfit)
    begun, modules = time.monotonic(), 0
    for from_script in (True, False) if not unfit else (False,):
        zygotes, unfit = _ready(options, record, from_script=from_script)
        if not unfit:
            break
        logger.warning("%s: %s", "only torch is imported ahead" if from_script else "nothing is", unfit)
    if unfit:
        return 1
    for local_rank, zygote in enumerate(zygotes):
        name = warm_name(options.script, local_rank)
        zygote.leave_behind(folder, name, None, within_s=options.warm_s)
        modules = max(modules, zygote.modules)
    logger.info(
        "%d modules are imported for %d ranks after %.1f s, and wait %d s for torchrun",
        modules,
        len(zygotes),
        time.monotonic() - begun,
        options.warm_s,
    )
    return 0


def _ready(options: HostOptions, record: Path, *, from_script: bool) -> tuple[list[ZygoteLink], str]:
    """The zygotes once all are ready; or none, and why they are of no use."""
    zygotes: list[ZygoteLink] = []
    try:
        environment = workers_environment(os.environ, options.warm)
        for _ in range(options.warm):
            one = start_zygote(
                options.script,
                record if from_script else None,
                environment=environment,
                own_session=True,
                script_imports=from_script,
            )
            zygotes.append(one)
        until = time.monotonic() + _IMPORT_S
        for zygote in zygotes:
            if why := _unfit(zygote, until):
                break
        else:
            return zygotes, ""
    except OSError as error:
        why = f"no process could be made: {error}"
    for zygote in zygotes:
        zygote.end()
    return [], why


def _unfit(zygote: ZygoteLink, until: float) -> str:
    """Wait until the zygote says that it is ready; or why it is not."""
    while not zygote.ready:
        poll = select.poll()
        poll.register(zygote.fileno(), select.POLLIN)
        if not poll.poll(max(0.0, until - time.monotonic()) * 1e3):
            return f"the imports take longer than {_IMPORT_S:g} s"
        answer = zygote.receive()
        if answer is None:
            return "its process has ended"
        if "unfit" in answer:
            return str(answer["unfit"])
    return ""
