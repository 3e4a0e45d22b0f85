"""Real text that every machine has: the Python standard library's own sources, read as bytes.

The corpus is the sorted list of `.py` files, cut after `max_bytes`: the same bytes in every run on one
machine. `ByteLoader` is a stateful loader: its position is part of the training state, so it offers
`state_dict` and `load_state_dict`, and never draws from a global random generator.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests"})
MIN_CORPUS_BYTES = 256 * 1024
CORPUS_BYTES, HELD_OUT_BYTES = 4_000_000, 400_000


def load_held_out() -> Tensor:
    """What follows the corpus in the library, or of a small library its end."""
    return load_corpus(CORPUS_BYTES + HELD_OUT_BYTES)[-HELD_OUT_BYTES:]


def load_corpus(max_bytes: int = CORPUS_BYTES) -> Tensor:
    """The standard library's sources as one uint8 tensor `[num_bytes]`, at most `max_bytes` long.

    Raises:
        RuntimeError: this Python was installed without its sources.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    chunks: list[bytes] = []
    size = 0
    for path in _sources(root):
        chunk = path.read_bytes()[: max_bytes - size]
        chunks.append(chunk)
        size += len(chunk)
        if size >= max_bytes:
            break
    if size < MIN_CORPUS_BYTES:
        raise RuntimeError(
            f"only {size} bytes of Python sources under {root}: this example trains on the standard"
            " library's .py files; use a Python that was installed with them"
        )
    return torch.frombuffer(bytearray(b"".join(chunks)), dtype=torch.uint8)


def _sources(folder: Path) -> Iterator[Path]:
    """The Python files in it, sorted, one by one: a trainer that comes back need not list all."""
    for path in sorted(folder.iterdir()):
        if path.is_dir():
            if path.name not in SKIPPED_FOLDERS and not path.is_symlink():
                yield from _sources(path)
        elif path.suffix == ".py":
            yield path


class ByteLoader:
    """Endless shuffled batches of byte windows; the position is all of its state.

    Each epoch visits every window once, in an order that follows from `seed` and the epoch's number
    alone. So the state is two integers, and loading it costs one permutation.
    """

    def __init__(self, corpus: Tensor, *, batch_size: int, context: int, seed: int) -> None:
        self._corpus = corpus
        self._batch_size = batch_size
        self._context = context
        self._seed = seed
        self._starts = torch.arange(0, len(corpus) - context - 1, context)
        if len(self._starts) < batch_size:
            raise ValueError(
                f"the corpus gives {len(self._starts)} windows of {context} bytes, fewer than one"
                f" batch of {batch_size}; take a larger corpus or a smaller batch"
            )
        self._offsets = torch.arange(context + 1)
        self._epoch = 0
        self._position = 0
        self._order = self._shuffle()

    def _shuffle(self) -> Tensor:
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + self._epoch)
        return self._starts[torch.randperm(len(self._starts), generator=generator)]

    def __iter__(self) -> ByteLoader:
        return self

    def __next__(self) -> tuple[Tensor, Tensor]:
        """The next batch: inputs and targets, int64 `[batch_size, context]` each."""
        if self._position + self._batch_size > len(self._order):
            self._epoch += 1
            self._position = 0
            self._order = self._shuffle()
        starts = self._order[self._position : self._position + self._batch_size]
        self._position += self._batch_size
        windows = self._corpus[starts[:, None] + self._offsets].long()
        return windows[:, :-1], windows[:, 1:]

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self._epoch, "position": self._position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._epoch = int(state["epoch"])
        self._position = int(state["position"])
        self._order = self._shuffle()
