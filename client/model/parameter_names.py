"""Parameters, buffers and modules by the names that they have without wrappers around the model or
parts of it.

``DistributedDataParallel``, ``torch.compile`` and activation checkpointing put a module around
another and a component into its names (``module.``, ``_orig_mod.``,
``_checkpoint_wrapped_module.``). What we record goes by the names of the model inside, so that a
snapshot is read alike with and without wrappers. ``fully_shard`` changes no names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

__all__ = [
    "is_compiled",
    "named_buffers",
    "named_modules",
    "named_parameters",
    "names_with_wrappers",
]

_CHILDREN = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")

_T = TypeVar("_T", bound=Tensor)


def named_modules(model: nn.Module, *, remove_duplicate: bool = True) -> Iterator[tuple[str, nn.Module]]:
    """As ``model.named_modules()``, without the wrappers."""
    seen: set[int] = set()

    def walk(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
        if remove_duplicate and id(module) in seen:
            return
        seen.add(id(module))
        child = _wrapped(module)
        if child:
            yield from walk(module.get_submodule(child), path)
            return
        yield path, module
        for name, part in module._modules.items():
            if part is not None:
                yield from walk(part, f"{path}.{name}" if path else name)

    return walk(model, "")


def named_parameters(
    model: nn.Module, *, remove_duplicate: bool = True
) -> Iterator[tuple[str, nn.Parameter]]:
    """As ``model.named_parameters()``, by names without the wrappers."""
    return _members(model, _parameters_of, remove_duplicate)


def named_buffers(model: nn.Module, *, remove_duplicate: bool = True) -> Iterator[tuple[str, Tensor]]:
    """As ``model.named_buffers()``, by names without the wrappers."""
    return _members(model, _buffers_of, remove_duplicate)


def names_with_wrappers(model: nn.Module) -> dict[str, str]:
    """``{name in model.named_parameters(): name without wrappers}``."""
    plain = {id(p): name for name, p in named_parameters(model)}
    return {name: plain[id(p)] for name, p in model.named_parameters() if id(p) in plain}


def is_compiled(model: nn.Module) -> bool:
    """Whether ``torch.compile`` is around all of the model, inside or outside other wrappers."""
    while child := _wrapped(model):
        if child == "_orig_mod":
            return True
        model = model.get_submodule(child)
    return False


def _wrapped(module: nn.Module) -> str:
    """The name under which this module has the one that it wraps; empty if it is no wrapper."""
    if isinstance(module, DistributedDataParallel | DataParallel):
        return "module"
    return next((name for name in _CHILDREN if name in module._modules), "")


def _parameters_of(module: nn.Module) -> Mapping[str, nn.Parameter | None]:
    return module._parameters


def _buffers_of(module: nn.Module) -> Mapping[str, Tensor | None]:
    return module._buffers


def _members(
    model: nn.Module, of: Callable[[nn.Module], Mapping[str, _T | None]], remove_duplicate: bool
) -> Iterator[tuple[str, _T]]:
    seen: set[int] = set()
    for path, module in named_modules(model, remove_duplicate=remove_duplicate):
        for name, tensor in of(module).items():
            if tensor is None or (remove_duplicate and id(tensor) in seen):
                continue
            seen.add(id(tensor))
            yield f"{path}.{name}" if path else name, tensor
