"""`ckptctl support`: one archive with what a bug report needs.

It holds no tensors, keys or credentials. Three rules keep it so: no file is copied but the end of the log; of
the environment only settings of ckptd are taken; and every text loses what looks like a secret, and each
secret that this process can see, wherever it stands.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import platform
import re
import resource
import tarfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, replace
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlsplit

import msgspec

import ckptd
from ckptd.config.daemon_config import ConfigError, LoadedConfig, render_toml
from ckptd.config.settings import DaemonConfig
from ckptd.ctl.command import EXIT_USAGE, CommandError, CommandOutcome, Commands, ask, settings_of
from ckptd.ctl.doctor import run_doctor
from ckptd.ctl.lifecycle.process_commands import log_lines
from ckptd.errors import DaemonUnavailable
from ckptd.node.node_limits import physical_memory
from ckptd.printable import HIDDEN, for_json, for_terminal, hide_options
from ckptd.storage.stores.store_base import public_url
from ckptd.transport import messages as m
from ckptd.transport.wire import RefusedError, RequestTimeout, WireError
from ckptd.units import count_of, format_bytes

_ANSWER_S = 5.0  # for each of the daemon's answers
_LOG_LINES = 2000
_EVENTS = 10_000
_SECRET_MIN = 6  # characters; a shorter one would be replaced in the middle of words
_PACKAGES = ("blake3", "cryptography", "fsspec", "msgspec", "numpy", "obstore", "pyzmq", "s3fs", "torch")
# Their values are URLs or JSON that may contain credentials.
_SECRETIVE = ("CKPTD_STORE", "CKPTD_STORE_OPTIONS")
# Variables of ckptd that are no settings of the daemon.
_CLIENT_VARIABLE = re.compile(r"CKPTD_(CONFIG|DAEMON_USER|ENDPOINT|VALIDATE|HOST_[A-Z_]+)")
_SECRET_VARIABLE = re.compile(
    r"(?i)secret|token|passw|_pwd|credential|(access|account|api)_?key|_sas|authoriz"
)
_CGROUP_FILES = ("memory.max", "memory.high", "memory.current", "memory.swap.max", "cpu.max", "pids.max")
_PAGES = Path("/sys/kernel/mm/transparent_hugepage")
_MEMORY = re.compile(
    r"(MemTotal|MemFree|MemAvailable|Shmem|Mlocked|Swap\w+|AnonHuge\w+|ShmemHuge\w+|Huge\w+)$"
)

_Member = Callable[[argparse.Namespace], str]


def add_support_command(commands: Commands) -> None:
    """Add `support`."""
    text = "pack what a bug report needs (versions, settings, answers, log), without secrets and weights"
    parser = commands.add("support", _support, text, timeout_s=_ANSWER_S)
    parser.add_argument("--out", type=Path, metavar="FILE", help="default: ckptd-support-TIME.tar.gz, here")


def _support(args: argparse.Namespace) -> CommandOutcome:
    out: Path = args.out or Path(f"ckptd-support-{time.strftime('%Y%m%d-%H%M%S')}.tar.gz")
    secrets = sorted(_secrets(args, os.environ), key=len, reverse=True)
    members = {name: _without(secrets, _content(make, args)) for name, make in _MEMBERS.items()}
    try:
        _write(out, members)
    except OSError as error:
        raise CommandError(f"{out} cannot be written: {error.strerror}", EXIT_USAGE) from error
    size = out.stat().st_size
    answer = {"file": str(out), "size_bytes": size, "members": list(members)}
    text = (
        f"{out}: {count_of(len(members), 'file')}, {format_bytes(size)}. It names jobs, nodes, addresses and "
        "folders: look through it before you send it"
    )
    return CommandOutcome(answer, text)


def _content(make: _Member, args: argparse.Namespace) -> str:
    """A member's text; the reason, if it cannot be made here."""
    try:
        return make(args)
    except (
        CommandError,
        ConfigError,
        DaemonUnavailable,
        OSError,
        RefusedError,
        RequestTimeout,
        WireError,
    ) as error:
        return f"not available: {error}\n"


def _write(out: Path, members: Mapping[str, str]) -> None:
    """A new file that only its owner may read."""
    fd = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with open(fd, "wb") as raw, tarfile.open(fileobj=raw, mode="w:gz") as archive:
        for name, text in members.items():
            encoded = text.encode(errors="backslashreplace")
            info = tarfile.TarInfo(f"{out.name.split('.')[0]}/{name}")
            info.size, info.mode, info.mtime = len(encoded), 0o600, int(time.time())
            archive.addfile(info, io.BytesIO(encoded))


# -- secrets --------------------------------------------------------------------------------------


def _secrets(args: argparse.Namespace, environ: Mapping[str, str]) -> set[str]:
    """Every secret that this process can see, as it may be written in a text."""
    found = {text for name, text in environ.items() if _SECRET_VARIABLE.search(name)}
    urls, options = [environ.get(_SECRETIVE[0], "")], [environ.get(_SECRETIVE[1], "")]
    try:
        config = settings_of(args).config
    except ConfigError:
        pass  # the environment's are known, and the file's are not shown
    else:
        urls.append(config.store)
        options.append(config.store_options)
    for url in urls:
        found |= set(_of_url(url))
    for text in options:
        found |= set(_of_options(text))
    forms = {form for text in found for form in _forms(text)}
    return {form for form in forms if len(form) >= _SECRET_MIN}


def _of_url(url: str) -> Iterator[str]:
    """User, password, and the values of its query."""
    try:
        parts = urlsplit(url)
    except ValueError:
        yield url
        return
    yield from parts.netloc.rpartition("@")[0].split(":")
    yield from (pair.partition("=")[2] for pair in f"{parts.query}&{parts.fragment}".split("&"))


def _of_options(options: str) -> Iterator[str]:
    """Every text in it: a store's options are for clients that others wrote, with names of their own."""
    try:
        yield from _texts(json.loads(options or "{}"))
    except ValueError:
        yield options


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _texts(each)


def _forms(text: str) -> set[str]:
    """A text as it stands in prose, in a URL, in JSON, and in JSON that is quoted in JSON."""
    plain = {text, unquote(text)}
    escaped = {form for each in plain for form in _in_json(each)}
    quoted = {quote(each, safe=safe) for each in plain for safe in ("", "/")}
    return plain | quoted | escaped | {form for each in escaped for form in _in_json(each)}


def _in_json(text: str) -> tuple[str, str]:
    return json.dumps(text)[1:-1], json.dumps(text, ensure_ascii=False)[1:-1]


def _without(secrets: list[str], text: str) -> str:
    text = for_terminal(text)
    for secret in secrets:
        text = text.replace(secret, HIDDEN)
    return text


# -- what is in it --------------------------------------------------------------------------------


def _versions(_: argparse.Namespace) -> str:
    installed = {each.metadata["Name"].lower(): each.version for each in metadata.distributions()}
    packages = {name: installed.get(name) for name in _PACKAGES}
    return _json({"ckptd": ckptd.__version__, "python": platform.python_version(), "packages": packages})


def _configuration(args: argparse.Namespace) -> str:
    """The settings of a daemon that this user would start here, with their sources."""
    loaded = settings_of(args)
    options = json.loads(loaded.config.store_options or "{}")
    shown = replace(
        loaded.config,
        store=public_url(loaded.config.store),
        store_options=json.dumps(dict.fromkeys(options, HIDDEN)) if options else "",
    )
    warnings = "".join(f"# warning: {text}\n" for text in loaded.warnings)
    return warnings + render_toml(LoadedConfig(shown, loaded.sources, ()))


def _environment(_: argparse.Namespace) -> str:
    """Variables of ckptd; of one that is not known, or may be secret, only the name."""
    settings = {"CKPTD_" + field.name.upper() for field in fields(DaemonConfig)} - {*_SECRETIVE}
    return _json(
        {
            name: text if name in settings or _CLIENT_VARIABLE.fullmatch(name) else HIDDEN
            for name, text in sorted(os.environ.items())
            if name.startswith("CKPTD_")
        }
    )


def _doctor(args: argparse.Namespace) -> str:
    return _json(run_doctor(args).answer)


def _reply(request: m.Request, kind: type[msgspec.Struct], args: argparse.Namespace) -> str:
    return _json(json.loads(hide_options(msgspec.json.encode(ask(args, request, kind)).decode())))


def _log(args: argparse.Namespace) -> str:
    place, note, lines = log_lines(args, _LOG_LINES)
    return "\n".join([f"the last lines of the {place}", *([note] if note else []), *lines]) + "\n"


def _system(args: argparse.Namespace) -> str:
    """The kernel, processors, memory, limits of the control group, huge pages, and filesystems in memory."""
    uname = platform.uname()
    return _json(
        {
            "kernel": f"{uname.system} {uname.release} {uname.version}",
            "machine": uname.machine,
            "processors": len(os.sched_getaffinity(0)),
            "memory": _meminfo(),
            "usable_memory_bytes": physical_memory(),
            "control_group": _cgroup_limits(),
            "transparent_huge_pages": {
                name: _text_of(_PAGES / name) for name in ("enabled", "shmem_enabled", "defrag")
            },
            "limits": {
                "memlock": resource.getrlimit(resource.RLIMIT_MEMLOCK),
                "open_files": resource.getrlimit(resource.RLIMIT_NOFILE),
            },
            "filesystems_in_memory": _memory_filesystems(),
        }
    )


def _meminfo() -> dict[str, str]:
    pairs = (line.split(":", 1) for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines())
    return {name: text.strip() for name, text in pairs if _MEMORY.match(name)}


def _cgroup_limits() -> dict[str, str | None]:
    """Of the own control group, where the second version is mounted in the usual place."""
    groups = Path("/proc/self/cgroup").read_text(encoding="utf-8", errors="replace").splitlines()
    own = next((line.removeprefix("0::") for line in groups if line.startswith("0::")), "/")
    folder = Path("/sys/fs/cgroup") / own.lstrip("/")
    return {name: _text_of(folder / name) for name in _CGROUP_FILES}


def _memory_filesystems() -> list[dict[str, Any]]:
    """Sizes and options of the mounted ones."""
    found = []
    for line in Path("/proc/self/mounts").read_text(encoding="utf-8", errors="replace").splitlines():
        _, folder, kind, options, *_ = line.split()
        if kind in ("tmpfs", "hugetlbfs", "ramfs"):
            try:
                info = os.statvfs(folder)
            except OSError:
                continue  # hidden from this user
            size, free = info.f_blocks * info.f_frsize, info.f_bavail * info.f_frsize
            found.append({"folder": folder, "kind": kind, "options": options, "size": size, "free": free})
    return found


def _text_of(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None  # this kernel has no such file


def _json(value: Any) -> str:
    return msgspec.json.format(for_json(msgspec.json.encode(value).decode()), indent=2) + "\n"


_MEMBERS: Mapping[str, _Member] = {
    "versions.json": _versions,
    "system.json": _system,
    "configuration.toml": _configuration,
    "environment.json": _environment,
    "doctor.json": _doctor,
    "status.json": partial(_reply, m.GetStatus(), m.Status),
    "peers.json": partial(_reply, m.GetPeers(), m.Peers),
    "snapshots.json": partial(_reply, m.GetSnapshots(), m.Snapshots),
    "events.json": partial(_reply, m.GetEvents(limit=_EVENTS), m.Events),
    "log.txt": _log,
}
