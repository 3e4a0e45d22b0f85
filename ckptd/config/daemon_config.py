"""The daemon's configuration: the settings of `DaemonConfig` from their sources.

Each setting is a key in TOML, an environment variable `CKPTD_<KEY>`, and a flag `--key`. In rising
precedence, a value comes from the built-in default, the TOML file, the environment or the command line;
an error names the source. This is the only module that reads the environment. A test compares the table
in `docs/configuration.md` with `render_table`.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import grp
import hashlib
import inspect
import json
import os
import pwd
import stat
import textwrap
import tomllib
from collections.abc import Collection, Mapping, MutableMapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ckptd.config.runtime_dir import UnusableFolder, builtin_runtime_dir, default_runtime_dir, group_number
from ckptd.config.settings import DaemonConfig, parse_bytes, parse_user_quotas
from ckptd.core.state_machine import validate_always
from ckptd.core.users import UserQuotas
from ckptd.printable import HIDDEN, for_json, hide_options, hide_secrets
from ckptd.transport.access.local_trust import own_users, user_name

_FIRST_HANDED = 3  # after the three standard files
_SECRETIVE = ("store", "store_options")  # may contain credentials: their values are not shown
_NUMBER_BITS = 64  # of a setting
DEFAULT_FILE = "/etc/ckptd/ckptd.toml"

if os.environ.get("CKPTD_VALIDATE"):  # set by the tests, for all processes of a job
    validate_always()


class ConfigError(ValueError):
    """A setting that cannot be used; the message names the key, the value, its source and the
    allowed values.
    """


@dataclass(frozen=True, slots=True)
class LoadedConfig:
    """A configuration, the source of each value, and warnings about probable mistakes."""

    config: DaemonConfig
    sources: Mapping[str, str]
    warnings: tuple[str, ...]


def load_config(
    flags: Mapping[str, str] | None = None,
    *,
    file: str | None = None,
    environ: Mapping[str, str] | None = None,
) -> LoadedConfig:
    """The validated configuration: defaults < TOML file < environment < flags.

    Args:
        flags: values given on the command line, by key.
        file: TOML file that must exist; default `CKPTD_CONFIG`, else /etc/ckptd/ckptd.toml if
            there is one.
        environ: default `os.environ`.
    Raises:
        ConfigError: a value or key that cannot be used.
    """
    environ = os.environ if environ is None else environ
    names = _fields()
    texts, read = _read_toml(file or environ.get("CKPTD_CONFIG"), environ)
    from_file = dict(texts)
    for key in names:
        variable = "CKPTD_" + key.upper()
        if variable in environ:
            texts[key] = (environ[variable], f"environment variable {variable}")
    for key, text in (flags or {}).items():
        if key not in names:
            raise ConfigError(f"unknown setting {key!r}{_did_you_mean(key)}")
        texts[key] = (text, "flag --" + key.replace("_", "-"))
    values = {key: _parse(key, text, source) for key, (text, source) in texts.items()}
    sources = {key: texts[key][1] if key in texts else "default" for key in names}
    warnings = (*_slips(environ), *_exposed(from_file, values.get("trainer_group", ""), read))
    return LoadedConfig(_complete(values, environ), sources, warnings)


def endpoint_for(runtime_dir: str) -> str:
    """Control endpoint of a daemon with that runtime folder."""
    return f"ipc://{runtime_dir}/ckptd.sock"


def default_endpoint(environ: Mapping[str, str] | None = None) -> str:
    """The endpoint at which clients expect the daemon: `CKPTD_LISTEN`, else the socket in the
    runtime folder.
    """
    environ = os.environ if environ is None else environ
    return environ.get("CKPTD_LISTEN") or endpoint_for(default_runtime_dir(environ))


def daemon_user(environ: Mapping[str, str] | None = None) -> int:
    """The user that CKPTD_DAEMON_USER names; else this process's.

    Raises:
        ConfigError: the named user does not exist.
    """
    name = (os.environ if environ is None else environ).get("CKPTD_DAEMON_USER", "")
    if not name:
        return os.geteuid()
    try:
        return int(name) if name.isdecimal() else pwd.getpwnam(name).pw_uid
    except KeyError as error:
        raise ConfigError(
            f"CKPTD_DAEMON_USER = {name!r}: this user does not exist on this machine; set a name or number"
        ) from error


def trusted_users(environ: Mapping[str, str] | None = None) -> frozenset[int]:
    """The users whose daemon a client trusts: root, its own user, and the user that CKPTD_DAEMON_USER
    names.

    Raises:
        ConfigError: the named user does not exist.
    """
    return own_users() | {daemon_user(environ)}


def notify_settings(environ: Mapping[str, str] | None = None) -> tuple[str | None, float | None]:
    """The service manager's notification socket, and its watchdog period in seconds."""
    environ = os.environ if environ is None else environ
    period = environ.get("WATCHDOG_USEC", "")
    for_us = environ.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
    watchdog_s = int(period) / 1e6 if period.isdigit() and int(period) > 0 and for_us else None
    return environ.get("NOTIFY_SOCKET"), watchdog_s


def handed_files(environ: MutableMapping[str, str] | None = None) -> list[tuple[str, int]]:
    """The files that the service manager kept for this process, with their names; the caller closes them.

    Only the first call has them: a later image of this process must not take other descriptors for them.
    """
    environ = os.environ if environ is None else environ
    process, count, names = (environ.pop(f"LISTEN_{name}", "") for name in ("PID", "FDS", "FDNAMES"))
    if process != str(os.getpid()) or not count.isdigit():
        return []
    return list(zip(names.split(":"), range(_FIRST_HANDED, _FIRST_HANDED + int(count)), strict=False))


def traces_wanted(config: DaemonConfig, environ: Mapping[str, str] | None = None) -> str | None:
    """The URL that traces go to; "" (or "grpc:"): the one in OpenTelemetry's own variables, over HTTP (or
    gRPC); None: there is none.
    """
    environ = os.environ if environ is None else environ
    if config.otel_endpoint.startswith("grpc"):
        return config.otel_endpoint.rstrip("/")
    if config.otel_endpoint:
        return f"{config.otel_endpoint.rstrip('/').removesuffix('/v1/traces')}/v1/traces"
    off = environ.get("OTEL_SDK_DISABLED", "").lower() == "true"
    # OpenTelemetry's rules: the variable for traces counts before the general one; an empty one is unset.
    other = (environ.get("OTEL_TRACES_EXPORTER") or "otlp") != "otlp"

    def of_exporter(name: str) -> str | None:
        return environ.get(f"OTEL_EXPORTER_OTLP_TRACES_{name}") or environ.get(f"OTEL_EXPORTER_OTLP_{name}")

    found = {"http/protobuf": "", "grpc": "grpc:"}.get(of_exporter("PROTOCOL") or "http/protobuf")
    return found if of_exporter("ENDPOINT") and not off and not other else None


@cache
def field_docs() -> dict[str, str]:
    """The sentence under each field of `DaemonConfig`, on one line."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(DaemonConfig)))
    body = tree.body[0]
    assert isinstance(body, ast.ClassDef)
    docs: dict[str, str] = {}
    for field, text in zip(body.body, body.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
            assert isinstance(field.target, ast.Name)
            assert isinstance(text.value, ast.Constant)
            docs[field.target.id] = " ".join(str(text.value.value).split())
    return docs


def shown_default(field: dataclasses.Field[Any]) -> str:
    """The default of a setting, as the help and the documentation show it."""
    default = field.metadata["shown"] or field.default
    return str(default).lower() if isinstance(default, bool) else str(default) or "empty"


def render_table() -> str:
    """The settings as a Markdown table, for the documentation."""
    lines = ["| key | default | allowed | meaning |", "|---|---|---|---|"]
    for key, field in _fields().items():
        lines.append(f"| `{key}` | `{shown_default(field)}` | {_allowed(key)} | {field_docs()[key]} |")
    return "\n".join(lines) + "\n"


def render_toml(loaded: LoadedConfig) -> str:
    """The configuration as TOML, each value with its source; credentials are hidden."""
    lines = []
    for key in _fields():
        value = getattr(loaded.config, key)
        if key in _SECRETIVE and value:
            value = _without_secrets(key, value)
        text = for_json(json.dumps(value, ensure_ascii=False))
        lines.append(f"{key} = {text}  # {loaded.sources[key]}")
    return "\n".join(lines) + "\n"


def _complete(values: dict[str, Any], environ: Mapping[str, str]) -> DaemonConfig:
    """Fill in the defaults that depend on the user and on other keys."""
    usual = builtin_runtime_dir(environ)
    runtime_dir = values.setdefault("runtime_dir", usual)
    if "segment_dir" not in values:
        suffix = hashlib.sha256(os.fsencode(runtime_dir)).hexdigest()[:8]
        values["segment_dir"] = f"/dev/shm/ckptd-{os.getuid()}" + (
            "" if runtime_dir == usual else f"-{suffix}"
        )
    if "listen" not in values:
        values["listen"] = _parse("listen", endpoint_for(runtime_dir), "made from runtime_dir")
    values.setdefault("keys_dir", f"{runtime_dir}/keys")
    config = DaemonConfig(**values)
    if config.isolate_users and not config.trainer_group:
        raise ConfigError(
            "isolate_users = true needs trainer_group: without it no user but the daemon's can attach"
        )
    if not config.isolate_users and (parse_bytes(config.user_quota) or parse_user_quotas(config.user_quotas)):
        raise ConfigError(
            "user_quota and user_quotas need isolate_users = true: without it a job is of no user"
        )
    return config


def user_quotas(config: DaemonConfig) -> tuple[UserQuotas | None, tuple[str, ...]]:
    """The quotas of users (None if they are not kept apart), and the names that no user of this node has.

    Only for the daemon: trainers and `ckptctl` read its settings, too, and need no user of another name.
    """
    if not config.isolate_users:
        return None, ()
    by_user: dict[int, int] = {}
    unknown: list[str] = []
    for name, size in parse_user_quotas(config.user_quotas).items():
        try:
            by_user[int(name) if name.isdecimal() else pwd.getpwnam(name).pw_uid] = size
        except KeyError:
            unknown.append(name)
    return UserQuotas(parse_bytes(config.user_quota), by_user), tuple(unknown)


@dataclass(frozen=True, slots=True)
class _ConfigFile:
    """The configuration file that was read."""

    path: Path
    info: os.stat_result

    @property
    def mode(self) -> int:
        """Its permissions."""
        return stat.S_IMODE(self.info.st_mode)


def _read_toml(
    file: str | None, environ: Mapping[str, str]
) -> tuple[dict[str, tuple[str, str]], _ConfigFile | None]:
    """The texts of the settings with their sources, and the file; None: there is no file."""
    path = Path(file or DEFAULT_FILE)
    if file is None and not path.exists():
        return {}, None
    try:
        with path.open("rb") as opened:
            info = os.fstat(opened.fileno())
            table = tomllib.loads(opened.read().decode("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"cannot read the configuration file {path}: {error}") from error
    read = _ConfigFile(path, info)
    if not stat.S_ISCHR(info.st_mode):  # /dev/null contains no settings
        _check_writers(read, trusted_users(environ))
    found: dict[str, tuple[str, str]] = {}
    for key, value in table.items():
        if key not in _fields():
            raise ConfigError(f"unknown setting {key!r} in {path}{_did_you_mean(key)}")
        if not isinstance(value, str | int | float):
            raise ConfigError(f"{key} in {path} is a {type(value).__name__}: expected {_allowed(key)}")
        if isinstance(value, int) and value.bit_length() > _NUMBER_BITS:  # it may be too long to be shown
            raise ConfigError(
                f"{key} in {path} is a number of {value.bit_length()} bits: expected {_allowed(key)}"
            )
        text = str(value).lower() if isinstance(value, bool) else str(value)
        found[key] = (text, f"file {path}")
    return found, read


def _check_writers(file: _ConfigFile, users: Collection[int]) -> None:
    """Refuse a file that other users can write: it decides whom the daemon trusts, and where snapshots go."""
    if file.info.st_uid not in users:
        raise ConfigError(
            f"the configuration file {file.path} belongs to user {user_name(file.info.st_uid)}, expected "
            f"root or {user_name(os.geteuid())}: run `chown {os.geteuid()} {file.path}`, or set "
            "CKPTD_DAEMON_USER if that user runs the daemon"
        )
    if file.mode & 0o002 or (file.mode & 0o020 and not _is_private_group(file.info.st_gid, file.info.st_uid)):
        raise ConfigError(
            f"other users can write to the configuration file {file.path} (mode {file.mode:04o}): run "
            f"`chmod go-w {file.path}`"
        )


def _is_private_group(group: int, owner: int) -> bool:
    """Whether only the owner is in the group; many systems create such a group for each user."""
    try:
        user, members = pwd.getpwuid(owner), grp.getgrgid(group)
    except KeyError:
        return False
    alone = {*members.gr_mem} <= {user.pw_name}
    return (user.pw_gid, members.gr_name) == (group, user.pw_name) and alone


def _exposed(
    texts: Mapping[str, tuple[str, str]], trainer_group: str, file: _ConfigFile | None
) -> tuple[str, ...]:
    """A warning if the file contains credentials and other users can read it."""
    secretive = [k for k in _SECRETIVE if k in texts and HIDDEN in _without_secrets(k, texts[k][0])]
    if file is None or not secretive:
        return ()
    # For a daemon of another user, root owns the file, as root:ckptd 0640: its group is the daemon's own.
    owner_needs_no_group = file.info.st_uid == os.geteuid()
    try:
        of_trainers = file.info.st_gid == group_number(trainer_group)
    except UnusableFolder:
        of_trainers = False  # the start of the daemon reports the unknown group
    theirs = owner_needs_no_group and not _is_private_group(file.info.st_gid, file.info.st_uid)
    group_reads = file.mode & 0o040 and (of_trainers or theirs)
    if not (file.mode & 0o004 or group_reads):
        return ()
    remedy = f"chmod {'go' if group_reads or owner_needs_no_group else 'o'}-r {file.path}"
    problem = (
        f"other users can read the configuration file {file.path} (mode {file.mode:04o}), which contains"
    )
    return (f"{problem} credentials in {' and '.join(secretive)}: run `{remedy}`",)


def _without_secrets(key: str, value: str) -> str:
    return (hide_options if key == "store_options" else hide_secrets)(value)


def _parse(key: str, text: str, source: str) -> Any:
    try:
        return _fields()[key].metadata["parse"](text)
    except (ValueError, OverflowError) as error:
        shown = key if key in _SECRETIVE else f"{key} = {text!r}"
        raise ConfigError(
            f"{shown} (from {source}) cannot be used: expected {_allowed(key)} ({error})"
        ) from error


def _fields() -> dict[str, dataclasses.Field[Any]]:
    return {field.name: field for field in dataclasses.fields(DaemonConfig)}


def _allowed(key: str) -> str:
    return str(_fields()[key].metadata["allowed"])


def _did_you_mean(key: str) -> str:
    close = difflib.get_close_matches(key, list(_fields()), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def _slips(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Warnings about variables with almost a setting's name; unknown `CKPTD_` ones may be the client's."""
    known = {"CKPTD_" + key.upper() for key in _fields()}
    known |= {"CKPTD_CONFIG", "CKPTD_DAEMON_USER", "CKPTD_ENDPOINT"}
    found = []
    for name in environ:
        if name.startswith("CKPTD_") and name not in known:
            close = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.85)
            found += [f"{name} is not a setting; did you mean {close[0]}?"] if close else []
    return tuple(found)
