"""`ckptctl doctor`: checks of this machine's settings, each with its fix.

Every check returns one `Diagnosis` and raises no exception. No check changes the machine.
"""

from __future__ import annotations

import argparse
import os
import platform
import resource
import stat
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from importlib import metadata
from pathlib import Path

import ckptd
from ckptd.config.daemon_config import LoadedConfig, trusted_users
from ckptd.config.runtime_dir import UnusableFolder, group_number
from ckptd.config.settings import DaemonConfig
from ckptd.ctl.command import EXIT_FAILED, CommandOutcome, Commands, settings_of
from ckptd.errors import DaemonUnavailable
from ckptd.launch import answers, connect
from ckptd.memory.pages import filesystem_kind, is_in_memory
from ckptd.node.node_limits import physical_memory, quota_bytes
from ckptd.transport.access.local_trust import own_users, user_name
from ckptd.transport.messages import GetStatus, Status
from ckptd.transport.tcp.sealing import Cipher, offered_ciphers
from ckptd.transport.wire import RefusedError, WireError
from ckptd.units import format_bytes

_FIRST_LOGIN_USER = 1000  # SYS_UID_MAX + 1 of systemd's usual build
_SMALL_SHM_BYTES = 1 << 30
_ANSWER_S = 5.0
# What an elastic job waits for after the loss of a node: torch's defaults, and what makes that short.
_RENDEZVOUS = {"last_call_timeout": 30, "keep_alive_interval": 5, "keep_alive_max_attempt": 3}
_QUICK_RENDEZVOUS = {"last_call_timeout": 3, "keep_alive_interval": 1, "keep_alive_max_attempt": 2}
_LONG_WAIT_S = 10
_HOST = "ckptd.host"
_THRESHOLD_TUNABLE = "glibc.cpu.x86_non_temporal_threshold"


class Grade(StrEnum):
    """OK, an improvement is possible, or ckptd will not work."""

    OK = "OK"
    WARN = "WARN"
    FAIL = "FAIL"


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The result of one check; `fix` is empty if nothing needs fixing."""

    grade: Grade
    detail: str
    fix: str = ""


def _ok(detail: str, fix: str = "") -> Diagnosis:
    return Diagnosis(Grade.OK, detail, fix)


def _warn(detail: str, fix: str) -> Diagnosis:
    return Diagnosis(Grade.WARN, detail, fix)


def _fail(detail: str, fix: str) -> Diagnosis:
    return Diagnosis(Grade.FAIL, detail, fix)


def add_doctor_command(commands: Commands) -> None:
    """Add `doctor`."""
    commands.add("doctor", run_doctor, "check this machine's settings, and print a fix for each problem")


def run_doctor(args: argparse.Namespace) -> CommandOutcome:
    """Run every check, the most important first.

    Raises:
        ConfigError: CKPTD_DAEMON_USER names no user.
    """
    found = _diagnose(settings_of(args), os.environ)
    width = max(map(len, found))
    lines = []
    for name, diagnosis in found.items():
        lines.append(f"{diagnosis.grade:<4}  {name:<{width}}  {diagnosis.detail}")
        if diagnosis.fix:
            lines.append(f"      {'':<{width}}  -> {diagnosis.fix}")
    answer = [{"name": name, **asdict(diagnosis)} for name, diagnosis in found.items()]
    failed = any(diagnosis.grade is Grade.FAIL for diagnosis in found.values())
    return CommandOutcome(answer, "\n".join(lines), EXIT_FAILED if failed else 0)


def _diagnose(loaded: LoadedConfig, environ: Mapping[str, str]) -> dict[str, Diagnosis]:
    config, users = loaded.config, trusted_users(environ)
    segment_dir = Path(config.segment_dir)
    return {
        "daemon": check_daemon(config.listen),
        "settings": check_settings(loaded.warnings),
        "runtime folder": check_folder(Path(config.runtime_dir), config.trainer_group, users),
        "segment folder": check_folder(segment_dir, config.trainer_group, users),
        "segment memory": check_segment_filesystem(config),
        "logind": check_remove_ipc(segment_dir),
        "damaged segments": check_damaged_files(segment_dir),
        "memlock": check_memlock(config.mlock),
        "huge pages": check_hugepages(Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")),
        "pidfd": check_pidfd(),
        "ptrace": check_ptrace(Path("/proc/sys/kernel/yama/ptrace_scope")),
        "clock": check_clock(),
        "copy speed": check_copy_tunable(environ),
        "peer encryption": check_peer_data(config),
        "torchrun": check_torchrun(),
        "versions": check_versions(),
    }


def check_daemon(endpoint: str) -> Diagnosis:
    """Does a daemon answer?"""
    try:
        running = answers(endpoint)
    except DaemonUnavailable as error:
        return _fail(error.message, error.hint)
    if running:
        return _ok(f"answers on {endpoint}{_of_the_running(endpoint)}")
    return _warn(
        f"no daemon answers on {endpoint}",
        'start `ckptd run` (or its systemd unit); with daemon="auto" a trainer starts its own',
    )


def _of_the_running(endpoint: str) -> str:
    """What the other checks do not show: they are about the settings of this command, which may differ."""
    try:
        with connect(endpoint, _ANSWER_S) as client:
            status = client.ask(GetStatus(), Status)
    except (DaemonUnavailable, RefusedError, WireError) as error:
        return f", but does not say what it has: {error}"
    used, quota = format_bytes(status.used_bytes), format_bytes(status.quota_bytes)
    return f"; it has {used} of {quota} in {status.segment_dir}"


def check_settings(warnings: Sequence[str]) -> Diagnosis:
    """Do the settings contain a probable mistake, or a path that other users can change?"""
    if not warnings:
        return _ok("no warnings")
    fixes = [text.partition(": run ")[2] for text in warnings if ": run " in text]
    return _warn("; ".join(warnings), "run " + " and ".join(fixes) if fixes else "")


def check_folder(folder: Path, trainer_group: str = "", users: Collection[int] | None = None) -> Diagnosis:
    """Does the folder belong to the daemon, and is it closed to all but its trainers?

    Args:
        trainer_group: the setting.
        users: the users that may run the daemon; default: this user and root.
    """
    try:
        info = folder.lstat()
        group = group_number(trainer_group)
    except FileNotFoundError:
        return _folder_to_be_made(folder)
    except UnusableFolder as error:
        return _fail(str(error), "create the group, or set trainer_group to another one")
    except OSError as error:
        return _fail(f"{folder}: {error.strerror}", "choose another folder")
    mode = stat.S_IMODE(info.st_mode)
    if not stat.S_ISDIR(info.st_mode):
        return _fail(f"{folder} is not a folder", "remove it")
    if info.st_uid not in (own_users() if users is None else users):
        return _fail(
            f"{folder} belongs to user {info.st_uid}, this is user {os.geteuid()}",
            "if that user runs the daemon, set CKPTD_DAEMON_USER to it; else run as that user, or "
            "set CKPTD_RUNTIME_DIR and CKPTD_SEGMENT_DIR",
        )
    if mode & 0o022:
        return _fail(f"{folder} has mode {mode:04o}", f"run `chmod go-w {folder}`")
    if mode & 0o005:
        detail = f"{folder} has mode {mode:04o}: all users can list the files in it"
        return _warn(detail, f"run `chmod o= {folder}`")
    if info.st_uid != os.geteuid():
        return _folder_of_daemon_user(folder, info)
    return _folder_of_ours(folder, info, group)


def _folder_to_be_made(folder: Path) -> Diagnosis:
    parent = _nearest_existing(folder)
    if os.access(parent, os.W_OK):
        return _ok(f"{folder} will be created")
    return _fail(f"{folder} cannot be created in {parent}", "choose a folder that you own")


def _folder_of_ours(folder: Path, info: os.stat_result, group: int | None) -> Diagnosis:
    """It is ours and closed to others: is the group trainer_group, or without rights?"""
    mode = stat.S_IMODE(info.st_mode)
    if group is None and mode & 0o050:
        return _warn(
            f"{folder} has mode {mode:04o}: members of group {info.st_gid} can list the files in it",
            f"run `chmod 700 {folder}`; if trainers run as other users, set trainer_group",
        )
    if group is None:
        return _ok(f"{folder} is private (mode {mode:04o})")
    if info.st_gid != group or mode & 0o050 != 0o050:
        return _warn(
            f"{folder} has group {info.st_gid} and mode {mode:04o}: members of trainer_group {group} "
            "cannot attach",
            "restart the daemon, which gives the folder to trainer_group",
        )
    return _ok(f"{folder} is open to trainer_group {group} (mode {mode:04o})")


def _folder_of_daemon_user(folder: Path, info: os.stat_result) -> Diagnosis:
    """The folder of a daemon that runs as another, trusted user."""
    owner = f"{folder} belongs to the daemon's user {user_name(info.st_uid)}"
    if os.access(folder, os.R_OK | os.X_OK):
        return _ok(f"{owner}, and this user may enter it")
    mode = stat.S_IMODE(info.st_mode)
    return _fail(
        f"{owner}, and this user may not enter it (group {info.st_gid}, mode {mode:04o})",
        "set trainer_group for the daemon, and make this user a member of that group",
    )


def check_segment_filesystem(config: DaemonConfig) -> Diagnosis:
    """Is the segment folder in memory, and is it large enough for the quota?"""
    folder = _nearest_existing(Path(config.segment_dir))
    kind = filesystem_kind(folder)
    info = os.statvfs(folder)
    total, free = info.f_blocks * info.f_frsize, info.f_bavail * info.f_frsize
    quota = quota_bytes(config.memory, folder)
    detail = (
        f"{kind} of {format_bytes(total)}, {format_bytes(free)} free; quota "
        f"{format_bytes(quota)} (memory = {config.memory}); physical memory "
        f"{format_bytes(physical_memory())}"
    )
    enlarge = "`mount -o remount,size=<bytes> /dev/shm`, `docker run --shm-size`, or an emptyDir"
    if not is_in_memory(kind) and not config.allow_disk_segments:
        return _fail(detail, "set CKPTD_SEGMENT_DIR to a folder on a tmpfs")
    if quota > total:
        return _fail(detail, f"lower CKPTD_MEMORY, or enlarge it: {enlarge}")
    if total < _SMALL_SHM_BYTES:
        return _warn(detail, f"enlarge it: {enlarge}")
    if total < physical_memory() // 4:
        return _warn(detail, f"segments can use less than a quarter of the memory: {enlarge}")
    return _ok(detail)


def check_damaged_files(folder: Path) -> Diagnosis:
    """Did the daemon put damaged segments aside?"""
    found = sorted(folder.glob("*.bad")) if folder.is_dir() else []
    if not found:
        return _ok("none")
    size = sum(path.stat().st_size for path in found)
    names = ", ".join(path.name for path in found[:4]) + (" …" if len(found) > 4 else "")
    return _warn(
        f"{len(found)} files, {format_bytes(size)}: {names}",
        "`ckptctl events` shows the reason; `ckptctl forget JOB RUN` deletes them",
    )


def check_remove_ipc(folder: Path, *, root: Path = Path("/"), uid: int | None = None) -> Diagnosis:
    """Does logind remove the segments when their user's last login ends?

    Args:
        root: the folder below which logind's files are searched.
        uid: the user of the daemon; default: this one.
    """
    uid = os.geteuid() if uid is None else uid
    if not (root / "run/systemd/system").is_dir():
        return _ok("this machine does not run systemd")
    if uid < _FIRST_LOGIN_USER:
        return _ok(f"user {uid} is a system user: logind removes none of its files")
    if (root / "var/lib/systemd/linger" / user_name(uid)).exists():
        return _ok(f"user {uid} lingers: logind removes none of its files at logout")
    setting, where = _remove_ipc(root)
    if setting in ("no", "false", "0", "off"):
        return _ok(f"RemoveIPC={setting} ({where})")
    if not folder.is_relative_to("/dev/shm"):
        return _ok(f"{folder} is not in /dev/shm, the folder that logind clears")
    return _warn(
        f"RemoveIPC is {setting} ({where}): when the last login of user {uid} ends, logind removes "
        f"its files in /dev/shm, {folder} included",
        f"`loginctl enable-linger {user_name(uid)}`, or RemoveIPC=no in /etc/systemd/logind.conf, "
        "or run the daemon as a system user",
    )


def _remove_ipc(root: Path) -> tuple[str, str]:
    """The setting, and the file that contains it; systemd's default is yes."""
    found, where = "yes", "the default"
    main = [root / "usr/lib/systemd/logind.conf", root / "etc/systemd/logind.conf"]
    parts = [path for base in main for path in sorted(Path(f"{base}.d").glob("*.conf"))]
    for path in [*main, *parts]:
        try:
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            continue  # missing, or not readable for this user
        for line in lines:
            key, _, value = line.partition("=")
            if key.strip() == "RemoveIPC" and value.strip():
                found, where = value.strip().lower(), str(path)
    return found, where


def check_memlock(setting: str) -> Diagnosis:
    """May segments be locked in memory?"""
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    text = "unlimited" if soft == resource.RLIM_INFINITY else format_bytes(soft)
    if soft == resource.RLIM_INFINITY or os.geteuid() == 0 or setting == "off":
        root = " (does not apply to root)" if os.geteuid() == 0 else ""
        return _ok(f"limit {text}{root}; mlock = {setting}")
    swap_is_on = _swap_is_on()
    detail = (
        f"limit {text} (hard {hard}), {'swap is on' if swap_is_on else 'no swap is on'}; mlock = {setting}"
    )
    fix = "LimitMEMLOCK=infinity in the unit, or `ulimit -l unlimited`"
    if setting == "on":
        return _fail(detail, fix)
    return _warn(detail, fix) if swap_is_on else _ok(detail)


def check_hugepages(path: Path) -> Diagnosis:
    """Can shared memory use huge pages?"""
    try:
        text = path.read_text(encoding="ascii")
    except OSError:
        return _ok("the kernel does not support them for shared memory")
    chosen = text[text.find("[") + 1 : text.find("]")]
    if chosen in ("always", "advise", "within_size", "force"):
        return _ok(f"shmem_enabled is {chosen}")
    return _ok(
        f"shmem_enabled is {chosen}: attaching maps 4 KiB pages, which takes 50 to 80 ms per GiB",
        "optional: a tmpfs of its own, `mount -t tmpfs -o huge=advise,size=<bytes> ckptd <dir>`, "
        "as CKPTD_SEGMENT_DIR",
    )


def check_pidfd() -> Diagnosis:
    """Can the daemon detect the death of a trainer immediately?"""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError as error:
        return _warn(
            f"not available ({error.strerror}): the daemon detects dead trainers by their lock, within 1 s",
            "use Linux 5.3 or newer, and a seccomp profile that allows pidfd_open",
        )
    return _ok("the daemon detects the death of a trainer immediately")


def check_ptrace(path: Path) -> Diagnosis:
    """Informative: can processes of one user read each other's memory?"""
    try:
        scope = path.read_text(encoding="ascii").strip()
    except OSError:
        return _ok("no Yama: processes of one user can read each other's memory")
    return _ok(f"yama ptrace_scope is {scope}; ckptd does not need ptrace")


def check_clock() -> Diagnosis:
    """Is the system clock plausible and steady? Does not compare it with other nodes."""
    boot_s = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    year = time.gmtime().tm_year
    drift = abs(_seconds_between(time.time, time.monotonic))
    if year < 2024 or boot_s < 0:
        return _warn(f"the clock says year {year}", "start a time service (chrony, ntp)")
    if drift > 0.01:
        return _warn(
            f"the clock jumped by {drift:.3f} s during the check",
            "configure the time service to slew the clock instead of stepping it",
        )
    return _ok("plausible and steady (not compared with other nodes)")


def check_copy_tunable(environ: Mapping[str, str]) -> Diagnosis:
    """Is glibc's threshold for non-temporal copies set? Copies of mixed tensors are up to 1.6 times
    faster.
    """
    tunables = environ.get("GLIBC_TUNABLES", "")
    if _THRESHOLD_TUNABLE in tunables:
        return _ok(f"GLIBC_TUNABLES={tunables}")
    if platform.machine() not in ("x86_64", "AMD64"):
        return _ok(f"no setting needed on {platform.machine()}")
    return _ok(
        f"{_THRESHOLD_TUNABLE} is not set",
        f"optional: start trainers with GLIBC_TUNABLES={_THRESHOLD_TUNABLE}=0x40000",
    )


def check_peer_data(config: DaemonConfig) -> Diagnosis:
    """Are snapshots encrypted when they are sent to peers?"""
    if not config.peer_listen:
        return _ok("snapshots stay on this node")
    if config.peer_security == "plain":
        return _warn("peers are not authenticated", "set peer_security to curve")
    if config.peer_data == "zmq":
        return _ok("CURVE")
    try:
        first = offered_ciphers(plaintext=config.peer_data == "stream-plaintext")[0]
    except ValueError as error:
        return _fail(str(error), "pip install 'cryptography>=47'")
    if first is Cipher.PLAINTEXT:
        return _warn("snapshots are sent unencrypted", "set peer_data to stream")
    return _ok(first.title)


def check_torchrun(proc: Path = Path("/proc")) -> Diagnosis:
    """Do jobs of this user that torchrun has started here come back quickly?"""
    jobs = _torchruns(proc)
    if not jobs:
        return _ok("no torchrun of this user runs here")
    for pid, words in jobs.items():
        settings = _rendezvous(words)
        wait_s = _wait_s(settings)
        if ":" in _option(words, "nnodes") and wait_s > _LONG_WAIT_S:
            longer = {n: quick for n, quick in _QUICK_RENDEZVOUS.items() if settings[n] > quick}
            return _warn(
                f"process {pid} waits up to {wait_s} s for its nodes to meet again after one is lost",
                "torchrun --rdzv-conf " + ",".join(f"{name}={quick}" for name, quick in longer.items()),
            )
    plain = [pid for pid, words in jobs.items() if _HOST not in words]
    if plain:
        return _ok(
            f"process {plain[0]} restarts all trainers by itself when one dies, which takes some seconds",
            "optional: `torchrun … -m ckptd.host train.py` brings them back in about one",
        )
    return _ok(f"{len(jobs)} of this user, whose trainers have hosts")


def _rendezvous(words: Sequence[str]) -> dict[str, int]:
    given = dict(part.partition("=")[::2] for part in _option(words, "rdzv-conf").split(","))
    return {n: int(given[n]) if given.get(n, "").isdecimal() else usual for n, usual in _RENDEZVOUS.items()}


def _wait_s(settings: Mapping[str, int]) -> int:
    """Until a lost node counts as lost, and then for others to come."""
    lost_s = settings["keep_alive_interval"] * settings["keep_alive_max_attempt"]
    return lost_s + settings["last_call_timeout"]


def _torchruns(proc: Path) -> dict[int, list[str]]:
    """The command lines of this user's torchruns, by process."""
    found = {}
    for folder in proc.glob("[0-9]*"):
        try:
            mine = folder.stat().st_uid == os.geteuid()
            words = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
        except OSError:
            continue  # it has ended, or is hidden from this user
        if mine and any(
            Path(word).name == "torchrun" or word == "torch.distributed.run" for word in words[:8]
        ):
            found[int(folder.name)] = words
    return dict(sorted(found.items()))


def _option(words: Sequence[str], name: str) -> str:
    """Its value on a command line of torchrun; "" if it is not given."""
    names = {f"--{name}", f"--{name.replace('-', '_')}"}
    for at, word in enumerate(words):
        key, equals, value = word.partition("=")
        if key in names:
            return value if equals else "".join(words[at + 1 : at + 2])
    return ""


def check_versions() -> Diagnosis:
    """The installed versions; torch's version comes from its metadata, without importing it."""
    versions = [f"ckptd {ckptd.__version__}", f"python {platform.python_version()}"]
    missing = []
    for name in ("pyzmq", "msgspec", "xxhash", "numpy", "torch"):
        try:
            versions.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            missing.append(name)
    detail = ", ".join([*versions, f"linux {platform.release()}"])
    if not missing:
        return _ok(detail)
    lacking = ", ".join(missing)
    grade = Grade.WARN if missing == ["torch"] else Grade.FAIL
    return Diagnosis(grade, f"{detail}; not installed: {lacking}", f"pip install {lacking}")


def _nearest_existing(folder: Path) -> Path:
    return next(path for path in (folder, *folder.parents) if path.exists())


def _swap_is_on() -> bool:
    try:
        return len(Path("/proc/swaps").read_text(encoding="ascii").splitlines()) > 1
    except OSError:
        return True  # unknown: assume that swap is on


def _seconds_between(one: Callable[[], float], other: Callable[[], float]) -> float:
    """The drift of one clock against the other within 50 ms."""
    begin = one() - other()
    time.sleep(0.05)
    return (one() - other()) - begin
