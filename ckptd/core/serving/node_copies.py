"""Which node of a server has copies of which blocks of KV, who makes them, and who reads them (pure).

A server's devices are on *nodes*: a daemon, its memory, and all devices that map it. A block of the backup
has the same place in the memory of each node (`kv_backup_index`), whether it is there or not: a node has the
blocks that its devices have computed, and those that others have copied to it.

All devices know what each node has, so nobody asks: a node copies to those that come next, in a ring in the
order of their first devices. A block that is on too few nodes is copied by the first one that has it. A block
is read where it is needed, or else from the next node of the ring that has it.

Sets of blocks are integers, a bit for each block.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Blocks = int


@dataclass(frozen=True, slots=True)
class ServerNodes:
    """Where the devices are.

    Attributes:
        devices: of each node, ascending; nodes by their first device.
    """

    devices: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, names: Mapping[int, str]) -> ServerNodes:
        """Nodes, given the name of each device's node."""
        found: dict[str, list[int]] = {}
        for device, name in sorted(names.items()):
            found.setdefault(name, []).append(device)
        return cls(tuple(map(tuple, found.values())))

    def __len__(self) -> int:
        return len(self.devices)

    def node(self, device: int) -> int:
        """The number of a device's node."""
        return next(number for number, devices in enumerate(self.devices) if device in devices)

    def next_nodes(self, node: int, copies: int) -> tuple[int, ...]:
        """To which nodes a node copies what its devices have computed."""
        return tuple((node + step) % len(self) for step in range(1, min(copies, len(self) - 1) + 1))

    def partner(self, device: int, node: int) -> int:
        """The device that receives what this one copies to another node."""
        own = self.devices[self.node(device)]
        return self.devices[node][own.index(device) % len(self.devices[node])]

    def bearer(self, node: int, block: int) -> int:
        """Which device of a node reads a block of its memory for others."""
        return self.devices[node][block % len(self.devices[node])]


def copies_to_make(held: Sequence[Blocks], copies: int) -> dict[tuple[int, int], Blocks]:
    """Which blocks are copied, by the node that copies and the node that gets them; empty sets are left out.

    Args:
        held: by node.
        copies: how many nodes should have a block besides the one that computed it.
    """
    nodes = len(held)
    wanted = min(1 + copies, nodes)
    on = [0] * (nodes + 2)  # blocks that are on at least so many nodes

    def count(blocks: Blocks) -> None:
        for number in range(nodes, 0, -1):
            on[number + 1] |= on[number] & blocks
        on[1] |= blocks

    found, seen = {}, 0
    for blocks in held:
        count(blocks)
    for keeper, blocks in enumerate(held):
        first, seen = blocks & ~seen, seen | blocks
        for step in range(1, nodes):
            target = (keeper + step) % nodes
            if make := first & ~held[target] & ~on[wanted]:
                found[keeper, target] = make
                count(make)
    return found


def nearest_holders(held: Sequence[Blocks], node: int) -> list[Blocks]:
    """Which blocks a node reads from each node."""
    found, seen = [0] * len(held), 0
    for step in range(len(held)):
        holder = (node + step) % len(held)
        found[holder], seen = held[holder] & ~seen, seen | held[holder]
    return found
