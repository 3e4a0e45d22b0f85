"""Ranges of rows of parameters (dimension 0), and the rows of a tensor that a recorded piece is about."""

from __future__ import annotations

from torch import Tensor

from ckptd.client.model.snapshot_layout import EntrySource

__all__ = ["Rows", "common", "merge", "rows_of_piece", "rows_within"]

# Parameter name -> ranges of its rows, merged and in order.
Rows = dict[str, list[tuple[int, int]]]


def merge(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same rows in order, those that touch as one range."""
    merged: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        if merged and merged[-1][1] >= start:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return merged


def common(one: list[tuple[int, int]], other: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The rows that are in both."""
    pairs = ((max(a, c), min(b, d)) for a, b in one for c, d in other)
    return [(a, b) for a, b in pairs if a < b]


def rows_of_piece(tensor: Tensor, piece: EntrySource) -> Tensor:
    """The rows of a whole tensor that a piece covers; all of it, if the piece names none."""
    return tensor if piece.start is None else tensor[piece.start : piece.stop]


def rows_within(recorded: Tensor, piece: EntrySource, source: EntrySource) -> Tensor:
    """The rows of ``recorded``, which holds those of ``source``, that a piece of it covers."""
    if piece.start is None or (piece.start, piece.stop) == (source.start, source.stop):
        return recorded
    first = source.start or 0
    return recorded[piece.start - first : piece.stop - first]  # type: ignore[operator]
