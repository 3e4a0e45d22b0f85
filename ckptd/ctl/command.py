"""What the commands of `ckptctl` share: outcomes and errors, the daemon, arguments, and the progress bar."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import math
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO, TypeVar

import msgspec

from ckptd.config.daemon_config import LoadedConfig, default_endpoint, load_config
from ckptd.config.runtime_dir import settings_of_unit
from ckptd.core.recovery.global_plan import VERIFY_ITERATIONS
from ckptd.ctl.usage.examples import EXAMPLES
from ckptd.errors import DaemonUnavailable
from ckptd.launch import connect
from ckptd.printable import for_json, for_terminal, one_line
from ckptd.storage.checkpoints.names import check_name
from ckptd.storage.stores.open_store import BACKENDS
from ckptd.transport import messages as m
from ckptd.transport.wire import ControlClient, RefusedError
from ckptd.units import format_age, format_bytes, format_table

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_NO_DAEMON = 3
EXIT_REFUSED = 4
EXIT_DAMAGED = 5
EXIT_INTERRUPTED = 130
# The help and docs/reference/ckptctl.md show this table.
EXIT_MEANINGS = {
    0: "done",
    EXIT_FAILED: "a check failed",
    EXIT_USAGE: "wrong usage, or a store that cannot be used",
    EXIT_NO_DAEMON: "no daemon answers",
    EXIT_REFUSED: "refused, or not found",
    EXIT_DAMAGED: "the snapshot is damaged",
    EXIT_INTERRUPTED: "interrupted (Ctrl-C)",
}

_UNITS_S = {"": 1, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}

CONNECT_S = 10.0  # requests that take longer set their own limit
_LISTENER_S = 3.0  # a daemon that replaces its own image does not listen for a moment
_LISTENER_POLL_S = 0.05

_Reply = TypeVar("_Reply", bound=msgspec.Struct)


@dataclass(frozen=True, slots=True)
class CommandOutcome:
    """The result of a command: the answer for ``--json``, its text, and the exit status."""

    answer: Any
    text: str
    code: int = 0


Command = Callable[[argparse.Namespace], CommandOutcome]


class CommandError(RuntimeError):
    """The reason why a command ends, with its exit status."""

    def __init__(self, text: str, code: int = EXIT_USAGE) -> None:
        super().__init__(text)
        self.code = code


def show(args: argparse.Namespace, outcome: CommandOutcome) -> None:
    """Print the answer as JSON, or its text."""
    if args.json:
        print(for_json(msgspec.json.encode(outcome.answer).decode()))
    else:
        print(for_terminal(outcome.text))


def records(rows: Sequence[Mapping[str, object]]) -> str:
    """A table of at least one row; the keys of the rows are its header."""
    return format_table(list(rows[0]), [list(row.values()) for row in rows])


# -- the daemon -----------------------------------------------------------------------------------


def endpoint_of(args: argparse.Namespace) -> str:
    """``--endpoint``, else the endpoint at which clients expect the daemon.

    Raises:
        CommandError: ``--endpoint`` is none.
    """
    if args.endpoint and not args.endpoint.startswith("ipc://"):
        raise CommandError(
            f"--endpoint {args.endpoint}: pass ipc:// and the path of the socket, such as "
            "ipc:///run/ckptd/ckptd.sock"
        )
    return args.endpoint or default_endpoint()


def settings_of(args: argparse.Namespace) -> LoadedConfig:
    """The configuration of a daemon that this user starts here."""
    return load_config({"listen": args.endpoint} if args.endpoint else {})


def connected(args: argparse.Namespace) -> ControlClient:
    """A connection to the daemon.

    Raises:
        DaemonUnavailable: there is no socket, or no process listens at it.
        WireError: another user may have made the socket.
    """
    endpoint = endpoint_of(args)
    timeout_s = min(args.timeout, CONNECT_S)
    try:
        there = Path(endpoint.removeprefix("ipc://")).exists()
    except PermissionError:
        there = True  # in a folder that this user may not enter: connecting says so
    if not there:  # connecting would wait for the socket
        raise DaemonUnavailable(f"no daemon serves {endpoint}: there is no socket{_of_unit(args)}")
    client = connect(endpoint, timeout_s)
    deadline = time.monotonic() + min(timeout_s, _LISTENER_S)
    try:
        while not client.try_connect():
            if time.monotonic() > deadline:
                text = "no process accepts connections at the socket (was its daemon killed?)"
                raise DaemonUnavailable(f"no daemon serves {endpoint}: {text}")
            time.sleep(_LISTENER_POLL_S)
    except BaseException:
        client.close()
        raise
    return client


def _of_unit(args: argparse.Namespace) -> str:
    """Where the daemon of a shipped unit has its socket, if this shell does not say so; "" if none has."""
    found = None if args.endpoint else settings_of_unit()
    return "" if found is None else f", but one at {found[0]}: export {found[1]}"


def ask(
    args: argparse.Namespace, request: m.Request, kind: type[_Reply], *, timeout_s: float | None = None
) -> _Reply:
    """The daemon's reply to one request."""
    with connected(args) as client:
        return client.ask(request, kind, timeout_s=timeout_s)


def near(name: str, known: Iterable[str]) -> str:
    """The known names that are most like this one, as the end of an error message; "" if none is."""
    close = difflib.get_close_matches(name, sorted(set(known)))
    return f"; did you mean {' or '.join(close)}?" if close else ""


def unknown_run(job: str | None, run: str | None, known: Iterable[tuple[str, str]]) -> RefusedError:
    """The error for a job or run that this node does not know, with the names that are near."""
    names = [f"{each_job}/{each_run}" for each_job, each_run in known]
    jobs = [name.partition("/")[0] for name in names]
    if job is not None and (run is None or job not in jobs):
        found = f"job {job}", near(job, jobs)
    elif job is None:
        found = f"run {run}", near(run or "", [name.partition("/")[2] for name in names])
    else:
        found = f"run {job}/{run}", near(f"{job}/{run}", names)
    text = "this node knows no {}{}".format(*found)
    return RefusedError("not_found", f"{text}; known runs: {', '.join(names) or 'none'}")


# -- arguments ------------------------------------------------------------------------------------


class _Help(argparse.HelpFormatter):
    """Keeps the lines of a text that has several."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text if "\n" in text else super()._fill_text(text, width, indent)


class Commands:
    """The subcommands of a parser.

    Args:
        parents: parsers with the options that all subcommands have.
    """

    def __init__(
        self, parser: argparse.ArgumentParser, metavar: str, *parents: argparse.ArgumentParser
    ) -> None:
        parser._positionals.title = "commands"  # with `title=` they would come after the options
        self._subparsers = parser.add_subparsers(required=True, metavar=metavar)
        self._parents = parents

    def of(
        self, parser: argparse.ArgumentParser, metavar: str, *parents: argparse.ArgumentParser
    ) -> Commands:
        """The subcommands of one of these commands, with the same options and those of ``parents``."""
        return Commands(parser, metavar, *self._parents, *parents)

    def add(
        self,
        name: str,
        function: Command | None,
        text: str,
        *parents: argparse.ArgumentParser,
        timeout_s: float = 10.0,
    ) -> argparse.ArgumentParser:
        """Add a command that runs ``function``; None: one that has subcommands.

        Args:
            timeout_s: default of ``--timeout``. Each command has an option object of its own: argparse
                shares those of ``parents``, and a default set for one command would be that of all.
        """
        parser = self._subparsers.add_parser(
            name,
            help=text,
            description=f"{text[0].upper()}{text[1:]}.",
            parents=[*self._parents, *parents],
            formatter_class=_Help,
        )
        text = f"seconds to wait (default {timeout_s:g})"
        parser.add_argument(
            "--timeout", type=seconds, metavar="SECONDS", default=argparse.SUPPRESS, help=text
        )
        if function is not None:
            parser.set_defaults(function=function, default_timeout_s=timeout_s)
            lines = EXAMPLES.get(parser.prog, ())
            parser.epilog = "\n  ".join(["examples:" if len(lines) > 1 else "example:", *lines])
        return parser


def seconds(text: str) -> float:
    """Seconds above 0; for ``type=`` of an argument.

    Raises:
        argparse.ArgumentTypeError: they are none.
    """
    with contextlib.suppress(ValueError):
        if 0 < (found := float(text)) < math.inf:
            return found
    raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")


def count_from(least: int) -> Callable[[str], int]:
    """Whole numbers from ``least`` on; for ``type=`` of an argument."""

    def parse(text: str) -> int:
        with contextlib.suppress(ValueError):
            if (found := int(text)) >= least:
                return found
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {least} on")

    return parse


def duration(text: str) -> float:
    """Seconds from a time such as 10m; for ``type=`` of an argument.

    Raises:
        argparse.ArgumentTypeError: it is none.
    """
    found = re.fullmatch(r"(\d{1,9}(?:\.\d{1,3})?)([a-z]*)", text)
    if found is None or found[2] not in _UNITS_S:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time such as 30s, 10m, 6h or 7d")
    return float(found[1]) * _UNITS_S[found[2]]


TIME: Mapping[str, Any] = {"type": duration, "metavar": "TIME"}
"""Of an argument that is a `duration`."""


def add_run(
    parser: argparse.ArgumentParser | argparse._ArgumentGroup,
    nargs: str | None = None,
    *,
    job_help: str | None = None,
) -> None:
    """Add JOB and RUN, which are checked as names in a store."""
    parser.add_argument("job", metavar="JOB", type=_name_value("job"), nargs=nargs, help=job_help)
    parser.add_argument("run", metavar="RUN", type=_name_value("run"), nargs=nargs)


def add_store_options(parser: argparse.ArgumentParser, store: str = "") -> None:
    """Add the options that name a store; ``store`` is the help of ``--store`` ("": no such option)."""
    if store:
        parser.add_argument("--store", metavar="URL", help=store)
    parser.add_argument("--store-options", metavar="JSON", help='such as \'{"region": "eu-1"}\'')
    parser.add_argument("--store-backend", choices=BACKENDS, help="library that accesses the store")


def which_run(*, rank: str = "") -> argparse.ArgumentParser:
    """A parser with ``--job`` and ``--run``, and with ``--rank`` if that has a help."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--job", help="only this job")
    parser.add_argument("--run", help="only this run")
    if rank:
        parser.add_argument("--rank", type=count_from(0), help=rank)
    return parser


def add_lose(parser: argparse.ArgumentParser) -> None:
    """Add ``--lose``."""
    parser.add_argument(
        "--lose",
        required=True,
        help="the lost nodes, by name or label: node=host-3,rack=A (nodes that match any of these)",
    )


def add_verify_iterations(parser: argparse.ArgumentParser) -> None:
    """Add ``--verify-iterations``."""
    parser.add_argument(
        "--verify-iterations",
        type=count_from(0),
        default=VERIFY_ITERATIONS,
        metavar="N",
        help="value of RecoveryOptions(verify_iterations=N) in the trainers (default: %(default)s)",
    )


def _name_value(what: str) -> Callable[[str], str]:
    """An argument that names a job or a run in a store."""

    def parse(text: str) -> str:
        try:
            return check_name(text, what)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return parse


# -- the progress bar -----------------------------------------------------------------------------

_EVERY_S = 0.1
_BAR_CELLS = 24
_CLEAR = "\r\x1b[K"
_RATE_AFTER_S = 0.5  # earlier, a rate is too noisy to show


class ProgressBar:
    """Shown on ``stream`` (stderr) if that is a terminal and ``quiet`` is not set; erased after the block.

    Called by one thread at a time.

    Args:
        what: name of the operation, in a few words.
        total_bytes: total size of the operation; 0 if not known.
    """

    def __init__(
        self,
        what: str,
        total_bytes: int = 0,
        *,
        quiet: bool = False,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._what, self._total_bytes = one_line(what), total_bytes
        self._stream = sys.stderr if stream is None else stream
        self._clock = clock
        self._shown = not quiet and self._stream.isatty()
        self._began_s = clock()
        self._next_s = self._began_s

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._shown:
            self._write(_CLEAR)

    def update(self, done_bytes: int) -> None:
        """Report that ``done_bytes`` of the total are done."""
        now_s = self._clock()
        if not self._shown or now_s < self._next_s:
            return
        self._next_s = now_s + _EVERY_S
        width = shutil.get_terminal_size().columns
        line = progress_line(self._what, done_bytes, self._total_bytes, now_s - self._began_s)
        self._write(_CLEAR + line[: width - 1])

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()


def progress_line(what: str, done_bytes: int, total_bytes: int, elapsed_s: float) -> str:
    """A bar if the total is known, the bytes done, the rate and the time left."""
    rate = done_bytes / elapsed_s if elapsed_s > _RATE_AFTER_S else 0.0
    speed = f", {format_bytes(int(rate))}/s" if rate else ""
    if not total_bytes:
        return f"{what}: {format_bytes(done_bytes)}{speed}"
    done = min(done_bytes, total_bytes)
    full = _BAR_CELLS * done // total_bytes
    bar = "#" * full + "." * (_BAR_CELLS - full)
    left = f", {format_age((total_bytes - done) / rate)} left" if rate else ""
    amount = f"{format_bytes(done)} of {format_bytes(total_bytes)}"
    return f"{what} [{bar}] {100 * done // total_bytes} %, {amount}{speed}{left}"
