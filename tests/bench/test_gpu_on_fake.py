"""The parts of bench.gpu and bench.gpu_copies that need a device, on one that the host plays."""

from __future__ import annotations

import argparse
import ctypes
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from bench import gpu, gpu_candidates, gpu_copies
from ckptd.cuda.copy_plan import DEFAULT_PLAN, CopyPlan
from ckptd.cuda.cuda_engine import CudaEngine
from ckptd.cuda.engine import CopyEngine
from tests.cuda.fake_device import pretend_a_device


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    def engine(device: torch.device, *, plan: CopyPlan = DEFAULT_PLAN) -> CopyEngine:
        return CudaEngine(device, plan)

    pretend_a_device(monkeypatch)
    for module in (gpu, gpu_copies):
        monkeypatch.setattr(module, "make_engine", engine)
    monkeypatch.setattr(gpu, "DEVICE", "cpu")
    monkeypatch.setattr(gpu, "PINNED", False)
    monkeypatch.setattr(gpu, "pinned_link_gb_per_s", lambda: 50.0)
    monkeypatch.setattr(gpu_copies, "POINT_BYTES", 1 << 20)
    monkeypatch.setattr(gpu_copies, "POINT_TENSORS", 32)


def batch_copies(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A cuda-python that copies at once; the number of chunks of each call."""
    calls: list[int] = []

    def copy(*given: Any) -> tuple[int]:
        targets, sources, sizes, count, (attributes,), begins, kinds, stream = given
        assert (count, begins, kinds, stream) == (len(targets), [0], 1, 1)
        assert attributes.srcAccessOrder == "stream"
        for target, source, size in zip(targets, sources, sizes, strict=True):
            ctypes.memmove(target, source, size)
        calls.append(count)
        return (0,)

    runtime = SimpleNamespace(
        cudaMemcpyAttributes=SimpleNamespace,
        cudaMemcpyBatchAsync=copy,
        cudaMemcpyFlags=SimpleNamespace(cudaMemcpyFlagPreferOverlapWithCompute=1),
        cudaMemcpySrcAccessOrder=SimpleNamespace(cudaMemcpySrcAccessOrderStream="stream"),
    )
    for name in ("cuda", "cuda.bindings"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(sys.modules["cuda.bindings"], "runtime", runtime, raising=False)
    return calls


@pytest.mark.usefixtures("device")
def test_capture_and_restore_of_mixed_tensors() -> None:
    found = gpu.copies_alone(2, count=20, total_bytes=1 << 20)
    assert found["mixed_tensors"] == 20
    assert {"capture_vs_link", "restore_vs_link", "small_copy_delay_us", "chunk_us"} <= found.keys()


@pytest.mark.usefixtures("device")
def test_bytes_that_do_not_arrive_end_the_part(monkeypatch: pytest.MonkeyPatch) -> None:
    mixed = gpu.Mixed.make(20, 1 << 20)
    mixed.check()
    begin = mixed.engine.begin

    def forgetful(*given: Any) -> None:
        begin(*given)
        mixed.engine.wait()
        mixed.memory.tensor[0] ^= 1

    monkeypatch.setattr(mixed.engine, "begin", forgetful)
    with pytest.raises(RuntimeError, match="what arrived at byte 0 is not what was sent"):
        mixed.check()
    mixed.close()


@pytest.mark.usefixtures("device")
def test_a_capture_that_fails_is_no_rate() -> None:
    capture = gpu.Capture()
    capture.done(RuntimeError("the device is gone"))
    with pytest.raises(RuntimeError, match="a capture failed"):
        capture.wait()


@pytest.mark.usefixtures("device")
def test_handing_over_many_tensors() -> None:
    us, rate = gpu.begin_us(8, 100, rounds=1)
    assert us > 0
    assert rate > 0


@pytest.mark.usefixtures("device")
def test_every_candidate_of_a_device_arrives_and_gives_a_plan(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    calls = batch_copies(monkeypatch)
    monkeypatch.setattr(gpu_candidates, "probe", lambda group: "no kernel" if group == "store" else "")
    args = argparse.Namespace(
        only=[],
        size_mib=5,
        products=2,
        width=8,
        device="cuda",
        rounds=2,
        slowdown_max=0.01,
        json=False,
        pace_ms=None,
        curve=tmp_path / "new" / "curve.json",
    )
    metrics = gpu_copies.run(args)
    for name in (
        "burst",
        "chunks_16m",
        "paced_1m",
        "host_paced_4m",
        "batch_4m",
        "batch_16m",
        "batch_4m_overlap",
    ):
        assert metrics[f"gb_per_s_{name}"] > 0  # type: ignore[operator]
    assert metrics["skipped_store"] == "no kernel"
    assert set(calls) == {1, 2}, "5 MiB in chunks of 4 and of 16"
    assert str(metrics["plan"]).startswith("the host: tensors are")
    curve = json.loads((tmp_path / "new" / "curve.json").read_text())
    assert [point["size_bytes"] for point in curve["packed"]] == list(gpu_copies.POINT_SIZES)


def test_a_group_without_its_library_is_skipped_with_the_reason() -> None:
    """Its trial is a process of its own; here there is no device."""
    assert gpu_candidates.probe("batch") != ""
