"""`make demo-serving`, shortened: clients count each token once, and compare all answers."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from ckptd.client.serving.serving_device import EngineOptions
from ckptd.client.serving.weight_files import ModelFiles
from ckptd.core.serving.served_model import UnitKind
from examples.moe_serving.demo import differences, requests_of
from examples.moe_serving.model import VOCABULARY, Sizes, save_model
from examples.moe_serving.server_processes import Clients, tokens_per_s, undisturbed_answers
from tests.examples.playing import play
from tests.long import long


def test_a_model_is_what_the_engine_serves(tmp_path: Path) -> None:
    sizes = Sizes(layers=2, hidden=16, kv_heads=2, head_dim=4, experts=3, columns=8)
    mixture = save_model(tmp_path / "mixture", sizes)
    dense = save_model(tmp_path / "dense", Sizes(layers=1, hidden=16, kv_heads=2, head_dim=4, experts=0))
    assert ModelFiles(mixture).model.units_of(UnitKind.EXPERT) == 3
    assert ModelFiles(dense).model.units_of(UnitKind.COLUMNS) == 16
    again = save_model(tmp_path / "again", sizes)
    assert ModelFiles(again).identity == ModelFiles(mixture).identity
    requests = requests_of(3, 5, random.Random(1))
    assert all(0 <= token < VOCABULARY for each in requests for token in each.prompt)
    torch.manual_seed(0)
    answers = undisturbed_answers(mixture, requests, EngineOptions())
    torch.manual_seed(1)
    assert {name: len(tokens) for name, tokens in answers.items()} == {each.id: 5 for each in requests}
    assert undisturbed_answers(mixture, requests[::-1], EngineOptions()) == answers


def test_answers_that_differ_are_named() -> None:
    wanted = {"a": [1, 2, 3], "b": [4]}
    assert differences(wanted, {"a": [1, 2, 3], "b": [4]}) == []
    assert differences(wanted, {"a": [1, 2, 4]}) == [
        "a: 3 tokens, of which 2 are right; wanted 3",
        "b: 0 tokens, of which 0 are right; wanted 1",
    ]


def test_a_gap_is_the_longest_pause_after_a_loss(tmp_path: Path) -> None:
    clients = Clients(tmp_path, [], at_once=1)
    clients.join()
    assert clients.over
    clients.times += [(at, "a") for at in (1.0, 2.0, 2.5, 4.0, 4.1)]
    assert clients.gap_s(2.4) == 1.5
    assert clients.gap_s(2.7) == pytest.approx(1.3)
    assert clients.gap_s(9.0) == 0.0
    assert tokens_per_s(clients.times, 2.0, 4.0) == 1.0


@pytest.mark.slow
@pytest.mark.timeout(600)
@long
def test_the_demo_is_exact() -> None:
    output = play("examples.moe_serving.demo", "--requests", "18", "--tokens", "30", "--unit-us", "100")
    assert "IDENTICAL: all 18 answers" in output
    assert output.count("SIGKILL to device") == 2
