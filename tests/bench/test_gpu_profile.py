"""Every millisecond of an iteration is accounted for, in traces made by hand. (A real one: test_gpu_run.)"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from bench.gpu_profile import account, difference, is_wait, metrics_of, read_trace, subtract, union

ROOT = Path(__file__).resolve().parents[2]
TRACES = ROOT / "tests" / "testdata" / "cuda"


def test_an_iteration_by_its_kinds() -> None:
    """Two iterations from 1 to 19 ms; the kernel before them does not count."""
    found = account(read_trace(TRACES / "trace_plain.json"))
    assert (found.iterations, found.iteration_ms) == (2, 9.0)
    assert found.parts == {
        "kernels": 6.0,
        "copies DtoH <= 4 KiB": 0.005,
        "memsets": 0.5,
        # From the small copy's end to that of the wait for it, of the training thread alone.
        "idle, the training thread in cudaStreamSynchronize": 0.25,
        "idle, the training thread has not come so far": pytest.approx(9 - 6 - 0.005 - 0.5 - 0.25),
    }
    assert found.meanwhile == {
        "the training thread in cudaStreamSynchronize": 0.755,
        "the training thread in cudaStreamSynchronize, how many": 0.5,
    }


def test_what_a_snapshot_adds_is_named() -> None:
    """One iteration from 1 to 22 ms, in which a small copy waits for a large one of another stream."""
    found = account(read_trace(TRACES / "trace_ckptd.json"))
    assert found.iteration_ms == 21.0
    assert found.parts == {
        "kernels": 6.0,
        "copies DtoH <= 4 KiB": 0.01,
        "copies HtoD <= 1 MiB": 2.0,
        "idle during copies DtoH > 1 MiB of another stream": pytest.approx(0.5 + 3.5),
        "idle during kernels of another stream": pytest.approx(0.09),
        "idle, the training thread in cudaMemcpyAsync": 0.0,
        # 1 ms of it in backward's thread.
        "idle, the training thread in cudaStreamSynchronize": pytest.approx(1.4),
        "idle, the training thread has not come so far": pytest.approx(21 - 6 - 0.01 - 2 - 4 - 0.09 - 1.4),
    }
    assert sum(found.parts.values()) == pytest.approx(found.iteration_ms)
    assert found.meanwhile["copies DtoH > 1 MiB of other streams"] == 10.0


def test_the_difference_begins_with_what_grew_most() -> None:
    plain, ours = (account(read_trace(TRACES / f"trace_{name}.json")) for name in ("plain", "ckptd"))
    lines = difference(plain, ours).splitlines()
    assert lines[0].split() == ["ms", "of", "an", "iteration", "without", "with", "ckptd", "difference"]
    rows = [line for line in lines if "idle, the training thread has not come so far" in line]
    assert rows[0].split()[-3:] == ["2.245", "7.500", "+5.255"]
    assert lines[2] == rows[0]
    total = next(line for line in lines if line.startswith("an iteration"))
    assert total.split()[-3:] == ["9.000", "21.000", "+12.000"]
    names = metrics_of(ours, "ckptd")
    assert names["profiled_ms_idle_during_copies_dtoh_over_1_mib_of_another_stream_ckptd"] == pytest.approx(
        4.0
    )


def test_a_trace_without_marks_is_refused() -> None:
    with pytest.raises(ValueError, match=r"wrap each in record_function\('iteration'\)"):
        account({"traceEvents": []})


def test_waits_are_those_of_the_driver() -> None:
    def call(name: str, cat: str = "cuda_runtime") -> dict[str, Any]:
        return {"name": name, "cat": cat}

    assert is_wait(call("cudaEventSynchronize"))
    assert is_wait(call("cudaMemcpy"))
    assert is_wait(call("cuStreamSynchronize", "cuda_driver"))
    assert not is_wait(call("cudaLaunchKernel"))
    assert not is_wait(call("aten::Synchronize", "cpu_op"))


@pytest.mark.parametrize("seed", range(30))
def test_intervals_against_single_moments(seed: int) -> None:
    draw = random.Random(seed)

    def some() -> list[tuple[float, float]]:
        begins = [draw.randrange(40) for _ in range(draw.randrange(7))]
        return [(begin, begin + draw.randrange(6)) for begin in begins]

    def moments(intervals: list[tuple[float, float]]) -> set[int]:
        return {m for begin, end in intervals for m in range(int(begin), int(end))}

    left, right = some(), some()
    assert moments(union(left)) == moments(left)
    assert all(a[1] < b[0] for a, b in zip(union(left), union(left)[1:], strict=False))
    rest = subtract(union(left), union(right))
    assert moments(rest) == moments(left) - moments(right)
    assert sum(end - begin for begin, end in rest) == len(moments(rest))
