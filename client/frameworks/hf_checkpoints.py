"""Checkpoints that transformers' ``Trainer`` writes itself, of which a kill may leave half of one behind.

The Trainer writes the files of ``checkpoint-N`` one after the other into the folder of that name,
``trainer_state.json`` last. With ``resume_from_checkpoint=True`` it takes the folder with the
highest N, and ends with an error where that file is missing, before any callback is asked: a run
with newer snapshots could not be resumed.
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


def complete_checkpoints_only(
    trainer: Any, below: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """``below``, which is ``trainer.train``, with the newest complete checkpoint in place of
    ``resume_from_checkpoint=True``.

    It is with none where there is none. Snapshots of the run count more than either, where there are any.

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
            f"resume_from_checkpoint={given!r} is half-written: {_WRITTEN_LAST}, which is written last, is missing or cut off. Name another "
            "one, or leave the argument out: snapshots of this run are found without it"
        )
    return given


def _newest_complete(folder: Path) -> str | bool | None:
    """Its path; True, which is left to the Trainer, where no folder is half-written; None where no
    complete one is left.
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
        "half-written and not loaded: %s (the Trainer was killed while it saved). Snapshots of this run come first; without any it "
        "begins %s. The folder may be deleted",
        ", ".join(sorted(str(path) for path in torn)),
        f"at {complete[1]}" if complete else "at the beginning",
    )
    return str(complete[1]) if complete else None


def _half_written(folder: Path) -> bool:
    """Whether the Trainer began to write it and did not end."""
    if not folder.is_dir():
        return False
    try:
        json.loads((folder / _WRITTEN_LAST).read_text())
    except (FileNotFoundError, ValueError):
        return True
    return False
