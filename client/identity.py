"""Who this trainer is: job, run, rank, world size; from arguments or torchrun's environment."""

from __future__ import annotations

import hashlib
import os
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path

from ckptd.client.options import RunOptions
from ckptd.config.daemon_config import ConfigError, daemon_user
from ckptd.core.users import job_prefix

_DEFAULT_RUN = "default"
_DIGEST_DIGITS = 8
# An id that `torchrun --standalone` or the launcher's API generates: a UUID, or one as a decimal number.
_MADE_UP = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}|\d{30,39}")
_ANCESTORS = 8


def _folder_now() -> Path:
    try:
        return Path.cwd()
    except FileNotFoundError:  # it was removed: the shell's name of it will do
        return Path(os.environ.get("PWD", "/"))


# Before the program changes its folder: Hydra uses a new one for every start.
_begun_in = _folder_now()


@dataclass(frozen=True, slots=True)
class Identity:
    """``(job, run, rank)`` names one trainer's memory; ``world_size`` fences it.

    Attributes:
        origin: the source of names that were not passed; "" if all were.
    """

    job: str
    run: str
    rank: int
    world_size: int
    origin: str = field(default="", compare=False)

    def __str__(self) -> str:
        """The beginning of a log line."""
        origins = f" ({self.origin})" if self.origin else ""
        return f"job {self.job}, run {self.run}, rank {self.rank} of {self.world_size}{origins}"

    def metadata(self) -> dict[str, str]:
        """The metadata of every image."""
        return {
            "job": self.job,
            "run": self.run,
            "rank": str(self.rank),
            "world_size": str(self.world_size),
        }


def identify(job: str | None, run: str | None, rank: int | None, world_size: int | None) -> Identity:
    """Complete the arguments from torchrun's environment (``RANK``, ``WORLD_SIZE``, ``TORCHELASTIC_RUN_ID``).

    The same command in the same folder has the same names each time. An unnamed job is named after its
    script, with a digest of the script's path and the folder in which it was started; where another user
    runs the daemon, the name begins with ``u<uid>.``. A run without a chosen id is ``default``: an id that
    torchrun generated is not used.

    Raises:
        ValueError: a name has other characters than letters, digits, ``.``, ``_`` and ``-``, or a
            number is out of range.
    """
    origins = []
    if job is None:
        job, script = _job_of_script()
        origins.append(f"named after {script} in {_begun_in}")
    if run is None:
        run, made_up = _run_of_launcher()
        if made_up:
            origins.append("torchrun made up a run id, which is not used")
    rank = rank if rank is not None else _number("RANK", 0)
    world_size = world_size if world_size is not None else _number("WORLD_SIZE", 1)
    RunOptions(name=run, job=job, rank=rank, world_size=world_size)  # what cannot be used is refused
    return Identity(job, run, rank, world_size, "; ".join(origins))


def _job_of_script() -> tuple[str, str]:
    """A name for this script in this folder, and the script's file."""
    # "-c" and "" are no files: such programs are told apart by their folders.
    script = _begun_in / (sys.argv[0] or "python")
    stem = re.sub(r"[^A-Za-z0-9._-]", "-", script.stem) or "python"
    where = f"{os.path.normpath(script)}\n{_begun_in}"
    digest = hashlib.sha256(where.encode(errors="surrogateescape")).hexdigest()[:_DIGEST_DIGITS]
    prefix = _prefix_of_user()
    return f"{prefix}{stem[: 63 - _DIGEST_DIGITS - len(prefix)]}-{digest}", script.name


def _prefix_of_user() -> str:
    """The beginning of names that no other user of the same daemon has, if that may have several users."""
    try:
        return "" if daemon_user() == os.geteuid() else job_prefix(os.geteuid())
    except ConfigError:  # it names nobody, as whoever connects to the daemon is told
        return ""


def _run_of_launcher() -> tuple[str, bool]:
    """The id of torchrun's rendezvous, or the default; and whether torchrun generated an id."""
    elastic = os.environ.get("TORCHELASTIC_RUN_ID", "")
    if elastic in ("", "none"):
        return _DEFAULT_RUN, False
    if _is_made_up(elastic):
        return _DEFAULT_RUN, True
    return re.sub(r"[^A-Za-z0-9._-]", "-", elastic)[:64], False


def _is_made_up(run_id: str) -> bool:
    """True if the id looks random, and no command and no variable that led here has it."""
    if not _MADE_UP.fullmatch(run_id) or _environ_number("GROUP_WORLD_SIZE", 1) > 1:
        return False  # nodes that meet under an id were given it
    # Folders that torchrun makes for a worker are named after the id, too.
    others = (text for name, text in os.environ.items() if not name.startswith("TORCHELASTIC"))
    if any(run_id in text for text in others):
        return False
    return not any(run_id in command for command in _commands_of_ancestors())


def _commands_of_ancestors() -> list[str]:
    """The readable command lines of the processes that started this one."""
    found: list[str] = []
    process = os.getppid()
    while process > 0 and len(found) < _ANCESTORS:
        try:
            command = Path(f"/proc/{process}/cmdline").read_bytes()
            stat = Path(f"/proc/{process}/stat").read_text(errors="replace")
        except OSError:
            break  # it has ended, or is another user's
        found.append(command.replace(b"\0", b" ").decode(errors="replace"))
        process = int(stat.rpartition(")")[2].split()[1])
    return found


def _environ_number(variable: str, default: int) -> int:
    text = os.environ.get(variable, "")
    return int(text) if text.isdecimal() else default


def _number(variable: str, default: int) -> int:
    text = os.environ.get(variable, "")
    if not text:
        return default
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"the environment variable {variable} is {text!r}, not a number") from None
