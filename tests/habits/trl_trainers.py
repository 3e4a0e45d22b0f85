"""Trainings with TRL's trainers, with LoRA by PEFT where asked for, that kill themselves; nothing but one
callback is ckptd's.
"""

from __future__ import annotations

import argparse
import importlib
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from ckptd.client import RunOptions
from ckptd.client.frameworks.huggingface import CkptdCallback
from ckptd.client.rng_state import capture_rng
from tests.e2e.trainer_job import Killer

WORDS, STEPS = 60, 12
# Named by what the trainer keeps beside the model.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "SFT": ("SFT", {}),
    "SFT packing": ("SFT", {"packing": True, "gradient_accumulation_steps": 2}),
    "DPO": ("DPO", {}),
    "KTO": ("KTO", {}),
    "RLOO several iterations": ("RLOO", {"num_iterations": 2}),
    "GRPO": ("GRPO", {}),
    "GRPO sequences of several steps": ("GRPO", {"steps_per_generation": 3}),
    "GRPO several iterations": ("GRPO", {"num_iterations": 2, "beta": 0.1}),
    "GRPO synchronised reference": (
        "GRPO",
        {"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 3, "ref_model_mixup_alpha": 0.5},
    ),
}


def tokenizer() -> Any:
    tokenizers = importlib.import_module("tokenizers")
    words = ["<pad>", "<eos>", "<unk>", *(f"w{n}" for n in range(WORDS))]
    made = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="<unk>")
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def model(folder: Path) -> Any:
    """From a folder, as the trainers want it: they load its reference model from there."""
    if not (folder / "config.json").exists():
        torch.manual_seed(0)
        config = Qwen2Config(
            vocab_size=WORDS + 3,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
            pad_token_id=0,
            eos_token_id=1,
        )
        Qwen2ForCausalLM(config).save_pretrained(folder)
        tokenizer().save_pretrained(folder)
    return Qwen2ForCausalLM.from_pretrained(folder, dtype=torch.float32)


def rows(method: str) -> Any:
    drawn = random.Random(1)

    def text(length: int) -> str:
        return " ".join(f"w{drawn.randrange(WORDS)}" for _ in range(length))

    def row(number: int) -> dict[str, Any]:
        if method == "SFT":
            return {"text": text(8 + number % 9)}
        if method == "DPO":
            return {"prompt": text(5), "chosen": f" {text(6)}", "rejected": f" {text(4)}"}
        if method == "KTO":
            return {"prompt": text(5), "completion": f" {text(6)}", "label": number % 2 == 0}
        return {"prompt": text(5)}

    return importlib.import_module("datasets").Dataset.from_list([row(number) for number in range(20)])


def reward(completions: list[str], **_: Any) -> list[float]:
    return [float(len(set(text.split()))) for text in completions]


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--daemon")
    parser.add_argument("--run")
    parser.add_argument("--kill-at", type=int, default=-1)
    parser.add_argument("--kind", choices=KINDS, required=True)
    parser.add_argument("--lora", action="store_true")
    args = parser.parse_args(argv)
    trl, peft = importlib.import_module("trl"), importlib.import_module("peft")
    torch.set_num_threads(1)
    protection = None
    if args.daemon:
        protection = CkptdCallback(run=RunOptions(job="trl", name=args.run), daemon=args.daemon)
    callbacks = [Killer(args.kill_at, protection), *([] if protection is None else [protection])]
    method, options = KINDS[args.kind]
    generates = method in ("GRPO", "RLOO")
    lengths = {"max_completion_length": 8, "num_generations": 2} if generates else {"max_length": 32}
    config = getattr(trl, f"{method}Config")(
        output_dir=str(args.out.parent / "trl"),
        per_device_train_batch_size=2,
        max_steps=STEPS,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        learning_rate=1e-2,
        **lengths,
        **options,
    )
    trainer = getattr(trl, f"{method}Trainer")(
        model=model(args.out.parent / "model"),
        args=config,
        train_dataset=rows(method),
        processing_class=tokenizer(),
        callbacks=callbacks,
        **({"reward_funcs": reward} if generates else {}),
        **(
            {"peft_config": peft.LoraConfig(r=4, lora_dropout=0.1, target_modules=["q_proj", "v_proj"])}
            if args.lora
            else {}
        ),
    )
    trainer.train()
    found: dict[str, Any] = {n: p.detach().clone() for n, p in trainer.model.named_parameters()}
    optimizer = trainer.optimizer.optimizer
    for at, param in enumerate(p for group in optimizer.param_groups for p in group["params"]):
        found.update({f"optim/{at}.{key}": value for key, value in optimizer.state[param].items()})
    found["rng"] = capture_rng()
    found["log"] = [
        {key: v for key, v in entry.items() if "time" not in key and "per_second" not in key}
        for entry in trainer.state.log_history
    ]
    torch.save(found, args.out)
