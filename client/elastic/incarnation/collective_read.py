"""Each rank reads something of its node's images, and all hear how that went: they go on together,
look again together, or raise together.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from ckptd.client.elastic.incarnation.image_inventory import ImageKey
from ckptd.client.elastic.incarnation.unit_reading import Unreadable
from ckptd.client.log_lines import get_logger
from ckptd.client.ranks.collectives import Exchange, Failure, raise_together

__all__ = ["read_together"]

logger = get_logger(__name__)


class _Read(msgspec.Struct, frozen=True):
    """What a rank has to say of what it read, or why it could not; ``again``: not this image,
    perhaps another.
    """

    said: bytes = b""
    again: bool = False
    failure: Failure = Failure()


def read_together(
    read: Callable[[], bytes], node: str, meet: Exchange
) -> list[bytes] | frozenset[ImageKey]:
    """What each rank's ``read`` returned, in the order of ranks; a collective call.

    Args:
        node: of this rank.
    Returns:
        Instead, where any rank came upon an image that is damaged or gone: what this rank has found to be unusable; all are to look again.
    Raises:
        DaemonUnavailable: on all ranks: one failed otherwise (which that one raises itself).
    """
    said, bad, again, failed = b"", frozenset[ImageKey](), False, None
    try:
        said = read()
    except Unreadable as error:
        logger.error("%s; the ranks plan without it", error)
        bad, again = frozenset([error.image.key]), True
    except KeyError as error:  # it was given up between two looks at the folder
        logger.warning("%s any more; the ranks plan again", error)
        again = True
    except Exception as error:  # noqa: BLE001 - the others wait to hear of it; raised below
        failed = error
    mine = _Read(said, again, Failure.of(node, failed))
    told = [msgspec.msgpack.decode(data, type=_Read) for data in meet(msgspec.msgpack.encode(mine))]
    raise_together([one.failure for one in told], failed)
    return bad if any(one.again for one in told) else [one.said for one in told]
