"""KV of requests by head: it stays where it is, and is given up when it is not needed."""

from __future__ import annotations

import torch

from ckptd.client.serving.kv_cache import KvCache
from tests.ckptd.core.serving.models import decoder


def test_kv_of_requests() -> None:
    cache = KvCache(decoder(), torch.float32)
    cache.begin("a", 9)
    cache.begin("b", 5)
    kv = cache.head("a", 1, 2)
    assert kv.shape == (2, 9, 4)
    assert not cache.has("a", 0, 0)
    cache.tokens("a", 1, 2, 3, 5)[:] = 7.0
    cache.begin("a", 100)  # again: nothing changes
    assert cache.head("a", 1, 2) is kv
    assert kv[:, 3:5].eq(7.0).all()
    assert not kv[:, :3].any()
    cache.head("b", 0, 1)
    assert cache.held_bytes == 4 * (2 * 9 * 4 + 2 * 5 * 4)
    cache.keep(lambda request, layer, head: request == "b")
    assert not cache.has("a", 1, 2)
    assert cache.has("b", 0, 1)
    cache.end("b")
    assert list(cache.requests()) == ["a"]
    assert cache.held_bytes == 0


def test_what_a_forward_has_made_can_be_written_by_a_recovery() -> None:
    cache = KvCache(decoder(), torch.float32)
    cache.begin("a", 9)
    with torch.inference_mode():
        cache.head("a", 0, 0)[:, :2] = 1.0
    cache.head("a", 0, 0)[:, :5] = 2.0
    assert cache.head("a", 0, 0).sum() == 2.0 * 2 * 5 * 4
