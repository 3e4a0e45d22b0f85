"""A training with transformers' ``Trainer`` that kills itself; nothing but one callback is ckptd's."""

from __future__ import annotations

import copy
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset
from transformers import (
    MixtralConfig,
    MixtralForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from ckptd.client import RunOptions, SnapshotOptions
from ckptd.client.data.position import DataPosition
from ckptd.client.frameworks.huggingface import CkptdCallback
from ckptd.client.rng_state import capture_rng
from tests.e2e.lives import join
from tests.e2e.patience import let_memory_come, let_them_come
from tests.e2e.program import life_parser, optimizer_state

SAMPLES, LENGTH, VOCABULARY = 22, 12, 64


def sample(index: int) -> dict[str, Tensor]:
    torch_generator = torch.Generator().manual_seed(index)
    return {"input_ids": torch.randint(VOCABULARY, (LENGTH,), generator=torch_generator)}


class Texts(Dataset[dict[str, Tensor]]):
    def __init__(self, length: int = SAMPLES) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return sample(index)


class NoisyTexts(Texts):
    """Samples are augmented, in workers, with the random generator that each of them has."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = sample(index)["input_ids"]
        return {"input_ids": torch.where(torch.rand(LENGTH) < 0.2, 1, tokens)}


class Stream(IterableDataset[dict[str, Tensor]]):
    """No length, and an order of its own."""

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for index in range(SAMPLES):
            yield sample(index * 7 % SAMPLES)


def masked(samples: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """A collator that draws from the global generator, as those for masked language models do."""
    tokens = torch.stack([s["input_ids"] for s in samples])
    labels = tokens.masked_fill(torch.rand(tokens.shape) < 0.3, -100)
    return {"input_ids": tokens, "labels": labels}


class Killer(TrainerCallback):  # type: ignore[misc]
    """Kills this process when the optimizer has done its step: what the step's snapshot holds was
    copied by then.
    """

    def __init__(self, step: int, protection: CkptdCallback | None) -> None:
        self.step, self.protection = step, protection

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        ckpt = self.protection.checkpointer if self.protection is not None else None
        if state.global_step < self.step and ckpt is not None:
            let_memory_come(ckpt)
            let_them_come(ckpt)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


class Average(TrainerCallback):  # type: ignore[misc]
    """An average of the weights, in a module that no one else knows; ``.data`` changes no version of a tensor."""

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.average = copy.deepcopy(model)

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        for mean, param in zip(self.average.parameters(), model.parameters(), strict=True):
            mean.data.mul_(0.9).add_(param.data, alpha=0.1)


class WithState(Trainer):  # type: ignore[misc]
    """Keeps state of its own, as subclasses do: a count, and what it draws for several steps at once."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.calls = 0
        self.drawn: list[Tensor] = []

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if self.calls % 5 == 0:
            self.drawn = list(torch.rand(5).split(1))
        self.calls += 1
        return super().training_step(*args, **kwargs)

    def compute_loss(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(model, *args, **kwargs)
        if not model.training:
            return loss
        return loss * (1 + self.drawn[self.calls % 5].sum() / (10 + self.calls))


class KilledInSave(WithState):
    """Is killed while it writes the checkpoint of step ``--kill-in-save``: model and optimizer are
    there, the rest is not.
    """

    step = -1

    def _save_rng_state(self, output_dir: str) -> None:
        if self.state.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)
        super()._save_rng_state(output_dir)


class ForgetsRandomState(DataPosition):
    """Fetches the batches of the position again, but not from the random state from which they were made."""

    def fast_forward(self, fetch: Callable[[], object], skipped: int) -> None:
        for _ in range(self.consumed - skipped):
            fetch()


DATA = {"texts": Texts, "noisy": NoisyTexts, "stream": Stream}


def model() -> MixtralForCausalLM:
    config = MixtralConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=LENGTH,
        attention_dropout=0.1,
        output_router_logits=True,
    )
    return MixtralForCausalLM(config)


def final_state(trainer: Trainer) -> dict[str, Any]:
    found: dict[str, Any] = {n: p.detach().clone() for n, p in trainer.model.named_parameters()}
    found |= optimizer_state(trainer.optimizer.optimizer)
    found["scheduler"] = trainer.lr_scheduler.state_dict()
    found["rng"] = capture_rng()
    found["step"] = trainer.state.global_step, trainer.state.epoch, trainer.state.total_flos
    # What a log holds beside times.
    timed = ("runtime", "per_second")
    found["log"] = [
        {k: v for k, v in entry.items() if not k.endswith(timed)} for entry in trainer.state.log_history
    ]
    return found


def main(argv: Sequence[str]) -> None:
    parser = life_parser()
    parser.add_argument("--save", action="store_true", help="a checkpoint of the Trainer's own")
    parser.add_argument("--kill-in-save", type=int, default=-1)
    parser.add_argument("--resume-from", default="", help="last, or the path of a checkpoint")
    parser.add_argument("--data", default="texts", choices=DATA)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--refetch", action="store_true")
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--forget", action="store_true", help="restore without the random state of fetches")
    args = parser.parse_args(argv)
    if args.port:
        join(args.rank, args.port)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    if args.forget:
        import ckptd.client.frameworks.huggingface as loop

        vars(loop)["DataPosition"] = ForgetsRandomState
    protection = None
    if args.daemon:
        # One line more: it is all that a user adds.
        protection = CkptdCallback(
            refetch=args.refetch,
            run=RunOptions(job="e2e", name=args.run),
            daemon=args.daemon,
            snapshots=SnapshotOptions(window=4),
        )
    average = Average()
    callbacks: list[Any] = [Killer(args.kill_at, protection), average]
    if protection is not None:
        callbacks.append(protection)
    length = {"max_steps": 18} if args.data == "stream" else {"num_train_epochs": 3}
    arguments = TrainingArguments(
        output_dir=str(args.out.parent / "hf"),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=3e-3,
        warmup_steps=5,
        lr_scheduler_type="cosine",
        max_grad_norm=0.1,
        bf16=args.bf16,
        use_cpu=True,
        ddp_backend="gloo" if args.port else None,
        seed=args.seed,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=4,
        save_strategy="steps" if args.save else "no",
        save_steps=5,
        report_to="none",
        disable_tqdm=True,
        dataloader_num_workers=args.workers,
        dataloader_pin_memory=False,
        **length,
    )
    KilledInSave.step = args.kill_in_save
    trainer = KilledInSave(
        model=model(),
        args=arguments,
        data_collator=masked,
        train_dataset=DATA[args.data](),
        eval_dataset=Texts(4),
        callbacks=callbacks,
    )
    resume_from = True if args.resume_from == "last" else args.resume_from or None
    trainer.train(resume_from_checkpoint=resume_from)
    kept = {f"average/{n}": p.detach().clone() for n, p in average.average.named_parameters()}
    torch.save({**final_state(trainer), **kept, "calls": trainer.calls}, args.out)
