"""A server's devices and what each of them has: heads, columns of MLPs, experts (pure).

KV heads are placed in hybrid form by default, so that no device waits for one with a head more; columns and
experts in cyclic form, because all tokens pass them. The three placements follow a loss together.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from ckptd.core.serving.served_model import ServedModel, UnitKind
from ckptd.core.serving.unit_placement import UnitPlacement, move_units, place_units


@dataclass(frozen=True, slots=True)
class ServerLayout:
    """Where the units of a model are.

    Attributes:
        placements: of each kind that the model has; row i is layer ``model.layers_of(kind)[i]``.
    """

    model: ServedModel
    placements: dict[UnitKind, UnitPlacement]

    @property
    def devices(self) -> tuple[int, ...]:
        """Numbers of those that are there, ascending."""
        return self.heads.devices

    @property
    def heads(self) -> UnitPlacement:
        """Of KV heads, with their query heads; row i is layer i."""
        return self.placements[UnitKind.HEAD]

    def weight_bytes(self, device: int) -> int:
        """Weights that are split, on a device; those that are everywhere are not counted."""
        return sum(
            self.model.unit_bytes(kind)
            * sum(len(placed.weights_of(device, layer)) for layer in range(placed.layers))
            for kind, placed in self.placements.items()
        )


def place_server(model: ServedModel, devices: Iterable[int], *, hybrid: bool = True) -> ServerLayout:
    """Place a model from scratch.

    Args:
        hybrid: heads that do not divide evenly are data-parallel; if not, they rotate over devices.
    Raises:
        ValueError: there is no device, or one is there twice.
    """
    there = tuple(devices)
    return ServerLayout(
        model,
        {
            kind: place_units(
                len(model.layers_of(kind)),
                model.units_of(kind),
                there,
                hybrid=hybrid and kind is UnitKind.HEAD,
            )
            for kind in UnitKind
            if model.layers_of(kind)
        },
    )


def move_server(
    before: ServerLayout, *, lost: Collection[int] = (), joined: Collection[int] = ()
) -> ServerLayout:
    """Place a model on other devices with the least movement; see `move_units`.

    Raises:
        ValueError: a lost device is not there, a joined one is already, or none is left.
    """
    moved = {kind: move_units(p, lost=lost, joined=joined) for kind, p in before.placements.items()}
    return ServerLayout(before.model, moved)
