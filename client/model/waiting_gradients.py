"""Gradients that one optimizer holds while another one steps.

In adversarial training a generator may step at every fifth step of the loop only, while the discriminator
goes on. Its gradients add up meanwhile: they *wait*, and are in no tensor that a plan captures, so a snapshot
at such a top has them by value. Or they stay as they were when it used them, until ``zero_grad()``: of those
a resume needs no values. Where no optimizer has stepped, nothing is needed: the weights are those of the top
before, and a replay from there computes the gradients again.

Optimizers that all step in each step need none of this, so it begins where one of them is seen not to.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ckptd.client.log_lines import get_logger
from ckptd.client.model.live_state import LiveState, local
from ckptd.client.optimizers.value_trees import plain_tensor

logger = get_logger(__name__)

# Its name among the objects of `state=`.
GRADIENTS = "ckptd.gradients"
# All of them in one snapshot: the training thread copies them.
_WARNED_BYTES = 16 << 20


class WaitingGradients:
    """The gradients that wait at a top: an object for ``state=``."""

    def __init__(self, binding: LiveState) -> None:
        self._binding = binding
        self._updated: set[int] = set()  # optimizers that have stepped since the top
        self._irregular = False  # there was a step in which one of them stepped, and not all
        # By place, as when the optimizer had used it: not the tensor itself, whose memory zero_grad() frees.
        self._used: dict[str, tuple[weakref.ref[Tensor], int]] = {}
        self._warned = False

    def updated(self, optimizer: int) -> None:
        """Optimizer number ``optimizer`` has used its gradients."""
        self._updated.add(optimizer)

    def begin(self) -> None:
        """The top of a step is over."""
        if self._irregular:
            used = {place: grad for place, grad, owner in self._there() if owner in self._updated}
            self._note_used(used)
        self._updated.clear()

    def begin_as(self, recorded: Mapping[str, Tensor] | None) -> None:
        """The top of a step with what a snapshot has recorded: all other gradients count as used."""
        if recorded is not None:
            self._note_used({place: grad for place, grad, _ in self._there() if place not in recorded})
        self._updated.clear()

    @property
    def can_be_captured(self) -> bool:
        """True if a snapshot at this top, where not all optimizers have stepped, would have all that wait.

        Not at the first such top: what was used before is not known.
        """
        known, self._irregular = self._irregular, True
        return known and all(map(plain_tensor, self._waiting().values()))

    @property
    def there_are(self) -> bool:
        """True if gradients wait at this top."""
        return bool(self._waiting())

    def state_dict(self) -> dict[str, Tensor] | None:
        """By parameter (``param/``) and by the tensor that the optimizer updates (``master/``); None: so far
        all optimizers have stepped in each step.
        """
        if not self._irregular:
            return None
        found = self._waiting() if self._updated else {}
        size = sum(gradient.nbytes for gradient in found.values())
        if size > _WARNED_BYTES and not self._warned:
            self._warned = True
            logger.warning(
                "at the top of a step an optimizer holds gradients of %.1f MiB that it has not used, while "
                "another one steps (%s): the training thread copies them in each snapshot. If they are not "
                "to add up, call zero_grad() right after the backward pass that makes them",
                size / 2**20,
                ", ".join(list(found)[:3]),
            )
        return found

    def load_state_dict(self, recorded: Mapping[str, Tensor] | None) -> None:
        """Put them where they were."""
        self._irregular, self._used = recorded is not None, {}
        for place, gradient in (recorded or {}).items():
            kind, _, name = place.partition("/")
            if name not in self._binding.params:
                logger.warning("the snapshot has a gradient of %s, which this model lacks", name)
                continue
            tensor = self._binding.held(name) if kind == "master" else self._binding.params[name]
            if tensor.grad is None:
                tensor.grad = torch.zeros_like(tensor)
            with torch.no_grad():
                local(tensor.grad).copy_(gradient)

    def _note_used(self, gradients: Mapping[str, Tensor]) -> None:
        self._used |= {place: (weakref.ref(g), g._version) for place, g in gradients.items()}

    def _waiting(self) -> dict[str, Tensor]:
        return {
            place: local(gradient).detach()
            for place, gradient, optimizer in self._there()
            if optimizer not in self._updated and not self._is_used(place, gradient)
        }

    def _is_used(self, place: str, gradient: Tensor) -> bool:
        used = self._used.get(place)
        return used is not None and used[0]() is gradient and used[1] == gradient._version

    def _there(self) -> Iterator[tuple[str, Tensor, int]]:
        """All gradients: the place, and the number of the optimizer that uses it."""
        binding = self._binding
        for name, (optimizer, _) in binding.owner.items():
            param, held = binding.params[name], binding.held(name)
            if param.grad is not None:
                yield f"param/{name}", param.grad, optimizer
            if held is not param and held.grad is not None:
                yield f"master/{name}", held.grad, optimizer


class UnreducedGradients:
    """Gradients of FSDP2 that were not reduced (``set_requires_gradient_sync(False)``): each rank has its
    own, whole, where no parameter of the optimizer has them.
    """

    def __init__(self, model: nn.Module) -> None:
        sharded: list[Any] = [m for m in model.modules() if hasattr(m, "_get_fsdp_state")]
        self._groups = [group for module in sharded for group in _groups_of(module._get_fsdp_state())]
        self._params = [param for group in self._groups for param in getattr(group, "fsdp_params", ())]

    @property
    def there_are(self) -> bool:
        """True in the middle of an accumulation."""
        return any(map(_unreduced, self._params)) or any(
            getattr(group, "_partial_reduce_output", None) is not None for group in self._groups
        )


def _groups_of(state: Any) -> list[Any]:
    groups = getattr(state, "_fsdp_param_groups", None)  # torch before 2.11 has one
    return [g for g in ([state._fsdp_param_group] if groups is None else groups) if g is not None]


def _unreduced(param: Any) -> bool:
    if getattr(param, "unsharded_accumulated_grad", None) is not None:
        return True
    return getattr(getattr(param, "_unsharded_param", None), "grad", None) is not None
