"""What optimizers keep beside tensors per parameter: looked at before each snapshot, captured or
refused by its path.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from ckptd.client import values
from ckptd.client.capture.step_state import gather_groups
from ckptd.client.model.live_state import LiveState
from ckptd.client.model.snapshot_layout import StateTable
from ckptd.client.optimizers.optimizer_audit import cannot_be_captured
from ckptd.client.optimizers.value_trees import NotCapturable, flat_state
from tests.e2e.precision_cases import BlockAdam
from tests.habits.optimizers import SAM, CountsInState, Lookahead


def bound(make: Any, width: int = 3) -> tuple[LiveState, Any]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(width, 4), nn.Linear(4, 2))
    given = make(model.parameters())
    inner = getattr(given, "optimizer", given)
    return LiveState(model, [inner], None, [given]), given


def step(binding: LiveState, given: Any, times: int = 1) -> None:
    def closure() -> Any:
        binding.model.zero_grad()
        width = binding.params["0.weight"].shape[1]
        loss = binding.model(torch.ones(2, width)).square().mean()
        loss.backward()
        return loss

    for _ in range(times):
        if isinstance(given, SAM):
            given.step(closure)
        else:
            closure()
            given.step()


def gathered(binding: LiveState) -> bytes:
    binding.kept.look(StateTable.of(binding).specs)
    return binding.kept.gather()


@pytest.mark.parametrize("make", [SAM, CountsInState, lambda ps: Lookahead(torch.optim.SGD(ps, lr=0.1))])
def test_a_fresh_process_has_all_of_it_again(make: Any) -> None:
    """SAM's inner moments, ``state["step"]``, Lookahead's slow weights: they were in no snapshot,
    and nobody was told.
    """
    binding, given = bound(make)
    step(binding, given, 4)
    kept = gathered(binding)
    fresh, _ = bound(make)
    assert fresh.kept.difference(kept) != ""
    fresh.kept.load(kept, list(fresh.owner))
    assert fresh.kept.difference(kept) == ""


def test_moments_of_an_inner_optimizer_go_to_the_parameters_of_this_process() -> None:
    binding, given = bound(SAM)
    step(binding, given, 2)
    fresh, other = bound(SAM)
    fresh.kept.load(gathered(binding), list(fresh.owner))
    weight = fresh.params["0.weight"]
    assert torch.equal(
        other.base_optimizer.state[weight]["exp_avg"],
        given.base_optimizer.state[binding.params["0.weight"]]["exp_avg"],
    )
    assert other.param_groups is other.base_optimizer.param_groups


def test_of_a_tensor_that_is_made_of_others_only_references_are_kept() -> None:
    """Its parts are anchored like other state; once every snapshot had all of them, and the training thread
    copied them.
    """

    def blocks(params: Any) -> BlockAdam:
        return BlockAdam(params, 0.1)

    binding, given = bound(blocks, width=64)
    step(binding, given)
    specs = {spec.key: spec for spec in StateTable.of(binding).specs["0.weight"]}
    assert [*specs] == ["step", "first:codes", "first:scales", "second:codes", "second:scales"]
    assert specs["first:codes"].dtype is torch.float8_e4m3fn
    kept = gathered(binding)
    ((_, node), _) = values.unpack(kept)["entries"]["0.weight"]
    assert [part for _, part in node[-1]] == [
        ["k", "state", "0.weight", "first:codes"],
        ["k", "state", "0.weight", "first:scales"],
    ]
    live = binding.state("0.weight")

    fresh, other = bound(blocks, width=64)
    parts = {key: part.clone() for key, part in flat_state(live).items()}
    other.state[fresh.params["0.weight"]] = dict(parts)
    fresh.kept.load(kept, ["0.weight"])
    made = fresh.state("0.weight")
    assert list(made) == list(live)
    assert flat_state(made)["first:codes"] is parts["first:codes"]
    assert gathered(binding) == kept
    live["first"].codes = live["first"].codes.float()  # not as planned
    assert binding.kept.look(binding.kept.specs) == ""
    (_, codes), _ = values.unpack(binding.kept.gather())["entries"]["0.weight"][0][1][-1]
    assert torch.equal(codes[1], live["first"].codes)


class KeepsAnObject(torch.optim.SGD):
    """As GaLore does: an object of its own in the state of each matrix, made in the first step."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for p in self.param_groups[0]["params"]:
            self.state[p].setdefault("projector", Projector())
        return super().step(closure)


class Projector:
    def __init__(self) -> None:
        self.rank = 4


def test_an_object_in_the_state_is_refused_by_its_path() -> None:
    """Such a training was left unprotected after one cryptic line."""
    binding, given = bound(lambda ps: KeepsAnObject(ps, lr=0.1))
    step(binding, given)
    with pytest.raises(NotCapturable) as refused:
        gathered(binding)
    text = cannot_be_captured(binding.kept.whose, refused.value)
    assert text.startswith("optimizer KeepsAnObject keeps state[0.weight]['projector'] (type ")
    assert "Projector, made in a step), which cannot be captured: no snapshot is taken" in text


def test_what_can_be_told_before_training_is() -> None:
    class Counts(torch.optim.SGD):
        def __init__(self, params: Any) -> None:
            super().__init__(params, lr=0.1)
            self.numbers = itertools.count()

    with pytest.raises(ValueError, match=r"optimizer Counts keeps numbers \(type itertools.count"):
        bound(Counts)


class Grows(torch.optim.SGD):
    """State whose shape depends on the number of the step, and that is a number at first."""

    count = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.count += 1
        for p in self.param_groups[0]["params"]:
            self.state[p]["norms"] = torch.ones(self.count)
            self.state[p]["late"] = 0.5 if self.count < 3 else torch.ones(2)
        return super().step(closure)


def test_state_of_another_shape_than_planned_goes_with_the_step_scalars() -> None:
    """It was copied by the address and size of what was planned: bytes of something else, or beyond
    the tensor.
    """
    binding, given = bound(lambda ps: Grows(ps, lr=0.1))
    step(binding, given)
    specs = StateTable.of(binding).specs
    assert binding.kept.look(specs) == ""
    step(binding, given)
    assert binding.kept.look(specs) == ""  # to plan anew in each step would help nobody
    kept = values.unpack(binding.kept.gather())
    assert [k for k, _ in kept["entries"]["0.weight"]] == ["norms"]
    assert binding.kept.python()["0.weight"] == {"late": 0.5}
    step(binding, given)
    assert binding.kept.look(specs) == "optimizer state 'late' of 1.bias"
    packed = binding.kept.gather()
    fresh, _ = bound(lambda ps: Grows(ps, lr=0.1))
    fresh.kept.load(packed, list(fresh.owner))
    state = fresh.state("0.weight")
    assert (state["norms"].tolist(), state["late"].tolist()) == ([1, 1, 1], [1, 1])


def test_a_look_that_fails_half_way_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the next look takes the parameters that were not reached for looked at, and a snapshot lacks their state."""
    binding, given = bound(lambda ps: Grows(ps, lr=0.1))
    step(binding, given)
    specs = StateTable.of(binding).specs
    binding.kept.look(specs)
    step(binding, given, 2)
    state = binding.state

    def interrupted(name: str) -> Any:
        if name == "1.bias":
            raise KeyboardInterrupt
        return state(name)

    with monkeypatch.context() as once:
        once.setattr(binding, "state", interrupted)
        with pytest.raises(KeyboardInterrupt):
            binding.kept.look(specs)
    assert binding.kept.look(specs) == "optimizer state 'late' of 1.bias"


def test_keys_that_are_gone_do_not_come_back() -> None:
    """A plan has room for what was there; a parameter that lost one entry was restored without any."""
    binding, given = bound(lambda ps: torch.optim.AdamW(ps))
    step(binding, given)
    specs = StateTable.of(binding).specs
    del binding.state("0.weight")["exp_avg_sq"]
    binding.kept.look(specs)
    kept = values.unpack(binding.kept.gather())
    assert kept["keys"] == {"0.weight": ["step", "exp_avg"]}


def test_functions_among_the_options_stay_as_they_are() -> None:
    """A schedule in a parameter group (as of PSGD) made every snapshot fail: no image can hold a function."""

    def make(params: Any) -> Any:
        return torch.optim.SGD([{"params": list(params), "schedule": lambda n: 1 / n}], lr=0.1)

    binding, _ = bound(make)
    assert "schedule" not in gather_groups(binding)[0][0]
    kept = gathered(binding)
    fresh, other = bound(make)
    fresh.kept.load(kept, list(fresh.owner))
    assert callable(other.param_groups[0]["schedule"])


def test_a_wrapper_needs_dense_snapshots() -> None:
    """Lookahead passed for the optimizer inside it, with the default policy, too: its slow weights
    were in no snapshot.
    """
    binding, _ = bound(lambda ps: Lookahead(torch.optim.AdamW(ps)))
    assert any("Lookahead is around AdamW" in reason for reason in binding.dependent())


def test_a_probe_leaves_inner_optimizers_alone() -> None:
    """A clone shared the inner optimizer with the original, so that a step of the clone updated the
    user's parameters.
    """

    class Outer(torch.optim.SGD):
        def __init__(self, params: Any) -> None:
            super().__init__(params, lr=0.1)
            self.inner = torch.optim.SGD(self.param_groups[0]["params"], lr=0.1)

        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            self.inner.step()

    binding, _ = bound(Outer)
    before = {n: p.detach().clone() for n, p in binding.params.items()}
    for p in binding.params.values():
        p.grad = torch.ones_like(p)
    reasons: Sequence[str] = binding.dependent()
    assert any("keeps another optimizer in `.inner`" in reason for reason in reasons)
    assert all(torch.equal(before[n], p) for n, p in binding.params.items())


def test_lists_of_tensors_are_compared() -> None:
    """The reason was: "Boolean value of Tensor with more than one value is ambiguous"."""

    class Remembers(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            for p in self.param_groups[0]["params"]:
                if p.grad is not None:
                    self.state[p].setdefault("grads", []).append(p.grad.clone())
            return super().step(closure)

    binding, _ = bound(lambda ps: Remembers(ps, lr=0.1))
    assert binding.dependent() == []
    assert not binding.rows_allowed("0.weight")


def test_a_step_that_needs_a_closure_is_said() -> None:
    class Twice(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: Any) -> Any:  # type: ignore[override]
            torch.enable_grad()(closure)()
            return super().step()

    binding, _ = bound(lambda ps: Twice(ps, lr=0.1))
    assert any("step() needs a closure" in reason for reason in binding.dependent())


class KeepsAddresses(torch.optim.SGD):
    """As heavyball does: tables by ``id(p)``, and by ``data_ptr()`` with more in the key."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)
        self.by_id: dict[int, int] = {}
        self.by_address: dict[tuple[int, int], int] = {}

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for n, p in enumerate(self.param_groups[0]["params"]):
            self.by_id[id(p)] = n
            self.by_address[p[-1:].data_ptr(), 7] = n
        return super().step(closure)


def test_tables_by_address_are_of_the_parameters_of_this_process() -> None:
    """A stale address may by chance be that of another parameter in the next life."""
    binding, given = bound(KeepsAddresses)
    step(binding, given)
    fresh, other = bound(KeepsAddresses)
    fresh.kept.load(gathered(binding), list(fresh.owner))
    params = other.param_groups[0]["params"]
    assert other.by_id == {id(p): n for n, p in enumerate(params)}
    assert other.by_address == {(p[-1:].data_ptr(), 7): n for n, p in enumerate(params)}
