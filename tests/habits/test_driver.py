"""The driver of the tables tells apart what is exact, what is refused and what is wrong; without
this a table would show nothing.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.e2e.harness import DaemonProcess
from tests.habits.driver import Parents, Row, Verdict, check, play
from tests.habits.leaves import differences, digest, leaves

TOYS = "tests.habits.toys"


@pytest.mark.parametrize("window", [1, 3])
def test_an_exact_training(tmp_path: Path, daemon: DaemonProcess, parents: Parents, window: int) -> None:
    row = Row(TOYS, "exact", window=window)
    check(row, play(row, tmp_path, daemon.endpoint, parents))


def test_other_batches_are_a_difference(tmp_path: Path, daemon: DaemonProcess, parents: Parents) -> None:
    """A loader whose position nobody keeps: the driver names the steps, whether or not ckptd notices."""
    outcome = play(Row(TOYS, "forgets"), tmp_path, daemon.endpoint, parents)
    assert outcome.verdict is Verdict.DIFFERENT
    assert "on another batch" in outcome.text


def test_a_refusal_counts_in_the_first_life_only(
    tmp_path: Path, daemon: DaemonProcess, parents: Parents
) -> None:
    outcome = play(Row(TOYS, "refused"), tmp_path, daemon.endpoint, parents)
    assert outcome.verdict is Verdict.REFUSED
    assert "state['data']['holds']" in outcome.text


# -- the comparison ------------------------------------------------------------------------------


class Counter:
    def __init__(self, count: int) -> None:
        self.count, self.inner = count, [self]


def test_every_leaf_counts() -> None:
    """An attribute of an object, a sign of zero, a type: each is a difference with a path."""
    state = {"o": Counter(1), "t": torch.zeros(2), "g": torch.Generator().manual_seed(1), "f": 1.0}
    same = {"o": Counter(1), "t": torch.zeros(2), "g": torch.Generator().manual_seed(1), "f": 1.0}
    assert differences(leaves(state), leaves(same)) == []
    other = {"o": Counter(2), "t": -torch.zeros(2), "g": torch.Generator().manual_seed(2), "f": 1}
    paths = [text.partition(":")[0] for text in differences(leaves(state), leaves(other))]
    assert paths == ["['f']", "['g']", "['o'].count", "['t']"]


def test_a_leaf_that_only_one_has() -> None:
    assert differences(leaves({"a": 1}), leaves({"a": 1, "b": 2})) == ["['b']: only after the kills"]


def test_parameters_as_keys_have_names() -> None:
    param = torch.nn.Parameter(torch.ones(1))
    found = leaves({param: {"step": 3}}, {id(param): "weight"})
    assert found["[weight]['step']"] == 3
    with pytest.raises(ValueError, match="Parameter is a key and has no name"):
        leaves({param: {"step": 3}})


def test_batches_that_differ_have_other_digests() -> None:
    assert digest({"x": torch.ones(2), "n": ["a"]}) == digest({"x": torch.ones(2), "n": ["a"]})
    assert digest({"x": torch.ones(2), "n": ["a"]}) != digest({"x": torch.ones(2), "n": ["b"]})
    assert digest(torch.ones(2)) != digest(torch.ones(2, 1))
