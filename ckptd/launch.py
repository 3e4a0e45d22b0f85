"""Finds the daemon of this user, or starts one that outlives this process.

The started daemon is an ordinary `ckptd run` in a session of its own, so that no signal to the trainer's
process group reaches it. It exits when nobody has needed it for an hour, and leaves the segments, which the
next one adopts.
"""

from __future__ import annotations

import fcntl
import logging
import os
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import ckptd
from ckptd.config.daemon_config import ConfigError, load_config, trusted_users
from ckptd.config.runtime_dir import UnusableFolder, is_operated, private_folder, settings_of_unit
from ckptd.config.settings import given_settings
from ckptd.errors import DaemonUnavailable
from ckptd.transport.access.local_trust import own_users, user_name
from ckptd.transport.messages import Ping, Pong
from ckptd.transport.wire import ControlClient, RefusedError, RequestTimeout, WireError

logger = logging.getLogger(__name__)

_IDLE_EXIT_S = 3600
_PROBE_S = 0.5
_START_S = 30.0
_LOG_TAIL = 20
_LOG_LIMIT_BYTES = 16 << 20  # a longer log is moved aside before a daemon is started


def ensure_daemon(
    runtime_dir: str | None = None, *, timeout_s: float = _START_S, **overrides: str | float
) -> str:
    """Endpoint of a daemon that answers; one is started if there is none.

    Several processes may call this at once: one starts the daemon, all get the same endpoint. If an
    operator runs the daemon (`ckptd run`), none is started while that one is away: it would have another
    store, other peers and another quota. Nor is one if CKPTD_DAEMON_USER names another user as the daemon's.

    Args:
        runtime_dir: folder of the daemon; default as for `ckptd run`.
        overrides: further settings for a daemon that is started, by key.

    Raises:
        DaemonUnavailable: none answers within `timeout_s`; the message ends with its log, or says that an
            operator's is away.
    """
    flags = {key: str(value) for key, value in overrides.items()}
    flags.setdefault("idle_exit_s", str(_IDLE_EXIT_S))
    flags.setdefault("started_by_trainer", "true")
    if runtime_dir is not None:
        flags["runtime_dir"] = runtime_dir
    try:
        config = load_config(flags).config
    except ConfigError as error:
        raise DaemonUnavailable(str(error), operation="start daemon") from error
    if answers(config.listen):
        return config.listen
    deadline = time.monotonic() + timeout_s
    if user := trusted_users() - own_users():
        _wait_for_daemon_of(max(user), config.listen, deadline)
        return config.listen
    try:
        folder = private_folder(config.runtime_dir, "runtime folder")
    except UnusableFolder as error:
        raise DaemonUnavailable(str(error), operation="start daemon") from error
    if _operator_is_back(folder, config.listen, deadline):
        return config.listen
    with _only_one(folder, deadline):
        if not _operator_is_back(folder, config.listen, deadline):
            _start(folder, config.listen, flags, deadline)
    return config.listen


def connect(endpoint: str, timeout_s: float) -> ControlClient:
    """A connection to a daemon that runs as one of the users whom this process trusts.

    Raises:
        WireError: the endpoint cannot be used; ``untrusted``: another user may have made it.
        DaemonUnavailable: CKPTD_DAEMON_USER names nobody.
    """
    try:
        users = trusted_users()
    except ConfigError as error:
        raise DaemonUnavailable(str(error), operation="find daemon") from error
    return ControlClient(endpoint, timeout_s, users=users)


def answers(endpoint: str, timeout_s: float = _PROBE_S) -> bool:
    """Whether a daemon of our protocol answers.

    Raises:
        DaemonUnavailable: what answers has another protocol version, or another user may have made the
            endpoint.
    """
    try:
        with connect(endpoint, timeout_s) as client:
            return isinstance(client.request(Ping()), Pong)
    except RequestTimeout:
        return False
    except (WireError, RefusedError) as error:
        if isinstance(error, WireError) and error.code == "untrusted":
            raise DaemonUnavailable(str(error), operation="find daemon") from error
        raise DaemonUnavailable(
            f"what answers on {endpoint} cannot be used: {error}",
            operation="find daemon",
            hint="stop the daemon of the other version (its segments stay), or set "
            "CKPTD_RUNTIME_DIR to another folder",
        ) from error


def unexpected(given: Mapping[str, str]) -> str:
    """How a daemon differs from this process's environment; "" if it does not.

    Args:
        given: its settings, as `given_settings` makes them.

    Raises:
        DaemonUnavailable: the environment has a setting that no daemon can have.
    """
    try:
        loaded = load_config()
    except ConfigError as error:
        raise DaemonUnavailable(str(error), operation="find daemon") from error
    here = given_settings(loaded.config)
    return "; ".join(
        f"CKPTD_{key.upper()} is {here[key] or 'empty'!r} for this trainer and {text or 'empty'!r} "
        "for the daemon"
        for key, text in sorted(given.items())
        if key in here and loaded.sources[key].startswith("environment") and here[key] != text
    )


def _operator_is_back(folder: Path, endpoint: str, deadline: float) -> bool:
    """Whether a daemon answers; an operator's daemon is waited for."""
    while not answers(endpoint):
        operated = is_operated(folder)
        if operated is None:
            return False
        if time.monotonic() > deadline:
            raise DaemonUnavailable(
                f"the daemon on {endpoint} was started by an operator and is away; a trainer "
                "starts none in its place",
                operation="find daemon",
                hint="start it again (`ckptd run`, or its service). If there is to be none any more, remove "
                f"{operated}: trainers then start their own",
            )
        time.sleep(0.1)
    return True


def _wait_for_daemon_of(user: int, endpoint: str, deadline: float) -> None:
    """Wait for it, as at the boot of a node, where trainers may come first."""
    while not answers(endpoint):
        if time.monotonic() > deadline:
            raise DaemonUnavailable(
                f"no daemon answers on {endpoint}; CKPTD_DAEMON_USER says that user {user_name(user)} "
                "runs it, so a trainer starts none",
                operation="find daemon",
                hint="start the daemon (its service, or its pod on this node) and look at its log; or unset "
                "CKPTD_DAEMON_USER, and trainers start their own",
            )
        time.sleep(0.1)


@contextmanager
def _only_one(folder: Path, deadline: float) -> Iterator[None]:
    """Hold the folder's start lock; other processes wait for it, bounded."""
    fd = os.open(folder / ".start.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() > deadline:
                    raise DaemonUnavailable(
                        f"another process has been starting a daemon in {folder} for too long",
                        operation="start daemon",
                        hint=_tail(folder / "ckptd.log"),
                    ) from error
                time.sleep(0.05)
        yield
    finally:
        os.close(fd)


def _start(folder: Path, endpoint: str, flags: Mapping[str, str], deadline: float) -> None:
    if "CKPTD_RUNTIME_DIR" not in os.environ and (found := settings_of_unit()):
        logger.warning(
            "ckptd: this trainer starts a daemon of its own, with a quota of its own, beside that of a "
            "service (%s). To use the service's, export %s",
            *found,
        )
    log = folder / "ckptd.log"
    if log.exists() and log.stat().st_size > _LOG_LIMIT_BYTES:
        log.replace(folder / "ckptd.log.old")
    command = [sys.executable, "-m", "ckptd", "run"]
    # Everybody on the host can read a command line, and options may hold credentials: use the environment.
    settings = {"CKPTD_" + key.upper(): text for key, text in flags.items()}
    mode = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
    with open(os.open(log, mode, 0o600), "ab") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd="/",
            env=_environment() | settings,
            start_new_session=True,
        )
    while not answers(endpoint):
        code = process.poll()
        if code is not None or time.monotonic() > deadline:
            how = "is not answering yet" if code is None else f"exited with code {code}"
            raise DaemonUnavailable(
                f"the daemon that was started {how} (`{' '.join(command)}`)",
                operation="start daemon",
                hint=_tail(log),
            )
    # The daemon outlives us on purpose; without this Python would warn about a running child.
    process.returncode = 0


def _environment() -> dict[str, str]:
    """Our environment; a package that runs from its sources stays importable anywhere."""
    root = str(Path(ckptd.__file__).resolve().parent.parent)
    if root in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib")):
        return dict(os.environ)
    known = os.environ.get("PYTHONPATH", "")
    return dict(os.environ, PYTHONPATH=os.pathsep.join(filter(None, [root, known])))


def _tail(log: Path) -> str:
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        return f"its log cannot be read: {error}"
    return f"the end of {log}:\n" + "\n".join(lines[-_LOG_TAIL:])
