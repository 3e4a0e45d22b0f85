"""`ckptctl stop` and `ckptctl logs`: the process of this node's daemon."""

from __future__ import annotations

import argparse
import os
import select
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ckptd.ctl.command import (
    EXIT_FAILED,
    EXIT_REFUSED,
    CommandError,
    CommandOutcome,
    Commands,
    connected,
    count_from,
    endpoint_of,
    settings_of,
    show,
)
from ckptd.ctl.lifecycle.daemon_process import find_log, listener_pid, unit_of
from ckptd.errors import DaemonUnavailable
from ckptd.units import format_age

_STOP_S = 60.0  # twice the default of drain_timeout_s
_LINES = 100


def add_process_commands(commands: Commands) -> None:
    """Add `stop` and `logs`."""
    text = "end the daemon, as SIGTERM does: filled slots are sealed, and the snapshots stay for the next one"
    stop = commands.add("stop", _stop, text, timeout_s=_STOP_S)
    stop.add_argument("--wait", action="store_true", help="wait until it has ended, for at most --timeout")
    text = "print the end of the daemon's log: its file, or the journal of its unit"
    logs = commands.add("logs", _logs, text)
    logs.add_argument("-f", "--follow", action="store_true", help="keep printing new lines")
    help_text = f"print at most this many of the last lines (default {_LINES})"
    logs.add_argument("--lines", type=count_from(0), default=_LINES, metavar="N", help=help_text)


# -- stop -----------------------------------------------------------------------------------------


def _stop(args: argparse.Namespace) -> CommandOutcome:
    with _process(args) as (pid, process):
        if unit := unit_of(pid):
            text = f"systemd runs the daemon as {unit.name}, and would start it again: `{unit.stop_command}`"
            raise CommandError(text, EXIT_REFUSED)
        try:
            signal.pidfd_send_signal(process, signal.SIGTERM)
        except PermissionError as error:
            text = f"process {pid} is another user's: stop it as that user"
            raise CommandError(text, EXIT_REFUSED) from error
        ended = args.wait and _has_ended(process, args.timeout)
    answer = {"pid": pid, "ended": ended}
    if args.wait and not ended:
        return CommandOutcome(answer, f"process {pid} has not ended in {args.timeout:g} s", EXIT_FAILED)
    return CommandOutcome(answer, f"process {pid} {'has ended' if ended else 'is asked to end'}")


@contextmanager
def _process(args: argparse.Namespace) -> Iterator[tuple[int, int]]:
    """The daemon's process id, and its pidfd."""
    pid = daemon_pid(args)
    if pid is None:
        raise DaemonUnavailable(f"no daemon serves {endpoint_of(args)}", operation="stop")
    if not pid:
        text = "the daemon runs in another PID namespace (a container): stop it there"
        raise CommandError(text, EXIT_REFUSED)
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError as error:
        raise DaemonUnavailable(f"process {pid} has just ended", operation="stop") from error
    try:
        yield pid, process
    finally:
        os.close(process)


def _has_ended(process: int, timeout_s: float) -> bool:
    poll = select.poll()
    poll.register(process, select.POLLIN)
    return bool(poll.poll(timeout_s * 1e3))


# -- logs -----------------------------------------------------------------------------------------


def _logs(args: argparse.Namespace) -> CommandOutcome:
    """The last lines; with ``--follow`` prints every line, and returns only through an exception."""
    place, note, lines = log_lines(args, args.lines, follow=args.follow)
    if note:
        print(f"ckptctl: {note}", file=sys.stderr)
    if not args.follow:
        found = list(lines)
        return CommandOutcome({"log": place, "lines": found}, "\n".join(found))
    for line in lines:
        show(args, CommandOutcome({"line": line}, line))
        sys.stdout.flush()
    return CommandOutcome({"log": place}, f"the {place} has ended")


def log_lines(
    args: argparse.Namespace, count: int, *, follow: bool = False
) -> tuple[str, str, Iterator[str]]:
    """The place of the daemon's log, whose log it is if none answers, and its last lines.

    Raises:
        CommandError: it has no log that can be read here.
    """
    endpoint = endpoint_of(args)
    folder = settings_of(args).config.runtime_dir
    if args.endpoint:
        folder = str(Path(endpoint.removeprefix("ipc://")).parent)
    try:
        pid = daemon_pid(args)
    except DaemonUnavailable:
        pid = None
    log = find_log(pid or 0, folder)
    note = ""
    if pid is None and log.path is not None:
        age = format_age(max(0.0, time.time() - log.path.stat().st_mtime))
        note = f"no daemon answers; this is the end of the log of the last one, written {age} ago: {log}"
    return str(log), note, log.lines(max(0, count), follow=follow)


def daemon_pid(args: argparse.Namespace) -> int | None:
    """The daemon's process; 0 if it is in another PID namespace, None if none listens.

    Raises:
        DaemonUnavailable: there is no socket.
        WireError: another user may have made the socket.
    """
    with connected(args):  # it asks nothing, so that a daemon of another version, or one that hangs, is found
        return listener_pid(endpoint_of(args))
