"""The child process of ``ckptctl export --format dcp``: writes with ``torch.distributed.checkpoint``.

``ckptctl`` starts ``python -m ckptd.client.interchange.dcp_export``. The job and the bytes of tensors
come on stdin, requests for them go to stdout (``ckptd.export.dcp_wire``). Torch's own planner and
``FileSystemWriter`` write the files; they get each tensor only when they write it, so that at most two
are in memory.

Keys are those of ``{"model": get_model_state_dict(…), "optim": get_optimizer_state_dict(…)}``, for
both layouts of the latter (flattened or not). Masters that are separate from the parameters have the
key ``master.<name>``.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO

import msgspec
import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.state_dict_saver import save

from ckptd.client import values
from ckptd.client.model.snapshot_layout import DTYPES, STATIC, buffer_of
from ckptd.export.dcp_wire import Ask, DcpTensor, WriteJob, Wrote
from ckptd.storage.image_format import SCALARS

_PACKED = "ckptd.optim_scalars/"
_OPTIONS_OMITTED = (
    "the options of parameter groups (lr, …) are left out: the snapshot does not record which "
    "parameter is in which group; load with allow_partial_load, or set them yourself"
)

# Returns the tensor with this index.
Fetch = Callable[[int], Tensor]


def write_checkpoint(job: WriteJob, fetch: Fetch) -> Wrote:
    """Write the tensors of a job, each fetched when it is written."""
    state, lazy, wrote = _state_dict(job, fetch)
    writer = FileSystemWriter(
        job.folder,
        # One thread requests the tensors in our order, and none is copied ahead: each is freed when the
        # next one arrives.
        thread_count=1,
        per_thread_copy_ahead=0,
    )
    with warnings.catch_warnings():
        # This is one process, without a process group.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        save(state, storage_writer=writer, planner=_Lazy(lazy, fetch), no_dist=True)
    return wrote


class _Lazy(DefaultSavePlanner):
    """Torch's planner, but it fetches each tensor when it is written."""

    def __init__(self, indices: Mapping[str, int], fetch: Fetch) -> None:
        super().__init__()
        self._indices, self._fetch = indices, fetch
        self._last: Tensor | None = None

    def resolve_data(self, write_item: WriteItem) -> Any:
        index = self._indices.get(write_item.index.fqn)
        if index is None:
            return super().resolve_data(write_item)
        if self._last is not None:
            # The writer keeps written tensors until its file is closed; that would be the whole model.
            self._last.untyped_storage().resize_(0)
        self._last = self._fetch(index)
        return self._last


def _state_dict(job: WriteJob, fetch: Fetch) -> tuple[dict[str, Any], dict[str, int], Wrote]:
    """The state dict with meta tensors for large ones, the indices of these by key, and the result."""
    entries = {t.name: (i, t) for i, t in enumerate(job.tensors) if t.kind == "entry"}
    recorded = _Recorded(job, entries, fetch) if entries else None
    state: dict[str, Any] = {"model": {}}
    lazy: dict[str, int] = {}
    for index, tensor in enumerate(job.tensors):
        if tensor.kind == "entry" or (recorded is not None and recorded.lacks(tensor)):
            continue
        part, name = tensor.kind, tensor.name.removeprefix("master.")
        stand_in = torch.empty(tensor.shape, dtype=DTYPES[tensor.dtype], device="meta")
        # A model requests a tied parameter under each of its names.
        others = [a for a, first in job.aliases.items() if first == name and part == "model"]
        for each in (name, *others):
            state.setdefault(part, {})[each] = stand_in
            lazy[f"{part}.{each}"] = index
    if recorded is None:
        return state, lazy, Wrote(0, [])
    optimizer = state.setdefault("optim", {})
    for param, key, value in recorded.small_state():
        optimizer[f"state.{job.names[param]}.{key}"] = value
    count = sum(key.startswith("state.") for key in optimizer)
    options, notes = recorded.options()
    optimizer.update(options)
    return state, lazy, Wrote(count + len(state.get("master", {})), notes)


class _Recorded:
    """The state of optimizers that a dense snapshot records outside of large tensors."""

    def __init__(self, job: WriteJob, entries: Mapping[str, tuple[int, DcpTensor]], fetch: Fetch) -> None:
        def load(name: str) -> Any:
            return values.unpack(fetch(entries[name][0]).numpy().tobytes())

        packed = fetch(entries[SCALARS][0])[: job.scalars_len]
        self._scalars: dict[str, Any] = values.unpack(packed.numpy().tobytes())
        self._layout: dict[str, Any] = load(STATIC)
        self._packed = {
            name.removeprefix(_PACKED): fetch(index)
            for name, (index, _) in entries.items()
            if name.startswith(_PACKED)
        }
        self._names, self._groups = job.names, job.groups
        self._absent = frozenset(self._scalars["absent"])

    def lacks(self, tensor: DcpTensor) -> bool:
        """True if the optimizer has no such state yet, as for an expert that never received a token."""
        return tensor.kind == "optim" and tensor.param in self._absent

    def small_state(self) -> list[tuple[str, str, Any]]:
        """(parameter, key, value) of 0-dimensional tensors and of plain values."""
        found: list[tuple[str, str, Any]] = []
        for dtype, pairs in self._layout["packed"].items():
            found += [
                (param, key, self._packed[dtype][i].clone())
                for i, (param, key) in enumerate(pairs)
                if param in self._names and param not in self._absent
            ]
        for param, state in self._scalars["python"].items():
            if param in self._names:
                found += [(param, key, value) for key, value in state.items()]
        return found

    def options(self) -> tuple[dict[str, Any], list[str]]:
        """Options of parameter groups, by parameter and as a list; and notes about them."""
        notes = [f"{len(self._absent)} parameters have no optimizer state yet"] * bool(self._absent)
        if parts := sorted({key for keys in self._layout["keys"].values() for key in keys if ":" in key}):
            notes.append(
                "state of the optimizer that is made of several tensors is exported as these, "
                f"{', '.join(parts)}: torch does not put them together when it loads them"
            )
        recorded: list[list[dict[str, Any]]] = self._scalars["groups"]
        members = self._members(recorded)
        if members is None:
            return {}, [*notes, _OPTIONS_OMITTED]
        flat = {
            f"param_groups.{name}.{option}": value
            for (i, j), names in members.items()
            for name in names
            for option, value in recorded[i][j].items()
        }
        listed = [{**recorded[i][j], "params": names} for (i, j), names in members.items()]
        # A parameter whose name is a number would take the place of a group in the list.
        if not any(f"param_groups.{at}.{option}" in flat for at, g in enumerate(listed) for option in g):
            flat["param_groups"] = listed
        return flat, notes

    def _members(self, recorded: list[list[dict[str, Any]]]) -> dict[tuple[int, int], list[str]] | None:
        """The parameters of each group; None: not known."""
        owners = self._groups
        if not owners:
            if [len(groups) for groups in recorded] != [1]:
                return None
            owners = dict.fromkeys(self._layout["keys"], (0, 0))
        members: dict[tuple[int, int], list[str]] = {
            (i, j): [] for i, groups in enumerate(recorded) for j in range(len(groups))
        }
        for param, group in owners.items():
            if param in self._names:
                members[group].append(self._names[param])
        return members


def own_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Stdin and stdout for the messages alone; output of libraries goes to stderr."""
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return sys.stdin.buffer, output


def main() -> int:
    """Write the job that comes on stdin."""
    given, output = own_pipes()
    job = msgspec.json.decode(given.readline(), type=WriteJob)

    def say(message: Ask) -> None:
        output.write(msgspec.json.encode(message) + b"\n")
        output.flush()

    def fetch(index: int) -> Tensor:
        wanted = job.tensors[index]
        tensor = torch.empty(wanted.shape, dtype=DTYPES[wanted.dtype])
        say(Ask(index))
        into = buffer_of(tensor)
        while into:
            done = given.readinto(into)  # type: ignore[attr-defined]
            if not done:
                raise EOFError("the pipe was closed in the middle of a tensor")
            into = into[done:]
        return tensor

    say(Ask(done=write_checkpoint(job, fetch)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
