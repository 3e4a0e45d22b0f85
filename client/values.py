"""A closed set of value types as msgpack: what step scalars and the user's ``state=`` may contain.

Everything round-trips to an equal value of the same type: None, bool, int (of any size), float, str, bytes,
list, tuple, dict, OrderedDict, Counter, set, frozenset, torch tensors, dtypes, devices and sizes, numpy
arrays and scalars. Nothing else, and no pickle: others than its writer may read an image.

Values may be nested `MAX_DEPTH` deep, in packing and in unpacking: each level costs tens of kilobytes of
the C stack, and a process whose stack is full dies without an error.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgpack
import numpy as np
import torch

# Of tuples, sets and the other types with a code. Lists and dicts have msgpack's own bound (511 to
# pack, 1,024 to unpack).
MAX_DEPTH = 100

(
    _TUPLE,
    _TENSOR,
    _NDARRAY,
    _BIGINT,
    _NPSCALAR,
    _SET,
    _FROZENSET,
    _COUNTER,
    _ORDERED,
    _DTYPE,
    _DEVICE,
    _SIZE,
) = range(1, 13)


_DTYPES = {str(found)[6:]: found for found in vars(torch).values() if isinstance(found, torch.dtype)}


class UnsupportedValue(ValueError):
    """A value outside the closed set; the message holds its path from the root."""

    def __init__(self, path: str, value: object, why: str = "") -> None:
        self.path = path
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        super().__init__(
            f"{path} cannot be held by a snapshot: {why}. Flatten it in state_dict()/load_state_dict()."
            if why
            else f"{path} is a {kind}, which a snapshot cannot hold. Supported: None, bool, int, float, str, "
            "bytes, list, tuple, dict, set, torch tensors, numpy arrays and scalars. Convert it in "
            "state_dict()/load_state_dict()."
        )


class _TooDeep(ValueError):
    """Values are nested deeper than `MAX_DEPTH`."""


class _Depth(threading.local):
    now = 0


_depth = _Depth()


def pack(value: object, path: str = "state") -> bytes:
    """Serialise ``value``.

    Raises:
        UnsupportedValue: naming the first offending path under ``path``.
    """
    try:
        return _packb(value)
    except _TooDeep as error:
        raise UnsupportedValue(path, value, str(error)) from error
    except (TypeError, ValueError, OverflowError) as error:
        _find_unsupported(value, path)
        raise UnsupportedValue(path, value) from error


def unpack(data: bytes | memoryview) -> Any:
    """The inverse of ``pack``; tensors and arrays own their memory.

    Raises:
        ValueError: ``pack`` did not make ``data``.
    """
    try:
        return msgpack.unpackb(data, ext_hook=_decode, strict_map_key=False, use_list=True)
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, SyntaxError, TypeError) as error:
        raise ValueError(f"not values as a snapshot has them: {error}") from error


def equal(a: object, b: object) -> bool:
    """True if two values are identical to the bit (NaN equals the same NaN; 0.0 is not -0.0)."""
    return pack(a) == pack(b)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor, uint8 ``[nbytes]``; a view if it is contiguous."""
    flat = tensor.contiguous()
    # A single element may have any stride, as one of `x[::11]` has, and is contiguous all the same.
    return flat.as_strided((flat.numel(),), (1,)).view(torch.uint8)


def _packb(value: object) -> bytes:
    packed: bytes = msgpack.packb(value, default=_encode, strict_types=True)
    return packed


def _encode(value: Any) -> msgpack.ExtType:
    for kind, code, convert in _ENCODERS:
        if type(value) is kind or (code in _BY_BASE and isinstance(value, kind)):
            with _deeper():
                return msgpack.ExtType(code, _packb(convert(value)))
    raise TypeError(type(value).__name__)


def _tensor_parts(value: torch.Tensor) -> list[object]:
    tensor = value.detach()
    if (
        tensor.layout is not torch.strided
        or tensor.is_quantized
        or type(value) not in (torch.Tensor, torch.nn.Parameter)
    ):
        raise TypeError("only plain strided tensors")
    host = tensor.cpu()
    raw = bytes_of(host).numpy().tobytes() if host.numel() else b""
    return [str(tensor.dtype)[6:], list(tensor.shape), raw, str(tensor.device)]


def _to_tensor(parts: list[Any]) -> torch.Tensor:
    dtype, shape, raw, device = parts
    if not raw:
        if 0 not in shape:
            raise ValueError(f"a tensor of shape {shape} without bytes")
        return torch.empty(shape, dtype=_DTYPES[dtype])
    tensor = torch.frombuffer(_owned(raw), dtype=torch.uint8).view(_DTYPES[dtype]).reshape(shape)
    # A device that is not here must not stop a restore.
    on_device = torch.device(device).type == "cuda" and torch.cuda.is_available()
    return tensor.to(device) if on_device else tensor


def _array_parts(value: np.ndarray[Any, Any]) -> list[object]:
    if value.dtype.hasobject:
        raise TypeError("object arrays")
    return [value.dtype.str, list(value.shape), np.ascontiguousarray(value).tobytes()]


def _owned(raw: bytes) -> bytearray:
    """A copy; TypeError for a number, of which bytearray makes as many zeros."""
    return bytearray(memoryview(raw))


def _to_array(parts: list[Any]) -> np.ndarray[Any, Any]:
    return np.frombuffer(_owned(parts[2]), dtype=np.dtype(parts[0])).reshape(parts[1])


def _ordered(values: Any) -> list[Any]:
    """A stable order of a set makes equal values pack to equal bytes."""
    return sorted(values, key=_packb)


_ENCODERS: list[tuple[type, int, Callable[[Any], object]]] = [
    (tuple, _TUPLE, list),
    (torch.Tensor, _TENSOR, _tensor_parts),
    (np.ndarray, _NDARRAY, _array_parts),
    (int, _BIGINT, str),
    (np.generic, _NPSCALAR, lambda v: _array_parts(np.asarray(v))),
    (set, _SET, _ordered),
    (frozenset, _FROZENSET, _ordered),
    (Counter, _COUNTER, lambda v: list(map(list, v.items()))),
    (OrderedDict, _ORDERED, lambda v: list(map(list, v.items()))),
    (defaultdict, _ORDERED, lambda v: list(map(list, v.items()))),
    (torch.dtype, _DTYPE, lambda v: str(v)[6:]),
    (torch.device, _DEVICE, str),
    (torch.Size, _SIZE, list),
]
_BY_BASE = frozenset({_TENSOR, _NPSCALAR})
_DECODERS: dict[int, Callable[[Any], object]] = {
    _TUPLE: tuple,
    _TENSOR: _to_tensor,
    _NDARRAY: _to_array,
    _BIGINT: int,
    _NPSCALAR: lambda parts: _to_array(parts)[()],
    _SET: set,
    _FROZENSET: frozenset,
    _COUNTER: lambda items: Counter(dict(items)),
    _ORDERED: lambda items: OrderedDict(map(tuple, items)),
    _DTYPE: _DTYPES.__getitem__,
    _DEVICE: torch.device,
    _SIZE: torch.Size,
}


def _decode(code: int, data: bytes) -> object:
    if code not in _DECODERS:
        raise ValueError(f"unknown value code {code}: written by a newer version?")
    with _deeper():
        return _DECODERS[code](unpack(data))


@contextmanager
def _deeper() -> Iterator[None]:
    if _depth.now >= MAX_DEPTH:
        raise _TooDeep(f"its values are nested more than {MAX_DEPTH} deep")
    _depth.now += 1
    try:
        yield
    finally:
        _depth.now -= 1


def _find_unsupported(value: Any, path: str) -> None:
    """Raise ``UnsupportedValue`` at the innermost value that does not pack."""
    if isinstance(value, dict):
        children = [(f"{path}[{k!r}]", v) for k, v in value.items()]
    elif isinstance(value, list | tuple | set | frozenset):
        children = [(f"{path}[{i}]", v) for i, v in enumerate(value)]
    else:
        children = []
    for child_path, child in children:
        try:
            _packb(child)
        except (TypeError, ValueError, OverflowError):
            _find_unsupported(child, child_path)
            raise UnsupportedValue(child_path, child) from None
