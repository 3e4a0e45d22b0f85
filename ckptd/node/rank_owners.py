"""Which process owns which rank: proved by a token that only this process and its daemon know.

A trainer makes a random token when it starts, and shows it at each attach. Who shows the token of a
live rank is that rank's process on a new connection; who does not is another one, whatever process
id it claims and whatever locks it says that it holds. Of each token its SHA-256 is kept beside the
segments, so that a restarted daemon knows the owners of the segments that it adopts.

The file `.owners` in the segment folder (mode 0600) is msgpack of an array of ``[job, run, rank,
sha256]``; it is replaced whole.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
from collections.abc import Container
from pathlib import Path

import msgspec

from ckptd.core.sessions import RankKey
from ckptd.private_files import replace_private_file
from ckptd.unpacking import unpack

__all__ = ["OwnerTokens"]

logger = logging.getLogger(__name__)

_Row = tuple[str, str, int, bytes]
_decoder = msgspec.msgpack.Decoder(list[_Row])
_LIMIT_BYTES = 64 << 20  # more than max_sessions can be


class OwnerTokens:
    """The digests of the tokens of attached ranks, in memory and in a file of this folder."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / ".owners"
        self._known = self._read()

    def prove(self, key: RankKey, token: bytes) -> bool:
        """Whether this is the token that the rank's owner showed."""
        known = self._known.get(key)
        return known is not None and token != b"" and hmac.compare_digest(known, _digest(token))

    def enter(self, key: RankKey, token: bytes, live: Container[RankKey]) -> str:
        """A rank is attached by who shows this token; returns why it was not written, if so.

        Args:
            live: ranks that have an owner; what is known of others is dropped.
        """
        digest = _digest(token)
        if self._known.get(key) == digest:
            return ""
        self._known = {known: told for known, told in self._known.items() if known in live}
        self._known[key] = digest
        return self._write()

    def remove(self, key: RankKey) -> None:
        """A rank's owner is gone."""
        if self._known.pop(key, None) is not None:
            self._write()

    def _read(self) -> dict[RankKey, bytes]:
        try:
            fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            with open(fd, "rb") as file:
                rows = unpack(_decoder, file.read(_LIMIT_BYTES), max_bytes=_LIMIT_BYTES)
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            logger.warning("the owners of adopted segments are not known: %s", error)
            return {}
        return {RankKey(job, run, rank): digest for job, run, rank, digest in rows}

    def _write(self) -> str:
        rows = [(key.job, key.run, key.rank, digest) for key, digest in self._known.items()]
        try:
            # A power cut takes the segments, too.
            replace_private_file(self._path, msgspec.msgpack.encode(rows), synced=False)
        except OSError as error:
            logger.warning("the owners of ranks were not written to %s: %s", self._path, error)
            return str(error)
        return ""


def _digest(token: bytes) -> bytes:
    return hashlib.sha256(token).digest()
