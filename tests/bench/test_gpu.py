"""What bench.gpu computes without a device: sizes, layers, delays, and the comparison with peers."""

from __future__ import annotations

import json
from argparse import Namespace

import pytest
import torch

from bench.common import percentile
from bench.gpu import (
    Parts,
    against_peers,
    config_of,
    delays,
    layers_that_fit,
    mixed_sizes,
    model_options,
    of_resumption,
)
from bench.overhead import Job
from ckptd.demo.data import load_corpus
from ckptd.demo.model import MoEConfig, MoETransformer

MODEL = Namespace(width=128, layers=2, experts=4, batch_size=8, settle=5, chunk_mib=0)


def test_mixed_sizes_have_their_sum_and_spread() -> None:
    sizes = mixed_sizes(400, 4 << 30)
    assert len(sizes) == 400
    assert 0.999 * (4 << 30) < sum(sizes) <= 4 << 30
    assert all(size % 64 == 0 and size > 0 for size in sizes)
    assert min(sizes) < 64 << 10
    assert max(sizes) > 32 << 20
    assert sizes == mixed_sizes(400, 4 << 30), "the same in each run"


def test_options_of_the_model_reach_its_processes() -> None:
    assert model_options(MODEL) == [
        *("--width", "128", "--layers", "2", "--experts", "4", "--batch-size", "8", "--settle", "5"),
        *("--chunk-mib", "0"),
    ]
    assert config_of(MODEL).num_heads == 2


def test_the_largest_model_fits_device_and_host() -> None:
    config = MoEConfig(width=1024, num_heads=16, num_experts=16, expert_hidden=2048)
    each = {}
    for layers in (2, 3):
        with torch.device("meta"):
            sized = MoEConfig(width=1024, num_heads=16, num_experts=16, expert_hidden=2048, num_layers=layers)
            each[layers] = sum(p.numel() for p in MoETransformer(sized).parameters())
    per_layer = each[3] - each[2]
    rest = each[2] - 2 * per_layer
    on_device = layers_that_fit(config, tokens=8192, device_bytes=80 * 10**9, host_bytes=10**13)
    used = 3 * 2**30 + 24 * (on_device * per_layer + rest) + on_device * 64 * 8192 * 1024
    assert used <= 80 * 10**9 < used + 24 * per_layer + 64 * 8192 * 1024
    on_host = layers_that_fit(config, tokens=8192, device_bytes=10**13, host_bytes=60 * 10**9)
    assert 42 * (on_host * per_layer + rest) <= 60 * 10**9 < 42 * ((on_host + 1) * per_layer + rest)
    assert layers_that_fit(config, tokens=8192, device_bytes=80 * 10**9, host_bytes=60 * 10**9) == min(
        on_device, on_host
    )
    with pytest.raises(
        ValueError, match=r"no layer of width 1024 with 16 experts fits 4\.0 GB of the device"
    ):
        layers_that_fit(config, tokens=8192, device_bytes=4 * 10**9, host_bytes=10**13)


def test_percentiles_are_samples() -> None:
    samples = [float(n) for n in range(1, 101)]
    assert [percentile(samples, f) for f in (0.01, 0.5, 0.99, 1.0)] == [1.0, 50.0, 99.0, 100.0]
    assert percentile([7.0], 0.99) == 7.0
    with pytest.raises(ValueError, match="there is no sample"):
        percentile([], 0.5)


def test_delays_are_beyond_what_a_small_copy_takes_anyway() -> None:
    found = delays([9.0, 10.0, 11.0], [310.0] * 99 + [1010.0])
    assert found == {
        "small_copy_us_idle": 10.0,
        "small_copy_delay_us": 300.0,
        "small_copy_delay_p99_us": 300.0,
        "small_copy_delay_max_us": 1000.0,
        "small_copies_during": 100,
    }


def test_the_best_peer_is_of_warm_saves() -> None:
    metrics = {"iteration_ms_plain": 88.0, "iteration_ms_cuda": 90.0, "stall_ms_cuda": 1.0}
    found = {"stall_ms_dcp_async_save": 400.0, "stall_ms_torch_save": 900.0, "stall_ms_first_torch_save": 2.0}
    out = against_peers(metrics, found)
    assert out["best_peer"] == "dcp_async_save"
    assert out["stall_vs_best_peer_cuda"] == 1 / 400
    assert out["added_vs_best_peer_cuda"] == 2 / 400
    assert "stall_vs_best_peer_cuda_dense" not in out, "it was not measured"


def test_a_process_that_did_not_resume_is_no_measurement() -> None:
    with pytest.raises(RuntimeError, match="a fresh process did not resume"):
        of_resumption({"resumed_from": -1, "attach_wall_s": 1.0})


def test_a_part_that_fails_leaves_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    parts = Parts("gpu", as_json=True)
    parts.add("first", lambda: {"a": 1.0})

    def broken() -> dict[str, float]:
        raise RuntimeError("the device is gone")

    parts.add("second", broken)
    parts.add("third", lambda: {"b": 2.0})
    assert parts.failed == ["second"]
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    assert [len(line["metrics"]) for line in lines] == [2, 3, 4], "each part adds to the line before"
    assert lines[-1]["metrics"]["failed_second"] == "RuntimeError: the device is gone"
    assert (lines[-1]["metrics"]["a"], lines[-1]["metrics"]["b"]) == (1.0, 2.0)


def test_each_iteration_of_a_block_is_clocked() -> None:
    job = Job(device="cpu", batch_size=1, corpus=load_corpus(), config=config_of(MODEL))
    took_ms, _ = job.block_ms(3)
    assert len(job.each_ms) == 3
    assert sum(job.each_ms) <= 3 * took_ms
