"""The engine's numbers are those of transformers, and the same bits on any number of devices."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ckptd.client.serving.decoder import Decoder, DecoderFacts, Piece
from ckptd.client.serving.device_group import ThreadDevices
from ckptd.client.serving.kv_cache import KvCache
from ckptd.client.serving.weight_files import DeviceWeights, ModelFiles
from ckptd.core.serving.server_layout import place_server
from tests.client.serving.tiny_models import KINDS, greedy

Models = Callable[[str], Path]

PROMPT, MOST, PIECE = tuple(range(5, 24)), 8, 8


def decode(folder: Path, n: int, *, ordered: bool = True, hybrid: bool = True) -> tuple[list[int], Tensor]:
    """Greedy tokens, and their logits, from n devices."""
    place, found = ThreadDevices(range(n)), dict[int, tuple[list[int], list[Tensor]]]()

    def work(me: int) -> None:
        files = ModelFiles(folder)
        layout = place_server(files.model, range(n), hybrid=hybrid)
        cache = KvCache(files.model, files.dtype)
        cache.begin("a", len(PROMPT) + MOST)
        decoder = Decoder(me, DeviceWeights(files), cache, ordered=ordered)
        homes = tuple(slot % n for slot in range(layout.heads.slots))
        tokens, logits, done = list(PROMPT), list[Tensor](), 0
        while len(logits) < MOST:
            end = min(done + PIECE, len(PROMPT)) if done < len(PROMPT) else done + 1
            last = decoder.forward([Piece("a", done, tuple(tokens[done:end]), homes)], layout, place.seat(me))
            done = end
            if done == len(tokens):
                logits += last
                tokens.append(int(last[0].argmax()))
        found[me] = tokens[len(PROMPT) :], logits

    threads = [threading.Thread(target=work, args=(me,)) for me in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == n, "a device failed: see the output"
    tokens, logits = found[0]
    for each, others in found.values():
        assert each == tokens
        assert all(torch.equal(a, b) for a, b in zip(logits, others, strict=True))
    return tokens, torch.stack(logits)


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_those_of_transformers_and_bits_those_of_one_device(tiny_model: Models, kind: str) -> None:
    wanted, its_logits = greedy(tiny_model(kind), PROMPT, MOST)
    tokens, logits = decode(tiny_model(kind), 1)
    assert tokens == wanted
    torch.testing.assert_close(logits, its_logits, rtol=1e-4, atol=1e-4)
    for n in (2, 3, 4):
        again, same = decode(tiny_model(kind), n)
        assert again == tokens
        assert torch.equal(same, logits), f"{n} devices"


def test_a_cyclic_placement_has_the_same_bits(tiny_model: Models) -> None:
    assert torch.equal(
        decode(tiny_model("qwen3_moe"), 3, hybrid=False)[1], decode(tiny_model("qwen3_moe"), 1)[1]
    )


@pytest.mark.parametrize("kind", ["llama", "mixtral"])
def test_sums_by_device_differ_by_rounding_only(tiny_model: Models, kind: str) -> None:
    """Greater than a few units in the last place of the largest logit would be another computation."""
    exact = decode(tiny_model(kind), 1)[1]
    for n in (2, 3, 4):
        distance = float((decode(tiny_model(kind), n, ordered=False)[1] - exact).abs().max())
        assert distance <= 1e-5 * float(exact.abs().max()), f"{n} devices: {distance}"


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"rope_scaling": {"rope_type": "llama3"}}, "rotary positions of type 'llama3'"),
        ({"partial_rotary_factor": 0.5}, "partial rotary positions"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"use_sliding_window": True}, "layers with different windows"),
    ],
)
def test_what_is_not_computed_is_refused(more: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DecoderFacts.of_config({"model_type": "llama"} | more)


def test_facts_of_configurations_of_two_versions() -> None:
    old = DecoderFacts.of_config({"model_type": "llama", "rope_theta": 5e5, "rms_norm_eps": 1e-5})
    new = DecoderFacts.of_config(
        {"model_type": "llama", "rms_norm_eps": 1e-5}
        | {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}
    )
    assert old == new == DecoderFacts(eps=1e-5, theta=5e5)
    assert DecoderFacts.of_config({"model_type": "qwen2", "sliding_window": 9}).window == 0
    assert DecoderFacts.of_config({"model_type": "mistral", "sliding_window": 9}).window == 9
