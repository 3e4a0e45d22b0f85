"""The smallest valid value of each message type: the seeds that no test has to write by hand."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Annotated, Any, get_args

import msgspec
from msgspec import inspect

__all__ = ["examples_of"]

_NAMES = ("job", "info", "floor", "run-1", "0123abcd", "a" * 32, "sha256:" + "a" * 64)


def examples_of(union: Any) -> Iterator[Any]:
    """One of each struct in a union: the first with all fields, so that optional ones are seen, too."""
    for kind in get_args(union) or (union,):
        yield msgspec.convert(_value(inspect.type_info(kind)), kind)


def _value(kind: inspect.Type) -> Any:
    match kind:
        case inspect.StructType():
            values = {each.encode_name: _value(each.type) for each in kind.fields}
            if kind.array_like:
                return ([kind.tag] if kind.tag is not None else []) + list(values.values())
            return values if kind.tag is None else {kind.tag_field: kind.tag} | values
        case inspect.UnionType():
            return _value(next(each for each in kind.types if not isinstance(each, inspect.NoneType)))
        case inspect.IntType():
            return max(1, kind.ge or 0) if kind.le is None else min(max(1, kind.ge or 0), kind.le)
        case inspect.FloatType():
            return max(0.5, kind.ge or 0)
        case inspect.BoolType():
            return True
        case inspect.BytesType():
            return bytes(min(max(16, kind.min_length or 0), kind.max_length or 16))
        case inspect.StrType():
            return _text(kind)
        case inspect.LiteralType():
            return kind.values[0]
        case inspect.EnumType():
            return next(iter(kind.cls)).value
        case inspect.NamedTupleType():
            return [_value(each.type) for each in kind.fields]
        case inspect.TupleType():
            return [_value(each) for each in kind.item_types]
        case inspect.ListType() | inspect.VarTupleType() | inspect.FrozenSetType():
            return [_value(kind.item_type)] * max(1, kind.min_length or 0)
        case inspect.DictType():
            return {_value(kind.key_type): _value(kind.value_type)}
        case inspect.AnyType() | inspect.RawType():
            return {}
    raise TypeError(f"no example of {kind}")


def _text(kind: inspect.StrType) -> str:
    meta = msgspec.Meta(pattern=kind.pattern, min_length=kind.min_length, max_length=kind.max_length)
    constrained: Any = Annotated[str, meta]
    for name in _NAMES:
        with suppress(msgspec.ValidationError):
            return str(msgspec.convert(name, constrained))
    raise TypeError(f"no example of {kind}")
