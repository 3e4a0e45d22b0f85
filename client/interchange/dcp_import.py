"""Reads a checkpoint of ``torch.distributed.checkpoint`` for ``ckptctl import``.

Started by it as ``python -m ckptd.client.interchange.dcp_import``: a job comes on stdin, what there
is goes to stdout, then the bytes of each tensor that is asked for (``ckptd.export.dcp_wire``). Such
a checkpoint holds pickles, in its metadata and for its values. None of them is run: the metadata is
read by `ckptd.client.interchange.dcp_metadata`, values by torch with ``weights_only``.
"""

from __future__ import annotations

import io
import pickle
import re
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import load

from ckptd.client.interchange.dcp_export import own_pipes
from ckptd.client.interchange.dcp_metadata import read_dcp_metadata
from ckptd.client.model.snapshot_layout import SAFETENSORS_DTYPES, buffer_of
from ckptd.export.dcp_wire import Ask, Contents, DcpTensor, ReadJob

__all__ = ["StoredState", "main"]

_STATE, _GROUPS, _MASTER = "state.", "param_groups.", "master."
_MOST_NAMED = 5


class StoredState:
    """What a checkpoint holds of a model and its optimizer."""

    def __init__(self, job: ReadJob) -> None:
        self._reader = _Reader(job.folder)
        self._stored = self._reader.read_metadata().state_dict_metadata
        self._model = _prefix(job.model_key)
        self._optimizer = _prefix(job.optimizer_key)
        self._keys: list[str] = []

    def contents(self) -> Contents:
        """All of it.

        Raises:
            ValueError: there is no model under this key.
        """
        tensors, passed_over = self._tensors()
        if not any(t.kind == "model" for t in tensors):
            some = ", ".join(sorted(self._stored)[:_MOST_NAMED])
            raise ValueError(f"no tensor under the key {self._model!r}; keys are like {some}")
        notes = []
        if passed_over:
            more = f" and {len(passed_over) - _MOST_NAMED} more" if len(passed_over) > _MOST_NAMED else ""
            notes.append(f"passed over: {', '.join(passed_over[:_MOST_NAMED])}{more}")
        return Contents(tensors, self._options(), notes)

    def tensor(self, index: int) -> Tensor:
        """One of the tensors that were told."""
        return self._load(self._keys[index])

    def _tensors(self) -> tuple[list[DcpTensor], list[str]]:
        tensors: list[DcpTensor] = []
        passed_over: list[str] = []
        for key, stored in self._stored.items():
            kind, name = self._what(key)
            if kind and isinstance(stored, TensorStorageMetadata):
                dtype = stored.properties.dtype
                if dtype not in SAFETENSORS_DTYPES:
                    raise ValueError(f"{key} is {dtype}, which safetensors cannot hold")
                self._keys.append(key)
                tensors.append(DcpTensor(kind, name, SAFETENSORS_DTYPES[dtype], tuple(stored.size)))
            elif kind != "groups":
                passed_over.append(key)
        return tensors, passed_over

    def _what(self, key: str) -> tuple[str, str]:
        """Which part a key belongs to, and its name there; empty if to none."""
        if self._optimizer and key.startswith(self._optimizer):
            name = key.removeprefix(self._optimizer)
            if name.startswith(_STATE):
                return "optim", name
            return ("groups", name) if name.startswith(_GROUPS) else ("", "")
        if key.startswith(_MASTER):
            return "master", key
        return ("model", key.removeprefix(self._model)) if key.startswith(self._model) else ("", "")

    def _options(self) -> dict[str, dict[str, Any]]:
        """Options by parameter, from either layout of an optimizer's state dict."""
        prefix = self._optimizer + _GROUPS
        keys = [k for k in self._stored if self._what(k)[0] == "groups"]
        loaded = self._load_values(keys)
        listed: dict[str, dict[str, Any]] = {}
        for key in keys:
            head, _, option = key.removeprefix(prefix).partition(".")
            if head.isdigit() and "." not in option:
                listed.setdefault(head, {})[option] = loaded.pop(key)
        found: dict[str, dict[str, Any]] = {}
        for group in listed.values():
            options = {k: _plain(v) for k, v in group.items() if k != "params"}
            found.update({name: dict(options) for name in group.get("params", ())})
        for key, value in loaded.items():
            name, _, option = key.removeprefix(prefix).rpartition(".")
            found.setdefault(name, {})[option] = _plain(value)
        return found

    def _load_values(self, keys: list[str]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key in keys:
            stored = self._stored[key]
            found[key] = _blank(stored) if isinstance(stored, TensorStorageMetadata) else None
        self._fill(found)
        return found

    def _load(self, key: str) -> Tensor:
        stored = self._stored[key]
        assert isinstance(stored, TensorStorageMetadata)
        found = {key: _blank(stored)}
        self._fill(found)
        return found[key]

    def _fill(self, state: dict[str, Any]) -> None:
        if state:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")
                # As it is: flattened in any way, values that are no tensors would go to a copy.
                planner = _Planner(flatten_state_dict=False, flatten_sharded_tensors=False)
                try:
                    load(state, storage_reader=self._reader, planner=planner, no_dist=True)
                except CheckpointException as error:
                    raise error.failures[0][0] from None  # of the only rank there is


class _Planner(DefaultLoadPlanner):
    """Torch's planner, which runs nothing to load a value that is no tensor."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        key = read_item.dest_index.fqn
        try:
            self.state_dict[key] = torch.load(value, weights_only=True)
        except pickle.UnpicklingError as error:
            named = re.search(r"GLOBAL (\S+)", str(error))
            what = f" ({named[1]})" if named else ""
            raise ValueError(
                f"{key} is refused: it holds more than numbers, strings and tensors{what}. "
                'Nothing of it was run. Pass --optimizer-key "" to leave the optimizer out'
            ) from error


class _Reader(FileSystemReader):
    """Torch's reader, with metadata that was read once, and runs nothing."""

    def __init__(self, folder: str) -> None:
        super().__init__(folder)
        self._metadata = read_dcp_metadata(Path(folder))

    def read_metadata(self, *_args: Any, **_kwargs: Any) -> Metadata:
        return self._metadata


def _blank(stored: TensorStorageMetadata) -> Tensor:
    return torch.empty(stored.size, dtype=stored.properties.dtype)


def _prefix(key: str) -> str:
    return key + "." if key else ""


def _plain(value: Any) -> Any:
    """As JSON can hold it: a learning rate may be a tensor."""
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, list | tuple) else value


def main() -> int:
    """Serve one checkpoint on the standard pipes."""
    given, output = own_pipes()
    stored = StoredState(msgspec.json.decode(given.readline(), type=ReadJob))
    output.write(msgspec.json.encode(stored.contents()) + b"\n")
    output.flush()
    for line in given:
        tensor = stored.tensor(msgspec.json.decode(line, type=Ask).index).contiguous()
        output.write(buffer_of(tensor))
        output.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
