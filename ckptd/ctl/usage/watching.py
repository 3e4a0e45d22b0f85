"""`--watch`: an answer that is shown again and again, until Ctrl-C."""

from __future__ import annotations

import argparse
import shutil
import sys
import time

from ckptd.ctl.command import EXIT_NO_DAEMON, Command, CommandOutcome, show
from ckptd.errors import DaemonUnavailable
from ckptd.transport.wire import RequestTimeout

_REFRESH_S = 2.0
_REFRESH_MIN_S = 0.1
_REFRESH_MAX_S = 86400.0
_HOME = "\x1b[H\x1b[J"  # the cursor to the top, and clear what is below


def add_watch(parser: argparse.ArgumentParser) -> None:
    """Add ``--watch``."""
    parser.add_argument(
        "--watch",
        dest="refresh_s",
        type=_period,
        nargs="?",
        const=_REFRESH_S,
        metavar="SECONDS",
        help=f"show it again every so many seconds (default {_REFRESH_S:g}) until Ctrl-C",
    )


def _period(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds") from None
    if not _REFRESH_MIN_S <= seconds <= _REFRESH_MAX_S:
        raise argparse.ArgumentTypeError(f"{text} is not between {_REFRESH_MIN_S:g} and {_REFRESH_MAX_S:g}")
    return seconds


def watch(args: argparse.Namespace, command: Command) -> int:
    """Show the answers of a command until Ctrl-C, which is the usual end; returns 0.

    A daemon that goes away after the first answer, as in an upgrade, is waited for.
    """
    try:
        _show_in_place(args, command(args))
        while True:
            time.sleep(args.refresh_s)
            _show_in_place(args, _answer(args, command))
    except KeyboardInterrupt:
        return 0


def _answer(args: argparse.Namespace, command: Command) -> CommandOutcome:
    try:
        return command(args)
    except (RequestTimeout, DaemonUnavailable) as error:
        return CommandOutcome({"error": str(error), "exit_status": EXIT_NO_DAEMON}, str(error))


def _show_in_place(args: argparse.Namespace, outcome: CommandOutcome) -> None:
    """On a terminal the answer replaces the one before; what does not fit is cut."""
    if not args.json and sys.stdout.isatty():
        height = shutil.get_terminal_size().lines - 1
        lines = outcome.text.splitlines()
        if len(lines) > height:
            lines[height - 1 :] = [f"({len(lines) - height + 1} more lines)"]
        outcome = CommandOutcome(outcome.answer, "\n".join(lines))
        sys.stdout.write(_HOME)
    show(args, outcome)
    sys.stdout.flush()
