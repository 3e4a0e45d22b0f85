"""Patches of torch stack, and are undone in any order: two checkpointers may live at once and end
as they like.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest

from ckptd.client.model.function_patches import layered


def adding(word: str) -> Callable[..., Any]:
    def layer(below: Callable[..., list[str]], *args: Any) -> list[str]:
        return [word, *below(*args)]

    return layer


class Holder:
    """Has every kind of function that is stood in for."""

    @staticmethod
    def static(x: str) -> list[str]:
        return [x]

    def method(self, x: str) -> list[str]:
        assert isinstance(self, Holder)
        return [x]


def of_module() -> tuple[Any, str, Callable[[], list[str]]]:
    module = SimpleNamespace(function=lambda x: [x])
    return module, "function", lambda: module.function("x")


def of_static() -> tuple[Any, str, Callable[[], list[str]]]:
    return Holder, "static", lambda: Holder.static("x")


def of_class() -> tuple[Any, str, Callable[[], list[str]]]:
    return Holder, "method", lambda: Holder().method("x")


def of_object() -> tuple[Any, str, Callable[[], list[str]]]:
    holder = Holder()
    return holder, "method", lambda: holder.method("x")


@pytest.mark.parametrize("kind", [of_module, of_static, of_class, of_object])
@pytest.mark.parametrize("first_out", ["a", "b"])
def test_any_order_of_leaving(
    kind: Callable[[], tuple[Any, str, Callable[[], list[str]]]], first_out: str
) -> None:
    holder, name, call = kind()
    before = dict(vars(holder))
    users = {"a": ExitStack(), "b": ExitStack()}
    for word, user in users.items():
        user.enter_context(layered(holder, name, adding(word)))
    assert call() == ["b", "a", "x"]
    users.pop(first_out).close()
    ((left, user),) = users.items()
    assert call() == [left, "x"]
    user.close()
    assert dict(vars(holder)) == before


def test_the_same_layer_twice_is_two_users() -> None:
    holder, name, call = of_module()
    layer = adding("a")
    with layered(holder, name, layer):
        with layered(holder, name, layer):
            assert call() == ["a", "a", "x"]
        assert call() == ["a", "x"]


def test_somebody_elses_patch_above_is_left_alone() -> None:
    """It may have copied our mark, as ``functools.wraps`` does. Who comes later lies above it; what
    stays below it is inert.
    """
    holder, name, call = of_module()
    with layered(holder, name, adding("a")):
        ours = holder.function

        @functools.wraps(ours)
        def theirs(x: str) -> list[str]:
            return ["theirs", *ours(x)]

        holder.function = theirs
        with layered(holder, name, adding("b")):
            assert call() == ["b", "theirs", "a", "x"]
        assert holder.function is theirs
    assert holder.function is theirs
    assert call() == ["theirs", "x"]
    with layered(holder, name, adding("c")):
        assert call() == ["c", "theirs", "x"]
