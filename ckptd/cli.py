"""`ckptd`: run the daemon of this node. Its exit codes are in `EXIT_MEANINGS`."""

from __future__ import annotations

import argparse
import errno
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields

import zmq

import ckptd
from ckptd.config.daemon_config import ConfigError, field_docs, load_config, render_toml, shown_default
from ckptd.config.runtime_dir import AlreadyRunning, UnusableFolder
from ckptd.config.settings import DaemonConfig
from ckptd.node.daemon import Daemon
from ckptd.printable import for_terminal, set_up_logging

EXIT_USAGE = 2
EXIT_ALREADY_RUNNING = 3
EXIT_UNUSABLE = 4
EXIT_SHORT = 5
# The help shows this table, docs/operations.md a longer one.
EXIT_MEANINGS = {
    0: "stopped in order",
    1: "a bug, with a traceback",
    EXIT_USAGE: "wrong usage, or a setting that cannot be used",
    EXIT_ALREADY_RUNNING: "another daemon uses one of the folders",
    EXIT_UNUSABLE: "a folder or the socket cannot be used",
    EXIT_SHORT: "no descriptors, memory or room were left at the start",
}
# What is short now may be there for the next start.
_SHORTAGES = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.ENOSPC}

_EXIT_CODES = f"Exit codes: {'; '.join(f'{code}: {text}' for code, text in EXIT_MEANINGS.items())}."

logger = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of `ckptd`; returns the exit code."""
    args = _parser().parse_args(argv)
    flags = {
        field.name: value
        for field in fields(DaemonConfig)
        if (value := getattr(args, field.name)) is not None
    }
    try:
        loaded = load_config(flags, file=args.config)
    except ConfigError as error:
        return _fail(error, EXIT_USAGE)
    if args.print_config:
        print(render_toml(loaded), end="")
        return 0
    set_up_logging(loaded.config.log_level, loaded.config.log_format)
    for warning in loaded.warnings:
        logger.warning("%s", warning)
    return _run(loaded.config, lambda: load_config(flags, file=args.config))


def _run(config: DaemonConfig, load: Callable[[], object]) -> int:
    """Serve; after SIGHUP in a new image of this process, with the settings and the code of then."""
    os.nice(max(0, config.nice - os.nice(0)))  # once, however often this process begins anew
    try:
        daemon = _daemon(config, load)
        daemon.run()
    except ConfigError as error:
        return _fail(error, EXIT_USAGE)
    except AlreadyRunning as error:
        return _fail(error, EXIT_ALREADY_RUNNING)
    except UnusableFolder as error:
        short = isinstance(error.__cause__, OSError | zmq.ZMQError) and error.__cause__.errno in _SHORTAGES
        return _fail(error, EXIT_SHORT if short else EXIT_UNUSABLE)
    if daemon.restarts:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until the next image listens
        sys.stdout.flush()
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
    return 0


def _daemon(config: DaemonConfig, load: Callable[[], object]) -> Daemon:
    try:
        # Of a terminal SIGHUP says that it is gone.
        return Daemon(config, None if os.isatty(sys.stderr.fileno()) else load)
    except (OSError, zmq.ZMQError) as error:  # no descriptors, say, or a filesystem that fails
        raise UnusableFolder(f"the daemon cannot start: {error}") from error


def _fail(error: Exception, status: int) -> int:
    print(f"ckptd: {for_terminal(str(error))}", file=sys.stderr)
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ckptd",
        description="Keeps snapshots of training in this node's memory.",
        epilog=_EXIT_CODES,
    )
    parser.add_argument("--version", action="version", version=f"ckptd {ckptd.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    run = commands.add_parser(
        "run",
        help="serve until SIGTERM",
        description="Serve this node until SIGTERM; SIGHUP loads the settings again. Every setting is "
        "a TOML key, an environment variable CKPTD_<KEY> and a flag, in rising precedence.",
        epilog=_EXIT_CODES,
    )
    run.add_argument(
        "--config",
        metavar="FILE",
        help="TOML file with settings (default: CKPTD_CONFIG, or /etc/ckptd/ckptd.toml)",
    )
    run.add_argument(
        "--print-config", action="store_true", help="print the settings and where each came from"
    )
    for field in fields(DaemonConfig):
        run.add_argument(
            "--" + field.name.replace("_", "-"),
            dest=field.name,
            metavar="VALUE",
            nargs="?" if isinstance(field.default, bool) else None,
            const="true" if isinstance(field.default, bool) else None,
            help=f"{field_docs()[field.name]} Allowed: {field.metadata['allowed']}. Default: "
            f"{shown_default(field)}.".replace("%", "%%"),
        )
    return parser
