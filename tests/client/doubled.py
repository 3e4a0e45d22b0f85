"""A tensor that is made of another and answers to no operation, as the 8-bit states of some optimizers do."""

from __future__ import annotations

from typing import Any, Self

from torch import Tensor

__all__ = ["Doubled"]


class Doubled(Tensor):
    """A tensor of twice another's values, which is all that it keeps."""

    half: Any

    @staticmethod
    def __new__(cls, half: Tensor) -> Self:
        return Tensor._make_wrapper_subclass(cls, half.shape, dtype=half.dtype)

    def __init__(self, half: Tensor) -> None:
        self.half = half

    def __tensor_flatten__(self) -> tuple[list[str], list[int]]:
        return ["half"], [2]

    @classmethod
    def __tensor_unflatten__(
        cls, parts: dict[str, Tensor], context: list[int], size: object, stride: object
    ) -> Doubled:
        assert context == [2]
        return cls(parts["half"])

    @classmethod
    def __torch_dispatch__(cls, *called: Any) -> Any:
        raise NotImplementedError
