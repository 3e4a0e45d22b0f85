"""`RecoveryOptions(start_from=…)`: a run without anything to resume from begins at a given model.

The source is a set of safetensors files (``ckptd.storage.model_set``): a folder of Hugging Face, a
single file, or the result of ``ckptctl import`` in a folder or a store. Tensors are matched by the
model's own names. All of them are compared before the first one is loaded, and differences are listed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import torch
from torch import Tensor, nn

from ckptd.client.model.live_state import LiveState, named_buffers, named_modules, named_parameters
from ckptd.client.model.snapshot_layout import DTYPES, buffer_of
from ckptd.client.optimizers.optimizer_probe import unwrap_optimizer
from ckptd.storage.model_set import (
    FolderFiles,
    ModelSet,
    SetError,
    SetTensor,
    StoreFiles,
    open_set,
    plain_names,
)
from ckptd.storage.stores.objects import StoreError
from ckptd.storage.stores.open_store import open_store
from ckptd.storage.stores.store_base import public_url
from ckptd.units import first_of

_MOST_NAMED = 8
_STATE, _MASTER = "state.", "master."


class StartMismatch(ValueError):
    """The model at ``start_from`` differs from this one; the message lists the differences."""


def load_start(binding: LiveState, source: str | os.PathLike[str]) -> str:
    """Load parameters, buffers, and the optimizer state that the source has; returns a summary.

    Raises:
        StartMismatch: names, shapes or dtypes differ; nothing was loaded.
        ValueError: the source does not exist, or is damaged.
    """
    shown = public_url(str(source))
    try:
        with _opened(source) as found:
            start = _Start(binding, found, shown)
            start.check()
            start.load()
    except (SetError, StoreError) as error:
        raise ValueError(f"start_from={shown!r}: {error}") from error
    return start.summary


def start_unprotected(
    model: nn.Module,
    optimizer: Any,
    masters: Mapping[str, Tensor] | None,
    source: str | os.PathLike[str],
) -> str:
    """`load_start` for a disabled ``Checkpointer``, which begins at the same model."""
    listed = optimizer if isinstance(optimizer, list | tuple) else [optimizer]
    return load_start(LiveState(model, [unwrap_optimizer(o) for o in listed], masters), source)


@contextmanager
def _opened(source: str | os.PathLike[str]) -> Iterator[ModelSet]:
    """The set at a path or URL."""
    text = os.fspath(source)
    parts = urlsplit(text)
    if "://" in text and parts.scheme not in ("file", "local"):
        with closing(open_store(text)) as store:
            yield open_set(StoreFiles(store, "", public_url(text)), complete=True)
        return
    path = Path(unquote(parts.path) if "://" in text else text).expanduser()
    if not path.exists():
        raise SetError(f"{path} does not exist")
    single = path.name if path.is_file() else ""
    yield open_set(FolderFiles(path.parent if single else path), single=single)


class _Start:
    """A model, and the set that it begins with."""

    def __init__(self, binding: LiveState, found: ModelSet, shown: str) -> None:
        self._binding, self._set, self._shown = binding, found, shown
        self.summary = ""
        live = dict(_named_tensors(binding.model))
        plain = plain_names(live)
        self._live = {plain[name]: tensor for name, tensor in live.items()}
        transient = _transient(binding.model)
        self._transient = {plain[name] for name in live if name in transient}
        self._params = {plain[name]: name for name in binding.params if name in plain}
        stored = plain_names(found.model)
        self._stored = {stored[name]: tensor for name, tensor in found.model.items()}

    def check(self) -> None:
        """Compare names, shapes and dtypes."""
        loaded = {id(self._live[name]) for name in self._stored if name in self._live}
        problems = []
        for name, tensor in self._live.items():
            # One of the names of a tied parameter is enough.
            if id(tensor) not in loaded and name not in self._transient:
                problems.append(f"missing: {name}")
                loaded.add(id(tensor))
        problems += [f"unexpected: {name}" for name in self._stored if name not in self._live]
        for name, stored in self._stored.items():
            if name in self._live:
                problems += _differences(name, stored, self._live[name])
        problems += self._optimizer_problems()
        if problems:
            raise StartMismatch(
                f"start_from={self._shown!r} does not fit this model: "
                f"{first_of(problems, _MOST_NAMED, between='; ')}"
            )

    def load(self) -> None:
        """Load everything, after `check`."""
        binding = self._binding
        with torch.no_grad():
            for name, stored in self._stored.items():
                self._live[name].copy_(_placed(self._read(stored), self._live[name]))
            for plain, name in self._params.items():
                if name in binding.masters:
                    stored_master = self._set.optimizer.get(_MASTER + plain)
                    master = binding.masters[name]
                    if stored_master is None:
                        master.copy_(binding.params[name])
                    else:
                        master.copy_(_placed(self._read(stored_master), master))
            count = self._load_state()
        self._apply_options()
        self.summary = f"starting from {self._shown}: {len(self._stored)} tensors of the model" + (
            f", {count} of the optimizer's state" if count else ""
        )

    def _read(self, stored: SetTensor) -> Tensor:
        tensor = torch.empty(stored.shape, dtype=DTYPES[stored.dtype])
        self._set.read(stored, buffer_of(tensor))
        return tensor

    # -- the optimizer's state -------------------------------------------------------------------

    def _optimizer_problems(self) -> list[str]:
        problems = []
        binding = self._binding
        for stored in self._set.optimizer.values():
            name, key = self._whose(stored.name)
            if not key:
                if name not in binding.masters:
                    problems.append(f"unexpected: {stored.name}")
                else:
                    problems += _differences(stored.name, stored, binding.masters[name])
                continue
            known = {s.key: s for s in binding.specs(name)} if name in binding.owner else {}
            if key not in known:
                problems.append(f"unexpected: optimizer state {stored.name}")
            elif ":" in key:
                problems.append(
                    f"unexpected: {stored.name}, a part of a tensor "
                    "(import the model alone: --optimizer-key '')"
                )
            elif known[key].kind == "like" and stored.shape != tuple(binding.held(name).shape):
                problems.append(
                    f"shape of {stored.name}: {list(stored.shape)} there, "
                    f"{list(binding.held(name).shape)} here"
                )
            elif known[key].dtype not in (None, DTYPES.get(stored.dtype)):
                problems.append(
                    f"dtype of {stored.name}: {DTYPES.get(stored.dtype)} there, {known[key].dtype} here"
                )
        return problems

    def _whose(self, stored: str) -> tuple[str, str]:
        """The parameter ("": none of this model), and the key of its state ("": its master)."""
        if stored.startswith(_MASTER):
            return self._params.get(stored.removeprefix(_MASTER), ""), ""
        plain, _, key = stored.removeprefix(_STATE).rpartition(".")
        return self._params.get(plain, ""), key

    def _load_state(self) -> int:
        binding = self._binding
        count = 0
        for stored in self._set.optimizer.values():
            name, key = self._whose(stored.name)
            if key and name not in binding.elsewhere:
                held = binding.held(name)
                state = binding.keeper(name).state[held]
                group = binding.group(name)
                tensor = self._read(stored)
                if tensor.ndim or group.get("capturable") or group.get("fused"):
                    state[key] = _placed(tensor, held)
                else:
                    state[key] = tensor  # counters stay on the host, as the optimizer makes them
                count += 1
        return count

    def _apply_options(self) -> None:
        """Options of the parameter groups, as far as these optimizers have them."""
        for plain, options in self._set.groups.items():
            name = self._params.get(plain, "")
            if name not in self._binding.owner:
                continue
            group = self._binding.group(name)
            for key, value in options.items():
                live = group.get(key)
                if isinstance(live, Tensor):
                    live.fill_(value)
                elif key in group:
                    group[key] = tuple(value) if isinstance(live, tuple) else value


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers under each of their names."""
    yield from named_parameters(model, remove_duplicate=False)
    yield from named_buffers(model, remove_duplicate=False)


def _transient(model: nn.Module) -> set[str]:
    """The names of buffers that a state dict leaves out; the source need not have them."""
    return {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in named_modules(model)
        for name in module._non_persistent_buffers_set
    }


def _differences(name: str, stored: SetTensor, live: Tensor) -> list[str]:
    found = []
    if stored.shape != tuple(live.shape):
        found.append(f"shape of {name}: {list(stored.shape)} there, {list(live.shape)} here")
    if DTYPES.get(stored.dtype) is not live.dtype:
        found.append(f"dtype of {name}: {DTYPES.get(stored.dtype, stored.dtype)} there, {live.dtype} here")
    return found


def _placed(full: Tensor, like: Tensor) -> Tensor:
    """The tensor on the device of ``like``; for a sharded one this rank's shard, without communication."""
    placements = getattr(like, "placements", None)
    if placements is None:
        return full.to(like.device)
    from torch.distributed.tensor import distribute_tensor

    mesh: Any = like.device_mesh  # type: ignore[attr-defined]
    return distribute_tensor(full.to(like.device), mesh, placements, src_data_rank=None)
