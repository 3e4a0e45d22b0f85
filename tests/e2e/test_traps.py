"""Traps found by experiment, each with the test that keeps it sprung.

Those with a name in ``code`` font alone are jobs of ``cases.py`` (killed and resumed as processes
by ``test_cases.py``) or of ``hf_cases.py`` (``test_hf.py``); the others are here or in the file
named.

Freezing

* switching ``requires_grad`` changes kernels (``linear`` of a non-contiguous input): here; we never switch it
* reentrant checkpointing with a frozen embedding loses gradients silently: ``reentrant``,
  client/test_freeze.py
* everything frozen: ``backward`` must not raise: client/test_freeze.py
* ``inputs=`` under DDP fails, under FSDP is silently wrong: client/test_freeze.py (the choice),
  test_distributed.py
* rows of a fused tensor are stepped and overwritten, ``step`` included: ``fused``,
  ``adamw_fused_slices``, ``sgd_slices``
* fused SGD with momentum fails when only some momentum buffers exist: here

Optimizers, precision, clipping

* slices under an optimizer that looks at the whole tensor: ``adafactor_fused``, client/test_probe.py
* a fresh process has no gradient where the original had zeros: ``accumulate``; experts without
  tokens: ``plain``
* state that does not exist yet when a window begins (``t0 = 0``), or never will: here
* masters apart from the model, copied back by user code: ``masters``, ``masters_given``
* autocast: bf16 suffices for some weights only: ``autocast``, ``hf_mixtral_autocast``,
  client/test_precision.py; tied: here
* a skipped step of a GradScaler reaches no optimizer hook: ``scaler``, client/test_freeze.py
* a clipping norm recomputed without the frozen gradients: ``plain``, client/test_freeze.py;
  computed by user code: here
* weights averaged by user code after the step: here
* auxiliary losses: ``hf_mixtral``; a routing bias updated after the step: ``plain``, ``hf_deepseek_v3``
* 0-dimensional state is in every snapshot: client/test_layout.py
* optimizers with one scalar for all parameters: client/test_probe.py
* another number of threads changes bits: client/test_checkpointer.py
* a compiled model: here

Random numbers, data, schedulers

* ``iter(loader)`` draws from the global generators: here, ``loader_early``, ``loader_late``
* the loader's state must be loaded before its iterator is made: ``loader_late``
* schedulers, scalers and copy-backs run after the optimizer: ``plain``, ``scaler``, ``masters``

Models

* experts fused and transposed, with biases: ``hf_gpt_oss``; odd parameters beside them:
  client/test_operators.py
* recomputation fires hooks twice: here, client/test_popularity.py

Copies

* a copying thread is a loss without a spare core, so copies can be inline: here
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import get_total_norm
from torch.utils.data import DataLoader

from ckptd.client import Certificate, Checkpointer
from ckptd.client.rng_state import capture_rng
from tests.e2e.cases import FusedMoE, Job, ListExperts, Model, accumulate_body, loss_of, make
from tests.e2e.harness import DaemonProcess
from tests.e2e.patience import let_memory_come
from tests.option_groups import grouped

Certify = Callable[..., Certificate]


@pytest.fixture
def certify(daemon: DaemonProcess) -> Certify:
    """Train a job for a while, then replay its newest window in process and compare."""

    def run(job: Job, *, total: int = 11, **options: Any) -> Certificate:
        options = {
            "window": 4,
            "job": "traps",
            "run": uuid.uuid4().hex[:8],
            **job.options,
            **options,
        }
        options["daemon"] = daemon.endpoint
        with Checkpointer(job.model, job.optimizers, job.state, **grouped(**options)) as ckpt:
            job.ckpt = ckpt
            for step in ckpt.steps(total):
                let_memory_come(ckpt)
                job.step(step, lambda point: None)
            return ckpt.verify(lambda step: job.step(step, lambda point: None))

    return run


# -- freezing ------------------------------------------------------------------------------------


def test_switching_requires_grad_changes_bits_and_limiting_the_backward_does_not() -> None:
    """``linear`` folds a non-contiguous input or not depending on whether its weight wants a
    gradient; the input's gradient then comes from another kernel. So replay leaves
    ``requires_grad`` alone.
    """

    def input_gradient(x: Tensor, weight: Tensor, *, wants: bool, limited: bool) -> Tensor:
        x = x.detach().requires_grad_()
        loss = F.linear(x, weight.requires_grad_(wants)).square().sum()
        torch.autograd.backward(loss, inputs=[x] if limited else None)
        assert x.grad is not None
        return x.grad

    torch.manual_seed(0)
    trapped = False
    for out, width, rows, length in ((7, 257, 2, 9), (3, 64, 2, 3), (48, 5, 2, 9), (7, 5, 17, 3)):
        weight, x = torch.randn(out, width), torch.randn(rows, length, width).transpose(0, 1)
        full = input_gradient(x, weight, wants=True, limited=False)
        assert torch.equal(input_gradient(x, weight, wants=True, limited=True), full)
        trapped |= not torch.equal(input_gradient(x, weight, wants=False, limited=False), full)
    if not trapped:
        pytest.skip("this build's linear() gives the same bits with requires_grad switched off")


def test_requires_grad_is_never_switched_in_replay(certify: Certify) -> None:
    job = make()(1)
    seen: set[bool] = set()

    def body(job: Job, step: int, at: Callable[[str], None]) -> None:
        seen.update(p.requires_grad for p in job.model.parameters())
        accumulate_body(job, step, at)

    job.body = body
    assert certify(job).identical
    assert seen == {True}


@pytest.mark.parametrize("fused_experts", [False, True], ids=["list", "slices"])
def test_fused_sgd_with_momentum(certify: Certify, fused_experts: bool) -> None:
    """Its kernel wants a momentum buffer for every tensor or for none: frozen ones must not be
    stepped without.
    """
    job = make(lambda ps: torch.optim.SGD(ps, lr=0.05, momentum=0.9, fused=True), fused=fused_experts)(1)
    certificate = certify(job)
    assert certificate.identical, str(certificate)


@pytest.fixture
def two_threads() -> Iterator[None]:
    """Everybody else has one."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_several_threads(certify: Certify, two_threads: None) -> None:
    certificate = certify(make()(1))
    assert certificate.identical, str(certificate)


# -- optimizers, precision, clipping -------------------------------------------------------------


def test_a_window_that_begins_before_an_experts_first_update(certify: Certify) -> None:
    """An expert without tokens so far has no optimizer state: absent is recorded as absent, not as zeros."""
    job = make(noise=0.0)(1)
    moe = job.model.blocks[0].moe  # type: ignore[union-attr,index]
    assert isinstance(moe, ListExperts)
    moe.bias[3] = -1e9

    def body(job: Job, step: int, at: Callable[[str], None]) -> None:
        if step == 9:
            moe.bias[3] = 1e9
        loss_of(job.model, next(job.state["data"])).backward()
        job.optimizers[0].step()
        job.optimizers[0].zero_grad()

    job.body = body
    certificate = certify(job)
    assert certificate.identical, str(certificate)
    assert len(job.optimizers[0].state) == len(list(job.model.parameters()))


def test_an_optimizer_without_any_state(certify: Certify) -> None:
    """Plain SGD keeps none, ever: snapshots once waited for it to appear, and a whole run went unprotected."""
    certificate = certify(make(lambda ps: torch.optim.SGD(ps, lr=0.05))(1))
    assert certificate.identical, str(certificate)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_tied_weights_under_autocast(certify: Certify, tied: bool) -> None:
    """The head would be content with bf16, the embedding is not: a tied weight is recorded in full."""

    def body(job: Job, step: int, at: Callable[[str], None]) -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss_of(job.model, next(job.state["data"]))
        loss.backward()
        job.optimizers[0].step()
        job.optimizers[0].zero_grad()

    certificate = certify(make(body=body, sched=False, tied=tied)(1))
    assert certificate.identical, str(certificate)


def own_clipping(*, recorded: bool) -> Callable[[int], Job]:
    """Clips by a norm from ``get_total_norm``, an alias that is bound before us and cannot be tapped."""

    def body(job: Job, step: int, at: Callable[[str], None]) -> None:
        loss_of(job.model, next(job.state["data"])).backward()
        params = list(job.model.parameters())
        norm = get_total_norm([p.grad for p in params if p.grad is not None])
        if recorded:
            norm = job.ckpt.record("own_norm", norm)
        torch.nn.utils.clip_grads_with_norm_(params, 0.1, norm)
        job.optimizers[0].step()
        job.optimizers[0].zero_grad()

    return make(lambda ps: torch.optim.SGD(ps, lr=0.5), body=body, sched=False)


@pytest.mark.parametrize("freeze", ["inputs", "drop"])
def test_a_norm_of_the_users_own_is_exact_when_recorded(certify: Certify, freeze: str) -> None:
    certificate = certify(own_clipping(recorded=True)(1), freeze=freeze)
    assert certificate.identical, str(certificate)


def test_a_norm_of_the_users_own_is_exact_unrecorded_where_gradients_are_only_dropped(
    certify: Certify,
) -> None:
    """Under ``drop`` every gradient exists until the optimizer's step."""
    certificate = certify(own_clipping(recorded=False)(1), freeze="drop")
    assert certificate.identical, str(certificate)


def test_a_norm_of_the_users_own_that_is_not_recorded_is_noticed(certify: Certify) -> None:
    """Without its record it is computed from what is not frozen: self-verification must say so, not train on."""
    certificate = certify(own_clipping(recorded=False)(1), freeze="inputs")
    assert not certificate.identical


@pytest.mark.filterwarnings("ignore")  # dynamo's own
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_models(certify: Certify, backend: str) -> None:
    """A compiled backward computes all gradients at once; asking for some of them must not change those."""
    job = make(sched=False)(1)
    for block in job.model.blocks:  # type: ignore[union-attr]
        block.mix = torch.compile(block.mix, backend=backend)
    certificate = certify(job)
    assert certificate.identical, str(certificate)


# -- random numbers and data ---------------------------------------------------------------------


def test_creating_a_data_iterator_draws_from_the_global_generator() -> None:
    """Why random state is recorded twice: at the top of the loop, and before the first forward."""
    loader: DataLoader[int] = DataLoader([1, 2, 3], shuffle=True)  # type: ignore[arg-type]
    before = capture_rng()
    iter(loader)
    assert capture_rng() != before


def test_an_iterator_made_within_the_first_step_of_a_replay(certify: Certify) -> None:
    """The undisturbed run made its iterator long before; the replay makes one, and must not keep
    what that drew.
    """
    job = make(sched=False)(1)
    data = [torch.full((7,), n) for n in range(40)]
    made: list[int] = []

    def body(job: Job, step: int, at: Callable[[str], None]) -> None:
        if step in (0, 8) and made.count(step) == (0 if step == 0 else 1):
            iter(DataLoader(data, shuffle=True))  # type: ignore[arg-type]
        made.append(step)
        accumulate_body(job, step, at)

    job.body = body
    # Steps 8 and later are replayed: step 8 draws in the replay what it did not draw in the run.
    certificate = certify(job, total=11)
    assert certificate.start == 8
    assert certificate.identical, str(certificate)


# -- models and copies ---------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["nonreentrant", "reentrant"])
def test_recomputation_takes_no_second_record(certify: Certify, mode: str) -> None:
    """Hooks on a checkpointed module fire again inside the backward: random state must not be recorded there."""
    certificate = certify(make(ckpt_mode=mode)(1))
    assert certificate.identical, str(certificate)


def test_a_checkpointed_whole_model(certify: Certify) -> None:
    """The model's own forward is recomputed: its hooks fire twice in every step."""
    from torch.utils.checkpoint import checkpoint

    def body(job: Job, step: int, at: Callable[[str], None]) -> None:
        batch = next(job.state["data"])
        logits = checkpoint(job.model, batch[:, :-1], use_reentrant=False)
        F.cross_entropy(logits.reshape(-1, logits.shape[-1]), batch[:, 1:].reshape(-1)).backward()
        job.optimizers[0].step()
        job.optimizers[0].zero_grad()

    certificate = certify(make(body=body, sched=False)(1))
    assert certificate.identical, str(certificate)


@pytest.mark.parametrize("fused", [False, True], ids=["list", "slices"])
def test_inline_copies(certify: Certify, fused: bool) -> None:
    certificate = certify(make(fused=fused)(1), inline_copy=True)
    assert certificate.identical, str(certificate)


def test_a_model_that_is_only_a_fused_layer(certify: Certify) -> None:
    """No list, no layers, the experts at the top level."""

    class Only(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(31, 16)
            self.moe = FusedMoE()
            self.head = nn.Linear(16, 31)

        def forward(self, tokens: Tensor) -> Tensor:
            logits: Tensor = self.head(self.moe(self.embed(tokens)))
            return logits

    job = make(sched=False)(1)
    job.model = Only()
    job.optimizers = [torch.optim.AdamW(job.model.parameters(), lr=3e-3)]
    certificate = certify(job)
    assert certificate.identical, str(certificate)


def test_weights_averaged_by_user_code(certify: Certify) -> None:
    """A teacher follows the student after each step: what no optimizer holds is captured, and sees
    the weights that the student had in the run, although the student's operators are frozen in the
    replay.
    """
    job = make(sched=False)(1)
    both = nn.ModuleDict({"student": job.model, "teacher": Model().requires_grad_(False)})
    student = job.model

    def body(job: Job, step: int, at: Callable[[str], None]) -> None:
        batch = next(job.state["data"])
        with torch.no_grad():
            target = both["teacher"](batch)
        (both["student"](batch) - target).square().mean().backward()
        job.optimizers[0].step()
        job.optimizers[0].zero_grad()
        with torch.no_grad():
            for mine, theirs in zip(both["teacher"].parameters(), student.parameters(), strict=True):
                mine.lerp_(theirs, 0.1)

    job.model, job.body = both, body
    certificate = certify(job)
    assert certificate.identical, str(certificate)
