"""Final states of trainings as leaves, and their comparison, bit for bit. Knows torch and nothing of ckptd."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

__all__ = ["differences", "digest", "leaves", "names_of"]

_PLAIN = (type(None), bool, int, float, complex, str, bytes)
_AS_TEXT = (torch.dtype, torch.device, torch.Size, np.dtype, range, slice, type)
_LEFT_OUT = "__left_out__"


def leaves(root: Any, names: Mapping[int, str] | None = None) -> dict[str, Any]:
    """Everything that ``root`` holds, by its path: tensors (copied), arrays and plain values.

    Containers, objects (by their attributes) and generators are gone into. What can be called
    (hooks, closures) and modules are left out: they are code, or belong to somebody else.

    Args:
        names: of objects that serve as keys (parameters), by ``id``.
    Raises:
        ValueError: an object that serves as a key has no name; its place in the order of keys is no name.
    """
    return dict(_walk(root, "", dict(names or {}), set()))


def names_of(**modules: nn.Module) -> dict[int, str]:
    """Names of all parameters and buffers, for ``leaves``."""
    return {
        id(tensor): f"{at}.{name}"
        for at, module in modules.items()
        for name, tensor in (*module.named_parameters(), *module.named_buffers())
    }


def digest(batch: Any) -> str:
    """Of the bits of a batch, whatever it is made of."""
    found = hashlib.blake2b(digest_size=12)
    for path, leaf in leaves(batch).items():
        found.update(path.encode())
        found.update(_bits(leaf))
    return found.hexdigest()


def differences(reference: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """The paths at which two states are not identical, each with what is wrong there; empty if all is."""
    found = [f"{path}: only without a kill" for path in reference.keys() - other.keys()]
    found += [f"{path}: only after the kills" for path in other.keys() - reference.keys()]
    for path in reference.keys() & other.keys():
        if _bits(reference[path]) != _bits(other[path]):
            found.append(f"{path}: {_short(reference[path])} or {_short(other[path])}")
    return sorted(found)


def _walk(value: Any, path: str, names: dict[int, str], above: set[int]) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Tensor) and hasattr(value, "__tensor_flatten__"):
        # One that is made of others, such as an 8-bit one of codes and scales.
        yield f"{path}::type", type(value).__qualname__
        for name in value.__tensor_flatten__()[0]:
            yield from _walk(getattr(value, name), f"{path}.{name}", names, above)
    elif isinstance(value, Tensor):
        yield path, value.detach().to("cpu", copy=True)
    elif isinstance(value, np.ndarray | np.generic):
        yield path, np.array(value)
    elif isinstance(value, _PLAIN):
        yield path, value
    elif isinstance(value, _AS_TEXT):
        yield path, str(value)
    elif isinstance(value, torch.Generator):
        yield path, value.get_state()
    elif isinstance(value, nn.Module) or (callable(value) and not hasattr(value, "state_dict")):
        return
    elif id(value) in above:
        yield path, "(itself)"
    else:
        above = above | {id(value)}
        yield f"{path}::type", type(value).__qualname__
        for key, child in _children(value, names):
            yield from _walk(child, f"{path}{key}", names, above)


def _children(value: Any, names: dict[int, str]) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, child in value.items():
            if isinstance(key, (*_PLAIN, *_AS_TEXT, tuple)):
                yield f"[{key!r}]", child
            elif id(key) in names:
                yield f"[{names[id(key)]}]", child
            else:
                raise ValueError(f"a {type(key).__name__} is a key and has no name: see names_of")
    elif isinstance(value, list | tuple | deque):
        for place, child in enumerate(value):
            yield f"[{place}]", child
    elif isinstance(value, set | frozenset):
        for place, child in enumerate(sorted(value, key=repr)):
            yield f"{{{place}}}", child
    else:
        found = dict(getattr(value, "__dict__", {}))
        for kind in type(value).__mro__:
            slots = getattr(kind, "__slots__", ())
            for name in (slots,) if isinstance(slots, str) else slots:
                found[name] = getattr(value, name, _LEFT_OUT)
        for name, child in found.items():
            if name not in ("__weakref__", "__dict__") and child is not _LEFT_OUT:
                yield f".{name}", child


def _bits(leaf: Any) -> bytes:
    """Type, shape and bytes: NaN equals the same NaN, and 0.0 is not -0.0."""
    if isinstance(leaf, Tensor):
        # A single element may have any stride, and is contiguous all the same.
        flat = leaf.contiguous().as_strided((leaf.numel(),), (1,))
        raw = flat.view(torch.uint8).numpy().tobytes()
        return f"{leaf.dtype}{tuple(leaf.shape)}".encode() + raw
    if isinstance(leaf, np.ndarray):
        return f"{leaf.dtype}{leaf.shape}".encode() + np.ascontiguousarray(leaf).tobytes()
    text = leaf.hex() if isinstance(leaf, float) else repr(leaf)
    return f"{type(leaf).__name__}{text}".encode()


def _short(leaf: Any) -> str:
    text = repr(leaf).replace("\n", " ")
    return text if len(text) <= 60 else text[:57] + "..."
