"""The closed set of values: equal values of the same types come back, everything else is refused by its path."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from typing import Any

import msgpack
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckptd.client import values

PLAIN = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=20)
    | st.binary(max_size=20)
)
HASHABLE = st.none() | st.booleans() | st.integers() | st.text(max_size=8) | st.tuples(st.integers())
NESTED = st.recursive(
    PLAIN,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text(max_size=5) | st.integers(-(2**63), 2**63), inner, max_size=4)
        | st.sets(HASHABLE, max_size=4)
        | st.frozensets(HASHABLE, max_size=4)
    ),
    max_leaves=12,
)


def same_types(a: Any, b: Any) -> bool:
    """Equal, and of the same types all the way down (1 is not True, a tuple is not a list)."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(same_types(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same_types(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


@given(NESTED)
def test_round_trip(value: Any) -> None:
    assert same_types(values.unpack(values.pack(value)), value)


@given(NESTED)
def test_equal_values_have_equal_bytes(value: Any) -> None:
    assert values.equal(value, values.unpack(values.pack(value)))


@pytest.mark.parametrize(
    "value",
    [
        Counter({3: 2, "a": 1}),
        OrderedDict(b=1, a=2),
        torch.float8_e4m3fn,
        torch.bfloat16,
        torch.device("cuda", 1),
        torch.Size([2, 0, 3]),
        np.float32(1.5),
        np.int64(-3),
        np.bool_(True),
        2**200,
        -(2**63) - 1,
        float("inf"),
        -0.0,
    ],
    ids=repr,
)
def test_round_trip_of_particular_values(value: Any) -> None:
    back = values.unpack(values.pack(value))
    assert type(back) is type(value)
    assert back == value


def test_a_defaultdict_comes_back_as_a_mapping_of_the_same_items() -> None:
    """Its factory is code and stays at home; ``load_state_dict`` reads items."""
    assert values.unpack(values.pack(defaultdict(list, a=[1]))) == {"a": [1]}


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.uint8]
)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3)], ids=str)
def test_tensors(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.arange(6)[: torch.Size(shape).numel()].reshape(shape).to(dtype)
    back = values.unpack(values.pack(tensor))
    assert back.dtype is dtype
    assert back.shape == tensor.shape
    assert torch.equal(back, tensor)


def test_tensors_keep_nan_payloads_and_signs_of_zero() -> None:
    tensor = torch.tensor([0x7FC00123, -0x80000000, 0x7F800001], dtype=torch.int32).view(torch.float32)
    assert torch.equal(values.unpack(values.pack(tensor)).view(torch.int32), tensor.view(torch.int32))


def test_views_and_parameters_arrive_as_plain_tensors_that_own_their_memory() -> None:
    whole = torch.nn.Parameter(torch.arange(6.0).reshape(2, 3))
    back = values.unpack(values.pack({"t": whole.t(), "p": whole}))
    assert torch.equal(back["t"], whole.detach().t())
    assert type(back["p"]) is torch.Tensor
    back["p"].add_(1)


@pytest.mark.parametrize(
    "array",
    [np.arange(6).reshape(2, 3), np.zeros((0, 2)), np.array(3.5), np.arange(6, dtype=">i4")[::2]],
    ids=["2d", "empty", "0d", "strided"],
)
def test_arrays(array: np.ndarray[Any, Any]) -> None:
    back = values.unpack(values.pack(array))
    assert back.dtype == array.dtype
    assert back.shape == array.shape
    assert np.array_equal(back, array)
    back[...] = 0


class Custom:
    pass


@pytest.mark.parametrize(
    ("value", "path"),
    [
        (Custom(), "state['x']"),
        ({"a": [1, Custom()]}, "state['x']['a'][1]"),
        ({"a": {"b": (Custom(),)}}, "state['x']['a']['b'][0]"),
        ({"f": len}, "state['x']['f']"),
        ([torch.zeros(2).to_sparse()], "state['x'][0]"),
        ([np.array([Custom()])], "state['x'][0]"),
        ({"g": torch.Generator()}, "state['x']['g']"),
        (1j, "state['x']"),
    ],
    ids=["bare", "list", "tuple", "function", "sparse", "objects", "generator", "complex"],
)
def test_refusal_names_path_and_type(value: Any, path: str) -> None:
    with pytest.raises(values.UnsupportedValue) as caught:
        values.pack(value, "state['x']")
    assert caught.value.path == path
    message = str(caught.value)
    assert message.startswith(f"{path} is a ")
    assert "state_dict()/load_state_dict()" in message


def test_a_key_that_cannot_be_held_is_refused() -> None:
    with pytest.raises(values.UnsupportedValue, match="state"):
        values.pack({"inner": {Custom(): 1}})


def test_subclasses_of_containers_are_refused_rather_than_flattened() -> None:
    """A named tuple that came back as a tuple would break its reader later and elsewhere."""
    from typing import NamedTuple

    class Pair(NamedTuple):
        a: int

    with pytest.raises(values.UnsupportedValue, match="Pair"):
        values.pack({"p": Pair(1)})


def test_equality_is_of_bits_and_types() -> None:
    assert values.equal(float("nan"), float("nan"))
    assert not values.equal(0.0, -0.0)
    assert not values.equal(1, 1.0)
    assert not values.equal([1], (1,))
    assert values.equal({3, 1, 2}, {2, 3, 1})


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = (value,)
    return value


def test_values_that_are_nested_deeply_are_refused_and_end_no_process() -> None:
    """330 tuples in each other filled the C stack: the trainer died of SIGSEGV, at packing its own
    or at reading another's.
    """
    deepest = nested(values.MAX_DEPTH)
    assert values.unpack(values.pack(deepest)) == deepest
    with pytest.raises(values.UnsupportedValue, match=r"state cannot be held.*nested more than 100 deep"):
        values.pack(nested(values.MAX_DEPTH + 1))
    data = msgpack.packb(1)
    for _ in range(3000):
        data = msgpack.packb(msgpack.ExtType(1, b"\x91" + data))
    with pytest.raises(ValueError, match="nested more than 100 deep"):
        values.unpack(data)
    assert values.unpack(values.pack(deepest)) == deepest, "the depth of what was refused is not kept"


@pytest.mark.parametrize(
    ("code", "content"),
    [
        (1, 0.5),  # a tuple of a number
        (2, ["float32", [1 << 40], b"", "cpu"]),
        (2, ["nn", [1], b"1234", "cpu"]),
        (2, ["float32", [7], b"1234", "cpu"]),
        (3, ["<f4"]),
        (2, ["float32", [1], 1 << 53, "cpu"]),
        (3, ["<f8", [1], 1 << 53]),  # as many zeros
        (3, ["(1,f4", [1], b"1234"]),  # numpy reads it as Python
        (6, [[1]]),  # a set of lists
        (10, "nn"),
        (11, "toaster"),
    ],
)
def test_damaged_values_are_refused_by_one_error(code: int, content: object) -> None:
    """Fuzzing found that a damaged value left by whatever its type raised, and that a tensor without bytes
    could have any size.
    """
    with pytest.raises(ValueError, match=r"."):
        values.unpack(msgpack.packb(msgpack.ExtType(code, msgpack.packb(content))))
    with pytest.raises(ValueError, match="unhashable"):
        values.unpack(b"\x81\x90\x01")


def test_an_unknown_code_is_from_a_newer_version() -> None:
    import msgpack

    data = msgpack.packb(msgpack.ExtType(99, b""))
    with pytest.raises(ValueError, match="unknown value code 99"):
        values.unpack(data)


def test_a_single_element_may_have_any_stride() -> None:
    """Prodigy keeps ``p[::11]`` of a bias of eight: one element, eleven apart, which could not be packed."""
    strided = torch.arange(8.0)[::11].clone(memory_format=torch.preserve_format).as_strided((1,), (11,))
    assert values.unpack(values.pack(strided)).tolist() == [0.0]
