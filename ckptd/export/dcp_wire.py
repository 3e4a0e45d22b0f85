"""Messages between `ckptctl` and its child process that uses `torch.distributed.checkpoint`.

Export: the parent sends one `WriteJob`; then the child sends `Ask(index=i)` and receives the bytes of
tensor ``i``, until it sends an `Ask` with ``done``. Import: the parent sends one `ReadJob`; the child
sends `Contents`; then the parent sends `Ask(index=i)` and receives the bytes, until the pipe is closed.
"""

from __future__ import annotations

from typing import Any

import msgspec


class DcpTensor(msgspec.Struct, frozen=True):
    """A tensor that can be requested.

    ``kind`` is ``model``; ``optim`` or ``master``, with the parameter (``param``) and the key of its
    state (``key``); or ``entry``, an entry of the snapshot that only the child uses.
    """

    kind: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    param: str = ""
    key: str = ""


class WriteJob(msgspec.Struct, frozen=True):
    """Write these tensors to ``folder``, in this order.

    ``names`` maps parameters to their names in the export; ``aliases`` maps further names of tied
    parameters to the exported one; ``groups`` has (optimizer, group) by parameter, and is empty if
    the groups are not known.
    """

    folder: str
    tensors: list[DcpTensor]
    names: dict[str, str]
    aliases: dict[str, str]
    groups: dict[str, tuple[int, int]]
    scalars_len: int


class Wrote(msgspec.Struct, frozen=True):
    """The number of written tensors of optimizer state, and notes for the user."""

    optimizer_tensors: int
    notes: list[str]


class Ask(msgspec.Struct, frozen=True):
    """Requests the bytes of a tensor, or reports that the job is done."""

    index: int = -1
    done: Wrote | None = None


class ReadJob(msgspec.Struct, frozen=True):
    """Read the checkpoint in ``folder``, with the keys of the model and the optimizer ("": its root)."""

    folder: str
    model_key: str
    optimizer_key: str


class Contents(msgspec.Struct, frozen=True):
    """The tensors that can be read, the options of parameter groups by parameter, and notes."""

    tensors: list[DcpTensor]
    groups: dict[str, dict[str, Any]]
    notes: list[str]
