"""Pieces of one width, whatever the parts were; the exchange itself is played by the end-to-end tests."""

from __future__ import annotations

import pytest

from ckptd.client.ranks.byte_exchange import _cut


@pytest.mark.parametrize("width", [1, 3, 7, 100])
@pytest.mark.parametrize("parts", [[], [b""], [b"abc"], [b"ab", b"", b"cdefgh", b"i"], [b"x" * 20, b"y"]])
def test_pieces_add_up_and_all_but_the_last_are_full(parts: list[bytes], width: int) -> None:
    pieces = list(_cut(parts, width))
    assert b"".join(pieces) == b"".join(parts)
    assert all(len(piece) == width for piece in pieces[:-1])
    assert all(pieces)
