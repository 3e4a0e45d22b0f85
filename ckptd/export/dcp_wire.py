"""Messages between `ckptctl` and its child process that uses `torch.distributed.checkpoint`.

Export: the parent sends one `WriteJob`; then the child sends `Ask(index=i)` and receives the bytes of
tensor ``i``, until it sends an `Ask` with ``done``. Import: the parent sends one `ReadJob`; the child
sends `Contents`; then the parent sends `Ask(index=i)` and receives the bytes, until the pipe is closed.
"""

from __future__ import annotations

from typing import Any

import msgspec

__all__ = ["Ask", "Contents", "DcpTensor", "ReadJob", "WriteJob", "Wrote"]


class DcpTensor(msgspec.Struct, frozen=True):
    """A tensor that can be asked for.

    ``kind``: ``model``, ``optim`` or ``master`` (``param`` and ``key`` say of which parameter which
    state), or
    ``entry``: an entry of the snapshot that is for the child alone.
    """

    kind: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    param: str = ""
    key: str = ""


class WriteJob(msgspec.Struct, frozen=True):
    """Write these tensors to ``folder``, in this order.

    ``names``: what each parameter is called; ``aliases``: under which other names the model has
    one; ``groups``: (optimizer, group) of each, empty if unknown.
    """

    folder: str
    tensors: list[DcpTensor]
    names: dict[str, str]
    aliases: dict[str, str]
    groups: dict[str, tuple[int, int]]
    scalars_len: int


class Wrote(msgspec.Struct, frozen=True):
    """What was written: how many tensors of optimizer state, and what whoever uses it should know."""

    optimizer_tensors: int
    notes: list[str]


class Ask(msgspec.Struct, frozen=True):
    """The bytes of a tensor, please; or: it is done."""

    index: int = -1
    done: Wrote | None = None


class ReadJob(msgspec.Struct, frozen=True):
    """Read the checkpoint in ``folder``; where in it the model and the optimizer are ("": at its root)."""

    folder: str
    model_key: str
    optimizer_key: str


class Contents(msgspec.Struct, frozen=True):
    """What there is to read, and the options of parameter groups by parameter."""

    tensors: list[DcpTensor]
    groups: dict[str, dict[str, Any]]
    notes: list[str]
