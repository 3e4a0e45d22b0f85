"""Errors say during what, on what, what is wrong and what to do; and they survive a pickle."""

from __future__ import annotations

import copy
import pickle

import pytest

from ckptd import errors
from ckptd.errors import AttachRefused, CkptdError, SegmentError


def test_a_message_has_operation_ids_and_hint() -> None:
    error = CkptdError("it broke", operation="seal", ids={"rank": 3, "slot": 1}, hint="Mend it")
    assert str(error) == "seal [rank=3 slot=1]: it broke. Mend it"
    assert str(CkptdError("it broke")) == "it broke"
    assert str(CkptdError("it broke", operation="seal")) == "seal: it broke"


def test_a_refusal_carries_its_code() -> None:
    error = AttachRefused("quota", "needs 3 GiB, 2 are left", "Raise CKPTD_MEMORY")
    assert (error.code, error.hint) == ("quota", "Raise CKPTD_MEMORY")
    assert str(error) == "attach refused (quota): needs 3 GiB, 2 are left. Raise CKPTD_MEMORY"


@pytest.mark.parametrize(
    ("hint", "shown"),
    [
        ("end that process", "End that process"),
        ("`ckptctl doctor` looks for causes", "`ckptctl doctor` looks for causes"),
        ("ckptctl doctor looks for causes", "ckptctl doctor looks for causes"),
        ("run=RunOptions() names it", "run=RunOptions() names it"),
        ("if, after all, it ends", "If, after all, it ends"),
    ],
)
def test_a_hint_is_a_sentence_and_names_in_it_stay(hint: str, shown: str) -> None:
    """After a full stop a hint began in lower case."""
    assert str(AttachRefused("quota", "full", hint)) == f"attach refused (quota): full. {shown}"


@pytest.mark.parametrize(
    "error",
    [
        SegmentError("bad magic", operation="read", ids={"rank": 1}, hint="Remove it"),
        AttachRefused("rank", "rank 1 is attached already", "Stop it first"),
    ],
)
def test_errors_survive_copy_and_pickle(error: CkptdError) -> None:
    for again in (copy.copy(error), pickle.loads(pickle.dumps(error))):
        assert type(again) is type(error)
        assert str(again) == str(error)
        assert vars(again) == vars(error)


def test_the_docstring_draws_every_error() -> None:
    assert errors.__doc__ is not None
    for name in errors.__all__:
        assert name in errors.__doc__
        assert issubclass(getattr(errors, name), CkptdError)
