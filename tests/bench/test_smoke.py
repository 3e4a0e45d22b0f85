"""Every benchmark runs to its end at a tiny size and keeps the output contract. No number is judged."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.common import build_stack, interleave, state_bytes, table
from tests.long import long

ROOT = Path(__file__).resolve().parents[2]

# Benchmark, its options here, and the metrics that readers of its output rely on.
SUBJECTS = [
    ("schedule", ["--rounds", "1"], {"plan_s_100000"}),
    ("window", [], {"window_lost_share", "window_decided_after", "window_vs_best"}),
    ("papers", [], {"table_3_near", "table_3_compared", "table_7_near", "moc_near", "moetion_near"}),
    (
        "placement",
        ["--rounds", "1", "--nodes", "64"],
        {
            "recovery_mro_lost_4",
            "recovery_spread_lost_4",
            "straggler_mro",
            "large_plan_s",
            "moved_vs_least_racks",
        },
    ),
    (
        "dispatch",
        ["--rounds", "1", "--nodes", "64", "--layers", "2"],
        {
            "dispatch_ms_256x256",
            "map_ms_random_64",
            "transfers_ms_random_racks_64",
            "straggler_ours_8to1",
        },
    ),
    (
        "traces",
        ["--most-nodes", "4", "--seeds", "1"],
        {"growing_part", "g4dn_ours_goodput", "p2_lazarus_alone_rollbacks", "p2_ours_pause"},
    ),
    (
        "stall",
        ["--rounds", "1", "--state-mib", "8", "--tokens", "8", "--settle", "6", "--no-process"],
        {"stall_vs_best_peer", "snapshot_bytes_vs_dense"},
    ),
    (
        "overhead",
        ["--rounds", "1", "--block", "2", "--batch-size", "2", "--settle", "6"],
        {"overhead_fraction_cpu", "precision"},
    ),
    (
        "restore",
        ["--rounds", "1", "--state-mib", "8"],
        {"restore_vs_memcpy", "restore_storage_vs_plain_reads"},
    ),
    (
        "persist",
        ["--rounds", "1", "--size-mib", "8", "--state-mib", "4", "--steps", "6"],
        {
            "persist_vs_plain_upload",
            "persist_local_vs_plain_upload",
            "persist_cpu_s_per_gib",
            "stall_ms_added",
            "uploaded_bytes_per_checkpoint",
            "image_bytes_per_checkpoint",
        },
    ),
    (
        "sharing",
        ["--rounds", "1", "--block", "2", "--settle", "8", "--batch-size", "1"],
        {"snapshot_bytes_once_vs_each", "overhead_fraction_once", "overhead_fraction_each"},
    ),
    (
        "sampling",
        [
            *("--rounds", "1", "--block", "1", "--settle", "4", "--tokens", "16", "--blocks", "2"),
            *("--large", "2", "--large-width", "32", "--moe-mib", "1"),
        ],
        {"small_fraction", "large_fraction", "moe_fraction", "small_extra", "small_samples"},
    ),
    (
        "replicas",
        ["--rounds", "1", "--tensors", "20", "--ranks", "4"],
        {"audit_overhead_fraction", "digests_ms_20", "compared_ms_20", "sent_bytes_20"},
    ),
    (
        "replay",
        ["--rounds", "1", "--tokens", "64", "--width", "32", "--layers", "2", "--window", "10"],
        {"replay_cost_90_frozen"},
    ),
    (
        "logging",
        [
            *("--rounds", "1", "--block", "2", "--settle", "8", "--window", "2"),
            *("--width", "32", "--tokens", "16", "--layers", "1", "--experts", "2"),
        ],
        {"logging_fraction", "own_cpu_ms", "log_bytes_per_iteration", "log_memory_bytes"},
    ),
    (
        "bubbles",
        [
            *("--rounds", "1", "--block", "2", "--settle", "8", "--stages", "2", "--micro-batches", "2"),
            *("--width", "32", "--tokens", "16", "--experts", "2"),
        ],
        {
            "bubbles_vs_off",
            "bubbles_vs_beside",
            "bubble_predicted_1",
            "bubble_measured_1",
            "bubble_closed_form",
        },
    ),
    (
        "reroute",
        ["--grids", "24", "--draws", "1"],
        {"undisturbed_1f1b_24", "ours_24_2", "ours_vs_drop_24_2", "ours_vs_bamboo_24_1", "above_bound_24_1"},
    ),
    (
        "serving",
        [
            *("--rounds", "1", "--prompt", "40", "--requests", "2", "--layers", "1"),
            *("--steps", "1", "--unit-ms", "0.1"),
        ],
        {
            "failsafe_vs_recompute",
            "failsafe_vs_restart",
            "throughput_7_vs_4",
            "first_minute_lost_3_vs_restart",
            "backup_cost",
        },
    ),
    (
        "localized",
        ["--rounds", "1", "--stages", "2", "--window", "2", "--micro-batches", "2", "--rows", "1"],
        {
            "replayed_iterations_unaffected",
            "localized_vs_global",
            "attach_localized_vs_global",
            "recovery_s_localized_2",
            "recovery_s_global_2",
            "simulated_attach_localized_vs_global_16",
        },
    ),
    (
        "replication",
        ["--rounds", "1", "--block", "3", "--settle", "8", "--batch-size", "1"],
        {"replication_fraction", "overhead_fraction", "lag_iterations_max", "replicated_mb_per_s"},
    ),
    (
        "recovery",
        ["--rounds", "1", "--state-mib", "8"],
        {
            "recovery_s",
            "loss_to_fresh_s",
            "transfer_s",
            "process_there_s",
            "imports_s",
            "process_groups_s",
            "attach_s",
            "inventory_s",
            "plan_s",
            "first_bytes_s",
            "loaded_s",
            "replayed_s",
            "first_new_step_s",
        },
    ),
    (
        "policies",
        ["--length", "4", "--mtbf", "2", "--configurations", "1"],
        {"predicted_vs_measured_ettr_max_error", "select_8_of_256_in_61_layers_ms"},
    ),
    (
        "rendezvous",
        ["--rounds", "1", "--variants", "quick"],
        {"rendezvous_quick_s", "rendezvous_quick_vs_settings"},
    ),
    (
        "recovery_host",
        ["--rounds", "1", "--torchrun-rounds", "1", "--state-mib", "4"],
        {
            "recovery_host_p50_s",
            "recovery_host_p99_s",
            "recovery_vs_torchrun",
            "host_rss_mib",
            "zygote_private_mib",
        },
    ),
]


# Each of these takes longer than all others together.
SLOW = {
    "stall",
    "schedule",
    "rendezvous",
    "traces",
    "localized",
    "overhead",
    "persist",
    "sharing",
    "bubbles",
    "logging",
    "policies",
    "replication",
    "recovery",
    "recovery_host",
    "placement",
    "replay",
    "restore",
    "dispatch",
    "sampling",
    "serving",
}


def _run(subject: str, options: list[str]) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", f"bench.{subject}", "--json", *options],
        check=False,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    record: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return record


@pytest.mark.slow
@pytest.mark.parametrize(
    ("subject", "options", "names"),
    [pytest.param(*s, id=s[0], marks=long if s[0] in SLOW else ()) for s in SUBJECTS],
)
def test_benchmark_keeps_its_contract(subject: str, options: list[str], names: set[str]) -> None:
    record = _run(subject, options)
    assert set(record) == {"bench", "machine", "commit", "metrics"}
    assert record["bench"] == subject
    assert record["machine"]["torch"] == torch.__version__
    assert names <= set(record["metrics"])
    for name in names:
        assert isinstance(record["metrics"][name], int | float), name
    assert not any(isinstance(value, dict | list) for value in record["metrics"].values()), "flat"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_the_benchmark_of_a_gpu_keeps_its_contract() -> None:
    small = ["--width", "128", "--layers", "2", "--experts", "4", "--memory-gib", "1"]
    record = _run("gpu", ["--rounds", "1", "--block", "2", "--batch-size", "2", "--saves", "1", *small])
    assert {
        *("overhead_fraction_cuda", "overhead_p99_fraction_cuda", "capture_vs_link_cuda", "capture_vs_link"),
        *("restore_vs_link", "small_copy_delay_us", "attach_s", "stall_vs_best_peer_cuda"),
        *("stall_ms_dcp_async_save", "begin_us_per_tensor_4k"),
    } <= set(record["metrics"])
    assert record["metrics"]["left_out_cuda"] == 0


def test_interleave_alternates_the_order_and_drops_the_warmup() -> None:
    calls: list[str] = []

    def variant(name: str) -> float:
        calls.append(name)
        return float(len(calls))

    samples = interleave({"a": lambda: variant("a"), "b": lambda: variant("b")}, rounds=2, warmup=1)
    assert "".join(calls) == "baabba"
    assert samples == {"a": [3.0, 6.0], "b": [4.0, 5.0]}


@pytest.mark.parametrize("fused", [False, True])
def test_the_stack_is_as_large_as_asked(fused: bool) -> None:
    model = build_stack(4, fused=fused)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(16, model.width)).backward()
    optimizer.step()
    assert 4 << 20 <= state_bytes(model, optimizer) < 8 << 20


def test_the_table_lines_up() -> None:
    assert table(["a", "value"], [["long name", "1"], ["b", "22"]]).splitlines() == [
        "a          value",
        "----------------",
        "long name      1",
        "b             22",
    ]
