"""Examples of each command of `ckptctl`, which end its ``--help``. A test parses every line."""

from __future__ import annotations

from collections.abc import Mapping

EXAMPLES: Mapping[str, tuple[str, ...]] = {
    "ckptctl status": (
        "ckptctl status --watch",
        "ckptctl --json status",
    ),
    "ckptctl top": (
        "ckptctl top",
        "ckptctl top --whole-job",
    ),
    "ckptctl dash": (
        "ckptctl dash",
        "ckptctl dash --address 0.0.0.0 --port 8080 --token-file ./token",
    ),
    "ckptctl snapshots": (
        "ckptctl snapshots --job moe --rank 3",
        "ckptctl snapshots --watch 5",
    ),
    "ckptctl iterations": ("ckptctl iterations --job moe --run run-1",),
    "ckptctl events": (
        "ckptctl events --limit 20",
        "ckptctl events --follow --json",
    ),
    "ckptctl park": ("ckptctl park moe run-1 --timeout 120",),
    "ckptctl doctor": ("ckptctl doctor",),
    "ckptctl admit": ("ckptctl admit moe run-1 node-7 node-8",),
    "ckptctl forget": ("ckptctl forget moe run-1 --yes",),
    "ckptctl unquarantine": ("ckptctl unquarantine moe run-1",),
    "ckptctl support": ("ckptctl support --out report.tar.gz",),
    "ckptctl stop": ("ckptctl stop --wait",),
    "ckptctl logs": (
        "ckptctl logs --lines 50",
        "ckptctl logs -f",
    ),
    "ckptctl wait": ("ckptctl wait --timeout 30",),
    "ckptctl completion": (
        "ckptctl completion bash",
        "ckptctl completion fish",
    ),
    "ckptctl export": (
        "ckptctl export --job moe --format hf --config ./config --to ./model",
        "ckptctl export --job moe --run run-1 --durable --iteration 1200 --to model.safetensors",
    ),
    "ckptctl import": (
        "ckptctl import --from ./model moe start",
        "ckptctl import --from ./dcp --format dcp --to ./converted",
    ),
    "ckptctl peers": ("ckptctl peers --watch",),
    "ckptctl whatif": (
        "ckptctl whatif --lose node=host-3",
        "ckptctl whatif --job moe --lose rack=A,rack=B",
    ),
    "ckptctl drill": ("ckptctl drill --job moe --rank 3",),
    "ckptctl audit": (
        "ckptctl audit -- python train.py",
        "ckptctl audit --every 10m --job moe -- torchrun --nproc-per-node 2 train.py",
    ),
    "ckptctl elastic plan": (
        "ckptctl elastic plan",
        "ckptctl elastic plan situation.json --layer 0 --layer 1",
    ),
    "ckptctl elastic show": ("ckptctl elastic show --job moe --json",),
    "ckptctl elastic whatif": ("ckptctl elastic whatif --lose node=host-3",),
    "ckptctl keys new": ("ckptctl keys new",),
    "ckptctl keys trust": (
        "ckptctl keys trust node-b ./node.key",
        "ckptctl keys trust node-b ./node.key --keep-previous-hours 1",
    ),
    "ckptctl keys untrust": ("ckptctl keys untrust node-b",),
    "ckptctl keys rotate": ("ckptctl keys rotate",),
    "ckptctl keys new-signer": ("ckptctl keys new-signer --keys-dir /etc/ckptd/keys",),
    "ckptctl keys trust-signer": (f"ckptctl keys trust-signer node-b {'5f' * 32}",),
    "ckptctl keys list": ("ckptctl keys list",),
    "ckptctl advise": (
        "ckptctl advise --model llama3-8b --gpus 128 --mtbf 6h --storage 1GB --lost-nodes 2:7d",
        "ckptctl advise moe run-1 --mtbf 6h --watch 30s",
    ),
    "ckptctl checkpoints list": (
        "ckptctl checkpoints list",
        "ckptctl checkpoints list moe run-1 --store s3://bucket/prefix",
    ),
    "ckptctl checkpoints show": ("ckptctl checkpoints show moe run-1 1200",),
    "ckptctl checkpoints verify": (
        "ckptctl checkpoints verify moe run-1",
        "ckptctl checkpoints verify moe run-1 1200 --fast",
    ),
    "ckptctl checkpoints pin": ("ckptctl checkpoints pin moe run-1 1200",),
    "ckptctl checkpoints unpin": ("ckptctl checkpoints unpin moe run-1 1200",),
    "ckptctl checkpoints rm": ("ckptctl checkpoints rm moe run-1 1200",),
    "ckptctl checkpoints gc": (
        "ckptctl checkpoints gc --dry-run",
        "ckptctl checkpoints gc moe run-1 --keep-last 2 --keep-for 7d",
    ),
    "ckptctl verify": ("ckptctl verify s3://bucket/prefix --fast",),
}
