"""Freezing: active gradients to the bit as if nothing were frozen, recorded values where they
cannot be recomputed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_  # bound early, as user code does
from torch.utils.checkpoint import checkpoint

from ckptd.client.model.freezing import (
    BackwardLimiter,
    Tape,
    choose_freezing,
    clip_norm_tap,
    scaler_tap,
)


class TestTape:
    def test_records_while_training(self) -> None:
        tape = Tape()
        value = torch.tensor(2.0, requires_grad=True)
        assert tape.record("norm", value) is value
        assert tape.record("user", 3) == 3
        kinds = tape.take()
        assert [k for k, _ in kinds] == ["norm", "user"]
        assert not kinds[0][1].requires_grad
        assert tape.take() == []

    def test_what_is_recorded_is_a_copy(self) -> None:
        tape, value = Tape(), torch.tensor(2.0)
        tape.record("norm", value)
        value.fill_(9)
        assert tape.take()[0][1] == 2

    def test_answers_while_replaying_in_order_per_kind(self) -> None:
        tape = Tape()
        tape.play([("a", 1), ("b", 10), ("a", 2)])
        assert [tape.record(k, 0) for k in ("a", "a", "b")] == [1, 2, 10]

    def test_a_value_asked_for_once_more_than_recorded_is_the_live_one(self) -> None:
        tape = Tape()
        tape.play([("a", 1)])
        assert [tape.record("a", 5), tape.record("a", 6)] == [1, 6]

    def test_replaying_records_nothing_and_ends(self) -> None:
        tape = Tape()
        tape.play([("a", 1)])
        tape.record("a", 5)
        assert tape.take() == []
        tape.play(None)
        assert tape.record("a", 7) == 7
        assert tape.take() == [("a", 7)]


class TestClipNormTap:
    def params(self) -> list[nn.Parameter]:
        params = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))]
        params[0].grad, params[1].grad = torch.full((3,), 3.0), torch.full((2,), 4.0)
        return params

    def test_the_norm_is_recorded_through_an_early_import(self) -> None:
        tape = Tape()
        with clip_norm_tap(tape):
            norm = clip_grad_norm_(self.params(), 1.0)
        ((kind, recorded),) = tape.take()
        assert kind == "total_norm"
        assert torch.equal(recorded, norm)

    def test_the_recorded_norm_scales_the_gradients_that_are_left(self) -> None:
        """With one tensor frozen the recomputed norm is another: every bit of the active gradient
        would differ.
        """
        tape, reference = Tape(), self.params()
        with clip_norm_tap(tape):
            expected = clip_grad_norm_(reference, 1.0)
            tape.play(tape.take())
            replayed = self.params()
            replayed[1].grad = None
            assert torch.equal(clip_grad_norm_(replayed, 1.0), expected)
        assert replayed[0].grad is not None
        assert reference[0].grad is not None
        assert torch.equal(replayed[0].grad, reference[0].grad)

    def test_it_is_undone(self) -> None:
        original = torch.nn.utils.clip_grad._get_total_norm
        tape = Tape()
        with pytest.raises(RuntimeError, match="in the loop"), clip_norm_tap(tape):
            raise RuntimeError("in the loop")
        assert torch.nn.utils.clip_grad._get_total_norm is original
        clip_grad_norm_(self.params(), 1.0)
        assert tape.take() == []

    def test_of_two_checkpointers_the_first_may_end_first(self) -> None:
        """It put torch's own function back: the second recorded nothing more, and when it ended,
        the dead tap stayed for good.
        """
        original = torch.nn.utils.clip_grad._get_total_norm
        tapes, users = (Tape(), Tape()), (ExitStack(), ExitStack())
        for tape, user in zip(tapes, users, strict=True):
            user.enter_context(clip_norm_tap(tape))
        users[0].close()
        clip_grad_norm_(self.params(), 1.0)
        assert [len(tape.take()) for tape in tapes] == [0, 1]
        users[1].close()
        assert torch.nn.utils.clip_grad._get_total_norm is original


class TestScalerTap:
    def step(self, scaler: Any, loss_scale: float) -> Tensor:
        param = nn.Parameter(torch.ones(2))
        optimizer = torch.optim.SGD([param], lr=0.5)
        scaler.scale((param * loss_scale).sum()).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        return param.detach()

    def test_found_inf_is_recorded_and_played_back(self) -> None:
        """In replay the tensor that overflowed may be frozen: its gradient is not there to be looked at."""
        tape = Tape()
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        with scaler_tap(scaler, tape):
            skipped = self.step(scaler, float("inf"))
            recorded = tape.take()
            assert [(k, v.item()) for k, v in recorded] == [("found_inf/cpu", 1.0)]
            assert scaler.get_scale() == 2.0
            tape.play(recorded)
            scaler.load_state_dict({**scaler.state_dict(), "scale": 4.0})
            replayed = self.step(scaler, 1.0)
            assert scaler.get_scale() == 2.0
        assert torch.equal(skipped, torch.ones(2))
        assert torch.equal(replayed, torch.ones(2))

    def test_it_is_undone(self) -> None:
        tape, scaler = Tape(), torch.amp.GradScaler("cpu", init_scale=4.0)
        with scaler_tap(scaler, tape):
            pass
        assert "_unscale_grads_" not in vars(scaler)
        self.step(scaler, 1.0)
        assert tape.take() == []

    def test_a_scaler_of_two_checkpointers_outlives_the_first(self) -> None:
        """Two models may share one scaler. The first to end took the other's tap along, which then
        failed to end itself.
        """
        tapes, users = (Tape(), Tape()), (ExitStack(), ExitStack())
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for tape, user in zip(tapes, users, strict=True):
            user.enter_context(scaler_tap(scaler, tape))
        users[0].close()
        self.step(scaler, 1.0)
        assert [len(tape.take()) for tape in tapes] == [0, 1]
        users[1].close()
        assert "_unscale_grads_" not in vars(scaler)

    def test_a_skipped_step_never_reaches_the_optimizers_hooks(self) -> None:
        """The trap behind the rule that iterations are never counted in hooks."""
        param = nn.Parameter(torch.ones(2))
        optimizer = torch.optim.SGD([param], lr=0.5)
        calls: list[int] = []
        optimizer.register_step_pre_hook(lambda *_: calls.append(1))
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        scaler.scale((param * float("inf")).sum()).backward()
        scaler.step(optimizer)
        assert calls == []


class Net(nn.Module):
    def __init__(self, mode: str = "") -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 8)
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)
        self.idle = nn.Linear(8, 8)
        self.mode = mode

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        x = checkpoint(self.block, x, use_reentrant=self.mode == "reentrant") if self.mode else self.block(x)
        loss: Tensor = self.second(x).square().mean()
        return loss

    def block(self, x: Tensor) -> Tensor:
        return torch.relu(self.first(x))


TOKENS = torch.tensor([[0, 1, 2], [3, 4, 5]])


def backward(model: nn.Module, times: int = 1) -> dict[str, Tensor | None]:
    for _ in range(times):
        model(TOKENS).backward()
    grads = {n: p.grad for n, p in model.named_parameters()}
    model.zero_grad()
    return grads


@pytest.fixture
def net() -> Net:
    torch.manual_seed(0)
    return Net()


def limited(model: nn.Module, frozen: set[str]) -> BackwardLimiter:
    params = dict(model.named_parameters())
    return BackwardLimiter(
        lambda: (
            [p for n, p in params.items() if n not in frozen],
            [p for n, p in params.items() if n in frozen],
        )
    )


@pytest.fixture
def clean() -> Iterator[None]:
    """Patches must not leak into other tests when one of these fails."""
    from torch.utils.checkpoint import CheckpointFunction

    saved = torch.autograd.backward, CheckpointFunction.forward
    yield
    torch.autograd.backward = saved[0]
    CheckpointFunction.forward = staticmethod(saved[1])  # type: ignore[method-assign]


@pytest.mark.usefixtures("clean")
class TestBackwardLimiter:
    @pytest.mark.parametrize(
        "frozen",
        [
            {"embed.weight"},
            {"second.weight", "second.bias"},
            {"first.weight"},
            {"embed.weight", "first.weight", "first.bias", "second.weight"},
        ],
        ids=["first", "last", "middle", "most"],
    )
    @pytest.mark.parametrize("times", [1, 3], ids=["once", "accumulated"])
    def test_active_gradients_are_those_of_a_full_backward(
        self, net: Net, frozen: set[str], times: int
    ) -> None:
        full = backward(net, times)
        limiter = limited(net, frozen)
        limiter.start()
        partial = backward(net, times)
        limiter.stop()
        for name, grad in full.items():
            found = partial[name]
            if name in frozen:
                assert found is not None, f"{name}: user code may read every gradient"
                assert not found.any()
            elif grad is None:
                assert found is None
            else:
                assert found is not None
                assert torch.equal(found, grad), name

    def test_what_had_no_part_in_the_loss_has_no_gradient(self, net: Net) -> None:
        limiter = limited(net, {"embed.weight"})
        limiter.start()
        grads = backward(net)
        limiter.stop()
        assert grads["idle.weight"] is None

    def test_frozen_weight_gradients_are_not_computed(self, net: Net) -> None:
        """The point of it: a hook on the accumulated gradient of a frozen weight never fires."""
        seen: list[str] = []
        for name, param in net.named_parameters():
            param.register_post_accumulate_grad_hook(lambda _, name=name: seen.append(name))
        limiter = limited(net, {"first.weight", "first.bias"})
        limiter.start()
        backward(net)
        limiter.stop()
        assert set(seen) == {"embed.weight", "second.weight", "second.bias"}

    def test_a_loss_without_any_active_part_still_runs(self, net: Net) -> None:
        """With ``requires_grad`` switched off instead, ``backward`` would raise here."""
        limiter = limited(net, {n for n, _ in net.named_parameters()})
        limiter.start()
        grads = backward(net)
        limiter.stop()
        assert grads["first.weight"] is not None

    def test_the_users_own_inputs_are_respected(self, net: Net) -> None:
        limiter = limited(net, {"first.weight"})
        limiter.start()
        torch.autograd.backward(net(TOKENS), inputs=[net.first.weight])
        limiter.stop()
        assert net.first.weight.grad is not None
        assert net.first.weight.grad.any()
        assert net.second.weight.grad is None

    def test_leaves_that_are_no_parameters_get_their_gradients(self, net: Net) -> None:
        """A pipeline stage sends its input's gradient upstream. It was None, and the stage before
        waited for ever.
        """
        arrived = torch.randn(2, 8)
        grads = []
        for frozen in (set(), {"first.weight", "first.bias"}):
            x = arrived.clone().requires_grad_()
            limiter = limited(net, frozen)
            limiter.start()
            net.block(x).sum().backward()
            limiter.stop()
            grads.append(x.grad)
        full, partial = grads
        assert full is not None
        assert partial is not None
        assert torch.equal(full, partial)

    def test_gradients_by_autograd_grad_are_untouched(self, net: Net) -> None:
        limiter = limited(net, {"first.weight"})
        limiter.start()
        (grad,) = torch.autograd.grad(net(TOKENS), [net.first.weight])
        limiter.stop()
        assert grad.any()

    def test_non_reentrant_checkpointing(self) -> None:
        torch.manual_seed(0)
        net = Net("nonreentrant")
        full = backward(net)
        limiter = limited(net, {"second.weight"})
        limiter.start()
        partial = backward(net)
        limiter.stop()
        assert not limiter.saw_reentrant
        assert full["first.weight"] is not None
        assert partial["first.weight"] is not None
        assert torch.equal(partial["first.weight"], full["first.weight"])

    def test_reentrant_checkpointing_falls_back_to_a_full_backward(self) -> None:
        """Its backward refuses ``inputs=``; the first forward that uses it is noticed before."""
        torch.manual_seed(0)
        net = Net("reentrant")
        full = backward(net)
        limiter = limited(net, {"second.weight"})
        limiter.start()
        partial = backward(net)
        limiter.stop()
        assert limiter.saw_reentrant
        for name in ("embed.weight", "first.weight", "second.weight"):
            a, b = full[name], partial[name]
            assert a is not None
            assert b is not None
            assert torch.equal(a, b)

    def test_stop_undoes_both_patches_and_may_come_twice(self, net: Net) -> None:
        from torch.utils.checkpoint import CheckpointFunction

        before = torch.autograd.backward, CheckpointFunction.forward
        limiter = limited(net, set())
        limiter.start()
        assert torch.autograd.backward is not before[0]
        limiter.stop()
        limiter.stop()
        assert (torch.autograd.backward, CheckpointFunction.forward) == before
        assert Net("reentrant")(TOKENS).requires_grad

    def test_of_two_limiters_the_first_may_stop_first(self, net: Net) -> None:
        """Two runs replay at once. The second computed every gradient from then on, and its stop
        left the first's patch.
        """
        from torch.utils.checkpoint import CheckpointFunction

        before = torch.autograd.backward, CheckpointFunction.forward
        one, two = limited(Net(), {"first.weight"}), limited(net, {"first.weight"})
        one.start()
        two.start()
        one.stop()
        grads = backward(net)
        assert grads["first.weight"] is not None
        assert not grads["first.weight"].any()
        Net("reentrant")(TOKENS)
        assert (one.saw_reentrant, two.saw_reentrant) == (False, True)
        two.stop()
        assert (torch.autograd.backward, CheckpointFunction.forward) == before


class DistributedDataParallel(nn.Module):
    """By name only: what the choice looks at."""


class FSDPModule:
    pass


class Sharded(FSDPModule, nn.Linear):
    def __init__(self) -> None:
        nn.Linear.__init__(self, 2, 2)


class TestChoice:
    def test_plain_models_skip_weight_gradients(self) -> None:
        assert choose_freezing(nn.Linear(2, 2), masters=False)[0] == "inputs"

    def test_with_several_ranks_no_gradient_is_skipped_unless_asked_for(self) -> None:
        """The inner module of a DDP model was passed: ranks disagreed in a collective and crashed
        at each restart.
        """
        model = nn.Linear(2, 2)
        assert choose_freezing(model, masters=False, world_size=2)[0] == "drop"
        assert choose_freezing(model, masters=False, wanted="inputs", world_size=2)[0] == "inputs"

    def test_state_spread_over_ranks_needs_every_gradient(self) -> None:
        """Other ranks freeze other operators: what is skipped here, another rank's update would miss."""
        model = nn.Linear(2, 2)
        assert choose_freezing(model, masters=False, spread=True)[0] == "drop"
        with pytest.raises(ValueError, match="each rank updates other parameters"):
            choose_freezing(model, masters=False, wanted="inputs", spread=True)

    @pytest.mark.parametrize(
        ("model", "masters", "reason"),
        [
            (nn.Sequential(DistributedDataParallel()), False, "expects every gradient"),
            (nn.Sequential(Sharded()), False, "FSDP shards"),
            (nn.Linear(2, 2), True, "master weights"),
        ],
        ids=["ddp", "fsdp", "masters"],
    )
    def test_obstacles(self, model: nn.Module, masters: bool, reason: str) -> None:
        mechanism, said = choose_freezing(model, masters=masters)
        assert mechanism == "drop"
        assert reason in said
        with pytest.raises(ValueError, match=f"'inputs' would not be exact here.*{reason}"):
            choose_freezing(model, masters=masters, wanted="inputs")

    def test_asked_for(self) -> None:
        assert choose_freezing(nn.Linear(2, 2), masters=False, wanted="drop") == (
            "drop",
            "asked for",
        )

    def test_unknown(self) -> None:
        with pytest.raises(ValueError, match="freeze='rg': choose 'auto', 'drop' or 'inputs'"):
            choose_freezing(nn.Linear(2, 2), masters=False, wanted="rg")
