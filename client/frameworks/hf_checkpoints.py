"""Half-written checkpoints of transformers' ``Trainer``.

The Trainer writes the files of ``checkpoint-N`` one after the other into the folder of that name,
``trainer_state.json`` last; a kill may leave half of them. With ``resume_from_checkpoint=True`` it
takes the folder with the highest N, and fails if that file is missing, before it calls any callback.
A run with newer snapshots then could not resume.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ckptd.client.log_lines import get_logger

__all__ = ["complete_checkpoints_only"]

logger = get_logger(__name__)

_NAME = re.compile(r"checkpoint-(\d+)")
_ARGUMENT = "resume_from_checkpoint"
_WRITTEN_LAST = "trainer_state.json"


def complete_checkpoints_only(trainer: Any, below: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Wrap ``below`` (``trainer.train``): ``resume_from_checkpoint=True`` means the newest complete
    checkpoint, or none if there is none.

    Snapshots of the run take precedence over both.

    Raises:
        ValueError: ``resume_from_checkpoint`` names a checkpoint that is half-written.
    """
    if args:
        return below(_complete(trainer, args[0]), *args[1:], **kwargs)
    if _ARGUMENT in kwargs:
        return below(**{**kwargs, _ARGUMENT: _complete(trainer, kwargs[_ARGUMENT])})
    return below(**kwargs)


def _complete(trainer: Any, given: Any) -> Any:
    if given is True:
        return _newest_complete(Path(trainer.args.output_dir))
    if isinstance(given, str) and _half_written(Path(given)):
        raise ValueError(
            f"resume_from_checkpoint={given!r} is half-written: its last file, {_WRITTEN_LAST}, is "
            "missing or truncated. Pass another "
            "checkpoint, or omit the argument: ckptd finds the snapshots of this run without it"
        )
    return given


def _newest_complete(folder: Path) -> str | bool | None:
    """The path of the newest complete checkpoint. True if no folder is half-written: the Trainer
    chooses. None if no folder is complete.
    """
    numbered = [
        (int(found[1]), path)
        for path in (folder.iterdir() if folder.is_dir() else ())
        if path.is_dir() and (found := _NAME.fullmatch(path.name))
    ]
    torn = {path for _, path in numbered if _half_written(path)}
    if not torn:
        return True
    complete = max((each for each in numbered if each[1] not in torn), default=None)
    logger.warning(
        "ignoring the half-written checkpoint %s (the Trainer was killed while it saved it). "
        "Snapshots of this run take precedence; without any, "
        "training starts %s. You may delete the folder",
        ", ".join(sorted(str(path) for path in torn)),
        f"at {complete[1]}" if complete else "at the beginning",
    )
    return str(complete[1]) if complete else None


def _half_written(folder: Path) -> bool:
    """Whether the Trainer started to write the folder and did not finish."""
    if not folder.is_dir():
        return False
    try:
        json.loads((folder / _WRITTEN_LAST).read_text())
    except (FileNotFoundError, ValueError):
        return True
    return False
