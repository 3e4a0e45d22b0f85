"""Each rank reads something of its node's images: all ranks go on, all look again, or all raise."""

from __future__ import annotations

from collections.abc import Callable

from ckptd.client.elastic.incarnation.image_inventory import ImageKey
from ckptd.client.elastic.incarnation.unit_reading import Unreadable
from ckptd.client.log_lines import get_logger
from ckptd.client.ranks.collectives import Collectives, TryAgain

__all__ = ["read_on_all"]

logger = get_logger(__name__)


def read_on_all(read: Callable[[], bytes], ranks: Collectives) -> list[bytes] | frozenset[ImageKey]:
    """What each rank's ``read`` returned, in the order of ranks; a collective call.

    Returns:
        Instead, where any rank came upon an image that is damaged or gone: what this rank has found to be unusable; all are to look again.
    Raises:
        DaemonUnavailable: on all ranks: one failed otherwise (which that one raises itself).
    """
    bad = frozenset[ImageKey]()

    def attempt() -> bytes:
        nonlocal bad
        try:
            return read()
        except Unreadable as error:
            logger.error("%s; the ranks plan without it", error)
            bad = frozenset([error.image.key])
            raise TryAgain from error
        except KeyError as error:  # it was given up between two looks at the folder
            logger.warning("%s any more; the ranks plan again", error)
            raise TryAgain from error

    try:
        return ranks.agree(attempt, bytes)
    except TryAgain:
        return bad
