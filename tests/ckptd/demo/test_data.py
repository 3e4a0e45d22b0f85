"""The demo's loader: resuming it anywhere gives the batches that would have come."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ckptd.demo.data import MIN_CORPUS_BYTES, ByteLoader, load_corpus


def _loader() -> ByteLoader:
    corpus = torch.randint(0, 256, (4_000,), dtype=torch.uint8, generator=torch.Generator())
    return ByteLoader(corpus, batch_size=4, context=64, seed=3)


@pytest.mark.parametrize("consumed", [0, 1, 14, 15, 16, 40])
def test_resumed_loader_continues_with_the_same_batches(consumed: int) -> None:
    original = _loader()
    for _ in range(consumed):
        next(original)
    resumed = _loader()
    next(resumed)
    resumed.load_state_dict(original.state_dict())
    for _ in range(20):
        for expected, actual in zip(next(original), next(resumed), strict=True):
            assert torch.equal(expected, actual)


def test_the_global_generator_is_left_alone() -> None:
    before = torch.get_rng_state()
    loader = _loader()
    for _ in range(40):
        next(loader)
    assert torch.equal(before, torch.get_rng_state())


def test_targets_are_the_inputs_one_byte_later() -> None:
    inputs, targets = next(_loader())
    assert torch.equal(inputs[:, 1:], targets[:, :-1])


def test_the_corpus_is_the_same_bytes_every_time() -> None:
    first = load_corpus(300_000)
    assert len(first) == 300_000
    assert torch.equal(first, load_corpus(300_000))


def test_a_corpus_that_is_too_small_is_refused() -> None:
    with pytest.raises(ValueError, match="smaller batch"):
        ByteLoader(torch.zeros(200, dtype=torch.uint8), batch_size=8, context=64, seed=0)


def test_the_corpus_is_that_of_sorted_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder and a file of the same beginning sort by their whole names; folders of tests are left out."""
    texts = {"b.py": "1", "a/z.py": "2", "a.py": "3", "a/b/c.py": "4", "c.txt": "5", "test/t.py": "6"}
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text * MIN_CORPUS_BYTES)
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"stdlib": str(tmp_path)})
    corpus = load_corpus()
    kept = sorted(path for path in tmp_path.rglob("*.py") if path.parent.name != "test")
    assert bytes(corpus.tolist()) == b"".join(path.read_bytes() for path in kept)
