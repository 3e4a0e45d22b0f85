"""`ckptctl`: inspect a node's daemon, its snapshots, and the checkpoints in object storage.

Exit codes are in `ckptd.ctl.command.EXIT_MEANINGS`. With `--json` the answer is one JSON document on stdout
(with `--follow` and `--watch`: one per line). An error is a document too: ``{"error": …, "exit_status": …}``.
Error messages go to stderr in either case.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from functools import partial

import msgspec

import ckptd
from ckptd.config.daemon_config import ConfigError
from ckptd.core.export_plan import DamagedSnapshot, ExportError
from ckptd.ctl.advise_command import add_advise_command
from ckptd.ctl.checkpoints_command import add_checkpoints_commands
from ckptd.ctl.command import (
    EXIT_DAMAGED,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_MEANINGS,
    EXIT_NO_DAEMON,
    EXIT_REFUSED,
    EXIT_USAGE,
    Command,
    CommandError,
    CommandOutcome,
    Commands,
    add_lose,
    show,
)
from ckptd.ctl.daemon_commands import add_daemon_commands, add_wait
from ckptd.ctl.export_command import add_export_commands
from ckptd.ctl.keys_command import add_keys_commands
from ckptd.ctl.lifecycle.process_commands import add_process_commands
from ckptd.ctl.lifecycle.support_command import add_support_command
from ckptd.ctl.peers_command import add_peers_commands
from ckptd.ctl.usage.completion import add_completion_command
from ckptd.ctl.usage.watching import watch
from ckptd.errors import DaemonUnavailable, ElasticError
from ckptd.printable import for_json, for_terminal
from ckptd.storage.checkpoints.signing import SigningError
from ckptd.transport.access.keys import KeysError
from ckptd.transport.wire import RefusedError, RequestTimeout, WireError

__all__ = ["command_parser", "main", "parse"]

# The first class that fits decides.
_EXIT_STATUS: dict[type[Exception], int] = {
    RequestTimeout: EXIT_NO_DAEMON,
    DaemonUnavailable: EXIT_NO_DAEMON,
    RefusedError: EXIT_REFUSED,
    WireError: EXIT_NO_DAEMON,
    DamagedSnapshot: EXIT_DAMAGED,
    ExportError: EXIT_REFUSED,
    ConfigError: EXIT_USAGE,
    KeysError: EXIT_USAGE,
    SigningError: EXIT_USAGE,
    ElasticError: EXIT_FAILED,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of `ckptctl`; returns the exit code."""
    args = parse(argv)
    command: Command = args.function
    try:
        if getattr(args, "refresh_s", None):
            return watch(args, command)
        outcome = command(args)
        show(args, outcome)
        return outcome.code
    except CommandError as error:
        return _fail(args, error.code, str(error))
    except tuple(_EXIT_STATUS) as error:
        status = next(status for kind, status in _EXIT_STATUS.items() if isinstance(error, kind))
        unavailable = isinstance(error, RequestTimeout | DaemonUnavailable)
        hint = " (is it running? `ckptctl doctor` looks for causes)" if unavailable else ""
        return _fail(args, status, f"{error}{hint}")
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0  # the reader, such as `head`, has seen enough


def _fail(args: argparse.Namespace, status: int, message: str) -> int:
    message = for_terminal(message)
    print(f"ckptctl: {message}", file=sys.stderr)
    if args.json:
        print(for_json(msgspec.json.encode({"error": message, "exit_status": status}).decode()))
    return status


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The arguments; exits with a message if they are wrong."""
    args = command_parser().parse_args(argv)
    if args.timeout is None:
        args.timeout = args.default_timeout_s
    return args


def command_parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    common = _global_options(before=False)
    which = argparse.ArgumentParser(add_help=False)
    which.add_argument("--job", help="only this job")
    which.add_argument("--run", help="only this run")
    which.add_argument("--rank", type=int, help="only this rank")

    parser = argparse.ArgumentParser(
        prog="ckptctl",
        description="Inspect a node's daemon, its snapshots, and the checkpoints in object storage.",
        parents=[_global_options(before=True)],
        epilog=f"Exit codes: {'; '.join(f'{code}: {text}' for code, text in EXIT_MEANINGS.items())}.",
    )
    parser.add_argument("--version", action="version", version=f"ckptctl {ckptd.__version__}")
    commands = Commands(parser, "COMMAND", common)
    add_daemon_commands(commands, which)
    add_export_commands(commands, which)
    add_peers_commands(commands, which)
    elastic = commands.add("elastic", None, "show or plan the placement of experts, and rate it")
    _add_elastic_commands(Commands(elastic, "QUESTION", common, which))
    add_keys_commands(commands, common)
    add_advise_command(commands)
    add_checkpoints_commands(commands, common)
    add_process_commands(commands)
    add_support_command(commands)
    add_wait(commands)
    add_completion_command(commands, parser)
    return parser


def _global_options(*, before: bool) -> argparse.ArgumentParser:
    """A parser with the options that are allowed before the command and after it.

    Args:
        before: for the place before the command. After it, an option without a value must not replace the
            one that was given before it.
    """
    default = None if before else argparse.SUPPRESS
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument(
        "--json", action="store_true", default=False if before else default, help="print one JSON document"
    )
    parser.add_argument(
        "--endpoint",
        default=default,
        help="address of the daemon (default: CKPTD_LISTEN, or the socket in the runtime folder)",
    )
    if before:
        text = "seconds to wait (default: that of the command)"
        parser.add_argument("--timeout", type=float, help=text)
    return parser


# -- elastic: arguments here, because the other commands must not import NumPy -----------------------


def _add_elastic_commands(commands: Commands) -> None:
    def add(name: str, text: str) -> argparse.ArgumentParser:
        parser = commands.add(name, partial(_elastic, name), text)
        parser.add_argument(
            "--layer", type=int, action="append", help="show the map of this layer (may be repeated)"
        )
        parser.add_argument(
            "--color",
            choices=("auto", "always", "never"),
            default="auto",
            help="use colors (default: if stdout is a terminal)",
        )
        return parser

    file_text = "JSON file with loads and nodes (docs/elastic.md, section 10); default: the running job"
    text = "plan a new placement of experts: maps, recovery, tokens and transfers"
    add("plan", text).add_argument("file", nargs="?", help=file_text)
    add("show", "show the placements that running jobs reported to this daemon")
    text = "predict the loss of nodes: the lost experts, their sources and the new placement"
    lost = add("whatif", text)
    lost.add_argument("file", nargs="?", help=file_text)
    add_lose(lost)


def _elastic(question: str, args: argparse.Namespace) -> CommandOutcome:
    try:  # here, because no other command needs NumPy and SciPy
        from ckptd.ctl.elastic_command import QUESTIONS
    except ImportError as error:
        hint = "`ckptctl elastic` plans with NumPy and SciPy: pip install 'ckptd[elastic]'"
        raise CommandError(f"{error}; {hint}") from error
    return QUESTIONS[question](args)
