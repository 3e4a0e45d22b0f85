"""The global random generators: torch (host and every device), numpy, Python; and who draws from them."""

from __future__ import annotations

import ctypes
import pickle
import random
import sys
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import numpy as np
import torch

# What a program may keep of its own.
GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)


def capture_rng() -> dict[str, Any]:
    """All global generators, as values of the closed set; draws no number and synchronises no device."""
    state: dict[str, Any] = {
        "torch": torch.get_rng_state().numpy().tobytes(),
        "numpy": _NUMPY.now(),
        "python": _PYTHON.now(),
    }
    if devices := _device_states():
        state["cuda"] = devices
    return state


def _of_numpy() -> list[Any]:
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return [kind, np.asarray(keys).tobytes(), int(position), int(has_gauss), float(cached)]


def _of_python() -> list[Any]:
    version, internal, gauss = random.getstate()
    return [version, np.asarray(internal, dtype=np.uint32).tobytes(), gauss]


def _device_states() -> list[bytes]:
    if not torch.cuda.is_initialized():
        return []
    return [s.numpy().tobytes() for s in torch.cuda.get_rng_state_all()]


def restore_rng(state: dict[str, Any]) -> None:
    """Set every generator to a captured state.

    Raises:
        ValueError: the state has more CUDA devices than this process.
    """
    torch.set_rng_state(_tensor(state["torch"]))
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, np.frombuffer(keys, dtype=np.uint32), position, has_gauss, cached))
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(np.frombuffer(internal, dtype=np.uint32).tolist()), gauss))
    devices = state.get("cuda", [])
    if devices:
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if count < len(devices):
            raise ValueError(
                f"the snapshot holds random state of {len(devices)} CUDA devices, this process sees {count}"
            )
        torch.cuda.set_rng_state_all([_tensor(s) for s in devices])


def _tensor(raw: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8)


class Draws:
    """Notices optimizers that draw random numbers in their steps.

    Ranks whose generators differ then get different values, even if they were equal before. It compares
    the global generators before and after each update. It does not see generators that an optimizer
    keeps, nor draws before the closure of ``step(closure)`` ends.

    Attributes:
        found: the number of the optimizer that drew; -1: none so far. Ends the comparison.
    """

    def __init__(self, *, watches: bool) -> None:
        self.watches = watches
        self.found = -1
        self._before: tuple[Any, ...] | None = None

    def before(self) -> None:
        """An update begins."""
        if self.watches and self.found < 0:
            self._before = _generators()

    def after(self, optimizer: int) -> None:
        """Optimizer number ``optimizer`` has updated its parameters."""
        before, self._before = self._before, None
        if before is not None and before != _generators():
            self.found = optimizer


def _generators() -> tuple[Any, ...]:
    """Equal as long as nobody draws. Takes 6 us; 46 us where states are not read in place."""
    return torch.get_rng_state().numpy().tobytes(), _numpy(), _python(), _device_states()


# -- states in place -------------------------------------------------------------------------------

# `get_state` of numpy and `getstate` of Python make an array and a tuple of 625 numbers each time. The
# same numbers lie in one piece in memory, which is compared as bytes: a generator's C structure after
# the head that all objects have.
_HEAD_BYTES = object.__basicsize__
_MT19937_BYTES = 625 * 4  # numpy's `mt19937_state`: the key, and the position in it


def _numpy() -> Any:
    """The state of numpy's global generator."""
    state: Any = getattr(np.random.get_state, "__self__")  # noqa: B009
    if _in_place() and type(state._bit_generator) is np.random.MT19937:
        return _numpy_bytes(state)
    packed = np.random.get_state(legacy=False)
    assert isinstance(packed, dict)
    return pickle.dumps(packed)


def _numpy_bytes(state: Any) -> tuple[bytes, bytes]:
    address = state._bit_generator.ctypes.state_address
    # The first says whether a second normal number was drawn ahead, and which.
    return _structure(state, type(state)), ctypes.string_at(address, _MT19937_BYTES)


def _python() -> Any:
    """The state of Python's global generator."""
    if _in_place():
        return _python_bytes(getattr(random.getstate, "__self__"))  # noqa: B009
    return random.getstate()


def _python_bytes(state: random.Random) -> tuple[bytes, Any]:
    return _structure(state, random.Random.__bases__[0]), state.gauss_next  # type: ignore[attr-defined]


def _structure(of: object, as_type: type) -> bytes:
    """The memory of an object behind its head, as far as ``as_type`` defines it."""
    return ctypes.string_at(id(of) + _HEAD_BYTES, as_type.__basicsize__ - _HEAD_BYTES)


@cache
def _in_place() -> bool:
    """True if states lie where they are expected: tested with draws from generators of our own."""
    numpy, python = np.random.RandomState(0), random.Random(0)
    if sys.implementation.name != "cpython" or not hasattr(numpy, "_bit_generator"):
        return False
    return _shows_draws(
        lambda: _numpy_bytes(numpy),
        (numpy.standard_normal, numpy.standard_normal, numpy.random_sample),
    ) and _shows_draws(lambda: _python_bytes(python), (python.random, python.gauss, python.gauss))


def _shows_draws(state: Callable[[], Any], draws: Iterable[Callable[[], Any]]) -> bool:
    """True if the state changes with each of these draws, and with nothing else."""
    for draw in draws:
        before = state()
        if before != state():
            return False
        draw()
        if before == state():
            return False
    return True


class _Values:
    """A generator's state as values of the closed set, made anew only if the generator has moved: that takes
    tens of microseconds of the training thread, twice in each step, and few loops draw from these generators.

    Args:
        seen: its state in place.
        make: the values.
    """

    def __init__(self, seen: Callable[[], Any], make: Callable[[], list[Any]]) -> None:
        self._seen, self._make = seen, make
        # One tuple: several threads capture.
        self._last: tuple[Any, list[Any]] | None = None

    def now(self) -> list[Any]:
        seen, last = self._seen(), self._last
        if last is None or last[0] != seen:
            last = self._last = seen, self._make()
        return [*last[1]]


_NUMPY = _Values(_numpy, _of_numpy)
_PYTHON = _Values(_python, _of_python)
