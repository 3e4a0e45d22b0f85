"""Requests in pieces, draws that depend on nothing else, and a state that devices can pass on."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from ckptd.client.serving.generation import (
    GenerationRequest,
    RequestState,
    ServerState,
    StripeTable,
    sample,
)
from ckptd.core.serving.request_routing import ServedRequest
from ckptd.core.serving.server_layout import place_server
from tests.ckptd.core.serving.models import decoder


def asked(prompt: int = 11, most: int = 4, **more: object) -> GenerationRequest:
    return GenerationRequest(id="a", prompt=tuple(range(prompt)), most=most, **more)  # type: ignore[arg-type]


def test_a_prompt_is_computed_in_pieces_and_tokens_one_by_one() -> None:
    state, pieces = RequestState(request=asked(), homes=(2,)), []
    assert state.served == ServedRequest("a", 0, 14, (2,))
    while not state.finished:
        piece = state.next_tokens(4)
        pieces.append(piece)
        state.computed += len(piece)
        if state.computed == state.known:
            state.tokens.append(50 + len(state.tokens))
    assert pieces == [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10), (50,), (51,), (52,)]
    assert state.tokens == [50, 51, 52, 53]
    assert state.served == ServedRequest("a", 14, 0, (2,))
    assert [state.from_piece(kept, 4) for kept in (0, 3, 6, 10, 11, 13)] == [0, 0, 4, 8, 11, 13]


def test_a_token_that_ends_the_answer() -> None:
    state = RequestState(request=asked(stop=(7, 9)), tokens=[3])
    assert not state.finished
    state.tokens.append(9)
    assert state.finished


def test_a_draw_depends_on_seed_and_position_only() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0])
    warm = asked(temperature=1.0, seed=5)
    drawn = [sample(logits, warm, position) for position in range(2000)]
    torch.manual_seed(1)
    assert drawn == [sample(logits, warm, position) for position in range(2000)]
    assert drawn != [sample(logits, asked(temperature=1.0, seed=6), position) for position in range(2000)]
    odds = torch.softmax(logits, 0)
    for token, count in Counter(drawn).items():
        assert abs(count / 2000 - float(odds[token])) < 0.05
    cold = asked(temperature=0.0)
    assert {sample(logits, cold, position) for position in range(9)} == {2}
    top = asked(temperature=5.0, top=2)
    assert {sample(logits, top, position) for position in range(200)} == {1, 2}


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (asked(prompt=0), "0 tokens and asks for 4"),
        (asked(most=0), "asks for 0"),
        (asked(prompt=12), "has the token 11: the model has 11"),
        (asked(temperature=-1.0), "temperature -1.0"),
        (asked(top=-1), "top -1"),
        (GenerationRequest(id="", prompt=(1,), most=1), "id has 0 characters"),
    ],
)
def test_a_request_that_cannot_be_served(request_: GenerationRequest, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        request_.check(11)


def test_a_state_is_the_same_on_the_other_side() -> None:
    model = decoder(family="qwen3_moe", experts=5, expert_columns=6, expert_layers=(1,))
    table = StripeTable(stripes={"a": [3, 1]}, free=[0, 2], tags={3: 9, 1: 12}, last_tag=12)
    first = RequestState(request=asked(seed=3), tokens=[5], computed=11, homes=(4,))
    state = ServerState(place_server(model, [0, 4]), 2, 31, {"a": first}, table)
    again = ServerState.decode(state.encode(), model)
    assert again == state
    assert again.encode() == state.encode()
    assert [each.request.id for each in again.open] == ["a"]
    with pytest.raises(ValueError, match="Expected `object`"):
        ServerState.decode(b"\xc0", model)
