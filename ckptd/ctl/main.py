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
from itertools import takewhile
from pkgutil import resolve_name
from typing import NoReturn

import msgspec

import ckptd
from ckptd.config.daemon_config import ConfigError
from ckptd.core.export_plan import DamagedSnapshot, ExportError
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
    seconds,
    show,
    which_run,
)
from ckptd.ctl.usage.watching import watch
from ckptd.errors import DaemonUnavailable, ElasticError
from ckptd.printable import for_json, for_terminal
from ckptd.storage.checkpoints.signing import SigningError
from ckptd.transport.access.keys import KeysError
from ckptd.transport.wire import RefusedError, RequestTimeout, WireError

# What adds which commands. Only the module of the command is imported: all of them take as long again as most
# commands need.
_ADDED_BY = {
    "ckptd.ctl.daemon_commands:add_daemon_commands": (
        *("status", "snapshots", "iterations", "events", "park", "admit", "forget", "unquarantine", "wait"),
    ),
    "ckptd.ctl.view_commands:add_view_commands": ("top", "dash"),
    "ckptd.ctl.doctor:add_doctor_command": ("doctor",),
    "ckptd.ctl.export_command:add_export_commands": ("export", "import"),
    "ckptd.ctl.peers_command:add_peers_commands": ("peers", "whatif", "drill"),
    "ckptd.ctl.audit.audit_command:add_audit_command": ("audit",),
    "ckptd.ctl.main:add_elastic_commands": ("elastic",),
    "ckptd.ctl.keys_command:add_keys_commands": ("keys",),
    "ckptd.ctl.advise_command:add_advise_command": ("advise",),
    "ckptd.ctl.checkpoints_command:add_checkpoints_commands": ("checkpoints", "verify"),
    "ckptd.ctl.lifecycle.process_commands:add_process_commands": ("stop", "logs"),
    "ckptd.ctl.lifecycle.support_command:add_support_command": ("support",),
}
# The order of `ckptctl --help`: what a person on call needs comes first.
_GROUPS = {
    "this node": ("top", "status", "events", "peers", "doctor", "logs", "dash", "wait", "stop", "support"),
    "what can be recovered": ("snapshots", "iterations", "whatif", "drill", "audit", "advise", "elastic"),
    "runs": ("park", "forget", "unquarantine", "admit", "export", "import"),
    "checkpoints in object storage (no daemon needed)": ("checkpoints", "verify"),
    "set-up": ("keys", "completion"),
}
_VALUED = ("--endpoint", "--timeout")  # options before the command that take the next word

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


class _WrongUsage(Exception):
    """The arguments do not fit; by the parser of which command."""

    def __init__(self, parser: argparse.ArgumentParser, text: str) -> None:
        super().__init__(text)
        self.parser = parser


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise _WrongUsage(self, message)


class _GroupedHelp(argparse.HelpFormatter):
    """Lists the commands by `_GROUPS`."""

    def _format_action(self, action: argparse.Action) -> str:
        if not isinstance(action, argparse._SubParsersAction):
            return super()._format_action(action)
        listed = {each.dest: each for each in action._get_subactions()}
        parts = list[str]()
        for title, names in _GROUPS.items():
            parts.append(f"{'':{self._current_indent}}{title}:\n")
            self._indent()
            parts += [super(_GroupedHelp, self)._format_action(listed[n]) for n in names if n in listed]
            self._dedent()
        return "".join(parts)


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
        if isinstance(error, WireError) and error.code == "protocol":
            hint = (
                f". This is ckptctl {ckptd.__version__}; the daemon is another release: run the ckptctl that "
                "was installed with it, or restart it with this release (its snapshots stay)"
            )
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
        _print_error(status, message)
    return status


def _print_error(status: int, message: str) -> None:
    print(for_json(msgspec.json.encode({"error": message, "exit_status": status}).decode()))


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The arguments; exits with a message if they are wrong."""
    words = sys.argv[1:] if argv is None else argv
    try:
        args = command_parser(_command_in(words)).parse_args(words)
    except _WrongUsage as wrong:
        message = for_terminal(str(wrong))
        if "--json" in takewhile(lambda word: word != "--", words):
            _print_error(EXIT_USAGE, message)
        wrong.parser.print_usage(sys.stderr)
        wrong.parser.exit(EXIT_USAGE, f"{wrong.parser.prog}: error: {message}\n")
    if args.timeout is None:
        args.timeout = args.default_timeout_s
    return args


def _command_in(words: Sequence[str]) -> str:
    """The command that the words name; "" if that is not plain."""
    left = iter(words)
    for word in left:
        if word in _VALUED:
            next(left, None)
        elif not word.startswith("-"):
            return word if any(word in names for names in _ADDED_BY.values()) else ""
    return ""


def command_parser(only: str = "") -> argparse.ArgumentParser:
    """The parser of all commands.

    Args:
        only: a command; those that other modules add than its own are left out, and are not imported.
    """
    parser = _Parser(
        prog="ckptctl",
        description="Inspect a node's daemon, its snapshots, and the checkpoints in object storage.",
        parents=[_global_options(before=True)],
        formatter_class=_GroupedHelp,
        epilog=f"Exit codes: {'; '.join(f'{code}: {text}' for code, text in EXIT_MEANINGS.items())}.",
    )
    parser.add_argument("--version", action="version", version=f"ckptctl {ckptd.__version__}")
    commands = Commands(parser, "COMMAND", _global_options(before=False))
    for function, names in _ADDED_BY.items():
        if not only or only in names:
            resolve_name(function)(commands)
    if not only:
        from ckptd.ctl.usage.completion import add_completion_command  # imports what other commands need

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
        parser.add_argument("--timeout", type=seconds, metavar="SECONDS", help=text)
    return parser


# -- elastic: arguments here, because the other commands must not import NumPy -----------------------


def add_elastic_commands(commands: Commands) -> None:
    """Add `elastic` with its subcommands."""
    elastic = commands.add("elastic", None, "show or plan the placement of experts, and rate it")
    questions = commands.of(elastic, "QUESTION", which_run())

    def add(name: str, text: str) -> argparse.ArgumentParser:
        parser = questions.add(name, partial(_elastic, name), text)
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
