"""The GPU form of the dispatcher: the CPU form's integers at sizes of jobs, without the host; the
tests of both are in ``tests/ckptd/core/elastic``.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from ckptd.core.elastic.token_dispatch import Dispatch, plan_dispatch
from ckptd.cuda.dispatch import DeviceDispatch, DeviceDispatcher, KernelsUnavailable
from tests.ckptd.core.elastic.forms import INTERPRETED, NEEDS_CUDA
from tests.long import long

ROOT = Path(__file__).resolve().parents[2]
TRITON = importlib.util.find_spec("triton") is not None

# Ranks, experts, ranks of a node: none fills its blocks, some are of jobs.
SIZES = [(16, 64, 8), (37, 19, 5), (100, 300, 8), (256, 256, 8), (1024, 256, 8), (1030, 5, 1030)]
# What interprets is slow; one in which programs of all kernels are several.
SMALL = [(40, 70, 8)]
DEVICES = [
    *(pytest.param("cuda", *size, marks=[pytest.mark.gpu, NEEDS_CUDA], id=f"gpu-{size}") for size in SIZES),
    *(
        pytest.param(
            "cpu",
            *size,
            marks=pytest.mark.skipif(not INTERPRETED, reason="TRITON_INTERPRET=1 is not set"),
            id=f"interpreted-{size}",
        )
        for size in SMALL
    ),
]


def _placement(ranks: int, experts: int) -> tuple[np.random.Generator, Tensor]:
    rng = np.random.default_rng(ranks * experts)
    replicas = rng.multinomial(2, np.full(experts, 1 / experts), size=ranks)
    replicas[rng.integers(0, ranks, experts), np.arange(experts)] += 1
    return rng, torch.from_numpy(replicas)


def _tokens(rng: np.random.Generator, ranks: int, experts: int) -> Tensor:
    popularity = rng.dirichlet(np.full(experts, 0.5))
    return torch.from_numpy(rng.multinomial(32768, popularity, size=ranks))


def _assert_same(found: DeviceDispatch, expected: Dispatch, ranks: list[int]) -> None:
    assert torch.equal(found.quotas.cpu(), torch.from_numpy(expected.quotas))
    assert torch.equal(found.kept.cpu(), torch.from_numpy(expected.kept))
    for rank in ranks:
        sends, received = found.share(rank)
        same = expected.sends(rank)
        assert torch.equal(sends.tokens.cpu(), torch.from_numpy(same.tokens))
        assert torch.equal(sends.first.cpu(), torch.from_numpy(same.first))
        assert torch.equal(received.cpu(), torch.from_numpy(expected.receives(rank)))


@pytest.mark.parametrize(("device", "ranks", "experts", "per_node"), DEVICES)
@pytest.mark.parametrize("kind", ["no nodes", "neighbours", "mixed"])
def test_it_is_what_the_cpu_form_gives(
    device: str, ranks: int, experts: int, per_node: int, kind: str
) -> None:
    rng, replicas = _placement(ranks, experts)
    nodes = np.arange(ranks) // per_node
    if kind == "mixed":  # nodes of different sizes, whose ranks are not neighbours
        nodes = rng.integers(0, 1 + ranks // per_node, ranks)
    nodes_R = None if kind == "no nodes" else nodes
    on_device = None if nodes_R is None else torch.from_numpy(nodes_R)
    planner = DeviceDispatcher(replicas, device, nodes=on_device)
    for _ in range(2):
        tokens = _tokens(rng, ranks, experts)
        expected = plan_dispatch(tokens.numpy(), replicas.numpy(), nodes=nodes_R)
        _assert_same(planner.plan(tokens.to(device)), expected, [0, ranks // 2, ranks - 1])
    apart = torch.full((ranks, experts + 6), -7)
    apart[:, 6:] = tokens
    _assert_same(planner.plan(apart.to(device)[:, 6:]), expected, [ranks // 3])
    transposed = tokens.T.contiguous().to(device).T
    _assert_same(planner.plan(transposed), expected, [ranks // 3])


@pytest.mark.gpu
@NEEDS_CUDA
def test_the_host_waits_for_nothing() -> None:
    """It is captured in a graph, which a synchronisation would end, and plans other tokens when it
    is replayed.
    """
    rng, replicas = _placement(64, 48)
    nodes = np.arange(64) // 8
    planner = DeviceDispatcher(replicas, "cuda", nodes=torch.from_numpy(nodes))
    tokens = _tokens(rng, 64, 48).cuda()
    before = torch.cuda.get_sync_debug_mode()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that the mode is a prototype, and misses some
            torch.cuda.set_sync_debug_mode("error")
        planner.plan(tokens).share(5)
    finally:
        torch.cuda.set_sync_debug_mode(before)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sends, received = planner.plan(tokens).share(5)
    for _ in range(3):
        tokens.copy_(_tokens(rng, 64, 48))
        graph.replay()
        expected = plan_dispatch(tokens.cpu().numpy(), replicas.numpy(), nodes=nodes)
        same = expected.sends(5)
        assert torch.equal(sends.tokens.cpu(), torch.from_numpy(same.tokens))
        assert torch.equal(sends.first.cpu(), torch.from_numpy(same.first))
        assert torch.equal(received.cpu(), torch.from_numpy(expected.receives(5)))


@pytest.mark.parametrize(
    ("replicas", "nodes", "message"),
    [
        (torch.ones(2, 2), None, r"replicas are torch.float32 of shape \(2, 2\)"),
        (torch.ones(2, dtype=torch.int64), None, r"of shape \(2,\): they must be int64 with a row"),
        (torch.ones(0, 2, dtype=torch.int64), None, r"of shape \(0, 2\)"),
        (torch.tensor([[1, -1], [1, 2]]), None, "negative numbers of replicas"),
        (torch.tensor([[1, 0], [1, 0]]), None, "no rank holds expert 1"),
        (torch.tensor([[1], [1]]), torch.tensor([0]), r"of shape \(1,\): integers for 2 ranks"),
        (torch.tensor([[1], [1]]), torch.tensor([0.0, 1.0]), "nodes are torch.float32"),
    ],
)
def test_a_bad_placement_is_named(replicas: Tensor, nodes: Tensor | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DeviceDispatcher(replicas, "cpu", nodes=nodes)


@pytest.mark.gpu
@NEEDS_CUDA
def test_bad_tokens_are_named() -> None:
    planner = DeviceDispatcher(torch.ones(2, 3, dtype=torch.int64), "cuda")
    good = torch.ones(2, 3, dtype=torch.int64, device="cuda")
    with pytest.raises(ValueError, match=r"shape \(3, 2\); this placement needs int64 of \(2, 3\)"):
        planner.plan(good.T)
    with pytest.raises(ValueError, match=r"tokens are torch\.int32"):
        planner.plan(good.int())
    with pytest.raises(ValueError, match="tokens are on cpu, the placement is on cuda"):
        planner.plan(good.cpu())
    with pytest.raises(ValueError, match="rank 2 of 2 ranks"):
        planner.plan(good).share(2)


@pytest.mark.skipif(INTERPRETED, reason="the interpreter needs no device")
def test_without_triton_or_a_device_it_says_so() -> None:
    with pytest.raises(KernelsUnavailable, match=r"Triton is not installed|Error: "):
        DeviceDispatcher(torch.ones(2, 3, dtype=torch.int64), "cpu")


@long  # it starts another pytest, and what interprets is slow
@pytest.mark.skipif(not TRITON, reason="triton is not installed: nothing interprets the kernels")
@pytest.mark.skipif(INTERPRETED, reason="this is the process that interprets them")
def test_the_same_tests_in_triton_s_interpreter() -> None:
    """All that have a form for it; in a process of its own, since kernels are one or the other from
    their import on.
    """
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "interpreted"]
    done = subprocess.run(
        [
            *command,
            "tests/ckptd/core/elastic/test_token_dispatch.py",
            "tests/cuda/test_dispatch.py",
        ],
        cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
        check=False,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed, done.stdout
    assert int(passed[1]) == 6
    assert "skipped" not in done.stdout
