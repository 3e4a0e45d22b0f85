"""`ckptctl advise`, as a user types it."""

from __future__ import annotations

import json
import re
import struct
import sys
from pathlib import Path

import pytest

from ckptd.core.advice.advice import ettr_curves
from ckptd.core.advice.job_shape import MODELS, PRECISIONS, Layout, rank_shape
from ckptd.core.advice.outlook import Conditions
from ckptd.ctl import advise_command
from ckptd.ctl.advise_command import failures_at_random
from ckptd.ctl.main import main
from ckptd.transport.messages import SessionStatus

JOB = [
    *("advise", "--model", "qwen3-30b-a3b", "--gpus", "16", "--expert-ranks", "8"),
    *("--mtbf", "10m", "--network", "12GB"),
]
RANK = rank_shape(MODELS["qwen3-30b-a3b"], Layout(16, 1, 8), PRECISIONS["bf16-mixed"])


def asked(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    assert main([*JOB, *words]) == code
    shown = capsys.readouterr()
    return shown.out if code == 0 else shown.err


def test_it_names_the_best_and_what_to_pass(capsys: pytest.CaptureFixture[str]) -> None:
    text = asked(capsys, "--iteration", "1s")
    assert "24.88 GiB of state on each rank, iterations of 1 s, a failure every 10 min" in text
    found = re.search(r"^best +sliding, W=(\d+)", text, re.MULTILINE)
    assert found is not None
    assert f"snapshots=SnapshotOptions(window={found[1]})" in text
    for name in ("aligned", "dense", "CheckFreq's interval", "Gemini's interval", "Young and Daly's"):
        assert name in text
    assert re.search(r"A failure costs [\d.]+ s: [\d.]+ s of iterations that are lost", text)
    assert "Left out: " in text


def test_json_has_every_number(capsys: pytest.CaptureFixture[str]) -> None:
    answer = json.loads(asked(capsys, "--iteration", "1s", "--json"))
    best, *others, lossy = answer["policies"]
    assert best["name"] == "best"
    assert (lossy["name"], lossy["choice"]["policy"]) == ("loses updates", "partial")
    assert 0 < lossy["lost_share"] < 0.0375
    assert best["ettr"] > max(other["ettr"] for other in others)
    assert abs(best["played_ettr"] - best["ettr"]) < 0.01
    assert best["recovery_s"] == pytest.approx(
        best["lost_s"] + best["load_s"] + best["replay_s"] + best["restart_s"]
    )
    assert answer["arguments"] == f"snapshots=SnapshotOptions(window={best['choice']['window']})"


def test_a_stage_with_boundary_logs_replays_alone(capsys: pytest.CaptureFixture[str]) -> None:
    """Eight micro-batches over two stages: 8 / 9 of an iteration for each."""
    words = ["--iteration", "1s", "--stages", "2", "--json"]
    together, alone = (
        json.loads(asked(capsys, *words, *more))["policies"][0] for more in ([], ["--micro-batches", "8"])
    )
    assert together["choice"] == alone["choice"]
    assert (together["localized"], alone["localized"]) == (False, True)
    assert alone["replay_s"] == pytest.approx(8 / 9 * (together["replay_s"] + together["lost_s"] - 0.5))
    assert alone["ettr"] > together["ettr"]


def test_iterations_follow_from_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    answer = json.loads(asked(capsys, "--tokens", "4M", "--tflops", "400", "--json"))
    assert answer["iteration_s"] == pytest.approx(6 * 3.35e9 * 4e6 / (16 * 400e12), rel=0.01)


class TestRecordedFailures:
    def test_a_trace_of_spot_instances_is_played(self, capsys: pytest.CaptureFixture[str]) -> None:
        """Seventeen losses of nodes within 20,233 s, some of them seconds after each other."""
        path = Path(__file__).parents[3] / "bench/spot/data/aws-g4dn-xlarge-us-east-1d-2020-11-23_24.csv"
        words = ["--model", "qwen3-30b-a3b", "--gpus", "16", "--expert-ranks", "8", "--iteration", "1s"]
        assert main(["advise", *words, "--failures", str(path), "--json"]) == 0
        answer = json.loads(capsys.readouterr().out)
        assert answer["mtbf_s"] == pytest.approx((45_668 - 25_435) / 17)
        for policy in answer["policies"]:
            assert 0 < policy["played_ettr"] < 1
            assert policy["played_ettr"] != pytest.approx(policy["ettr"], abs=1e-6)

    def test_an_mtbf_that_is_given_counts_for_the_formula(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        path = tmp_path / "failures"
        path.write_text("4000\n8000\n")
        answer = json.loads(asked(capsys, "--iteration", "1s", "--failures", str(path), "--json"))
        assert answer["mtbf_s"] == 600.0
        assert answer["policies"][0]["played_ettr"] > answer["policies"][0]["ettr"]

    def test_a_file_that_is_no_record(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        path = tmp_path / "failures"
        for text, message in (("soon", "line 1, 'soon', is no time in seconds"), (None, "No such file")):
            if text is None:
                path.unlink()
            else:
                path.write_text(text)
            assert message in asked(capsys, "--iteration", "1s", "--failures", str(path), code=2)

    def test_neither(self, capsys: pytest.CaptureFixture[str]) -> None:
        words = ["--model", "qwen3-30b-a3b", "--gpus", "16", "--iteration", "1s"]
        assert main(["advise", *words]) == 2
        assert "pass --mtbf, or --failures" in capsys.readouterr().err


class TestPicture:
    def test_it_is_a_png_of_the_size_that_was_asked_for(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        pytest.importorskip("matplotlib", reason="the picture needs matplotlib (extra: demo)")
        path = tmp_path / "ettr"
        asked(capsys, "--iteration", "1s", "--picture", str(path), "--picture-size", "640x480")
        head = path.read_bytes()[:24]
        assert head[:8] == b"\x89PNG\r\n\x1a\n"
        assert struct.unpack(">II", head[16:24]) == (640, 480)

    def test_policies_that_do_not_fit_are_said(self) -> None:
        curves = ettr_curves(RANK, Conditions(1.0, 600.0, 20e9, 12e9), [600.0], memory_bytes=1)
        assert [advise_command._label(curve, 0) for curve in curves] == [
            f"{curve.name}: nothing fits" for curve in curves
        ]

    def test_labels_name_the_choice_at_the_given_mtbf(self) -> None:
        curves = ettr_curves(RANK, Conditions(1.0, 600.0, 20e9, 12e9), [60.0, 600.0])
        labels = [advise_command._label(curve, 1) for curve in curves]
        assert labels[0].endswith("  sliding, W=3")
        assert labels[-1].endswith(" (loses updates)")
        assert any(re.fullmatch(r"0\.\d{3}  dense, every 15: CheckFreq's interval", each) for each in labels)
        assert {curve.name for curve in curves} == set(advise_command._STYLES)

    def test_without_matplotlib_it_says_what_to_install(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(sys.modules, "matplotlib", None)
        error = asked(capsys, "--iteration", "1s", "--picture", str(tmp_path / "a.png"), code=2)
        assert "--picture needs matplotlib (" in error
        assert "pip install matplotlib" in error
        assert not list(tmp_path.iterdir())

    def test_a_folder_that_is_not_there(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        pytest.importorskip("matplotlib", reason="the picture needs matplotlib (extra: demo)")
        error = asked(capsys, "--iteration", "1s", "--picture", str(tmp_path / "none" / "a.png"), code=1)
        assert "--picture: " in error
        assert "No such file" in error


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--iteration", "1s", "--model", "qwen"], "no model 'qwen'; there are deepseek-moe-16b, "),
        (["job", "run"], "pass either JOB and RUN, or --model"),
        (["job"], "pass either JOB and RUN, or --model"),
        ([], "pass either --iteration, or --tokens with --tflops"),
        (["--iteration", "1s", "--tokens", "4M"], "pass either --iteration, or --tokens with --tflops"),
        (["--tokens", "4M"], "--tokens needs --tflops, what a GPU reaches; above 0"),
        (["--iteration", "0s"], "iteration_s is 0; it must be above 0"),
        (["--iteration", "1s", "--mtbf", "0s"], "mtbf_s is 0; it must be above 0"),
        (["--iteration", "1s", "--gpus", "12"], "12 GPUs are no multiple of 1 stages x 8 ranks of experts"),
        (["--iteration", "1s", "--gpus", "0"], "0 GPUs, 1 stages, 8 ranks of experts"),
        (["--iteration", "1s", "--replicas", "0"], "replicas is 0; it must be above 0"),
        (["--iteration", "1s", "--drag", "-1"], "drag is -1; it must be 0 or more"),
        (["--iteration", "1s", "--micro-batches", "8"], "--micro-batches needs the --stages of a pipeline"),
    ],
)
def test_what_cannot_be_is_refused(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in asked(capsys, *words, code=2)


def test_memory_that_is_too_small_for_anything(capsys: pytest.CaptureFixture[str]) -> None:
    error = asked(capsys, "--iteration", "1s", "--memory", "1GiB", code=1)
    assert re.search(r"nothing fits: .* need more than 1 GiB of memory \(the smallest: .* GiB\)", error)


@pytest.mark.parametrize(
    ("option", "text"),
    [("--mtbf", "soon"), ("--tokens", "many"), ("--link", "fast"), ("--picture-size", "large")],
)
def test_words_that_are_no_numbers(option: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([*JOB, option, text])
    assert f"argument {option}: " in capsys.readouterr().err


def test_the_same_seed_draws_the_same_failures() -> None:
    first, second, other = (list(failures_at_random(60.0, 3600.0, seed)) for seed in (1, 1, 2))
    assert first == second != other
    assert first == sorted(first)
    assert 0 < first[0] < first[-1] < 3600.0


@pytest.mark.parametrize(
    ("snapshots", "window", "shown"),
    [
        (40, 1, {"policy": "sliding", "window": 1, "every": 1}),
        (40, 4, {"policy": "sliding", "window": 4, "every": 1}),
        (4, 1, {"policy": "dense", "window": 1, "every": 10}),
        (40, 4, {"policy": "aligned", "window": 4, "every": 1}),
        (20, 4, {"policy": "partial", "window": 4, "every": 2}),
    ],
)
def test_a_job_that_runs_is_rated_as_it_is(
    snapshots: int,
    window: int,
    shown: dict[str, object],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of 40 iterations so many had a snapshot; two looks of a stand-in for the daemon."""

    def look(step: int, taken: int) -> SessionStatus:
        metrics = {"dense_bytes": 7e9, "snapshot_bytes": 7e9 if window == 1 else 2.5e9}
        metrics |= {"window": window, "snapshots": taken, "steps": step, "stall_ms_sum": 0.0}
        return SessionStatus("j", "r", 0, 1, 1, step, metrics, 1, 1, 1, 1.0, "pidfd")

    looks = iter([look(100, 50), look(140, 50 + snapshots)])
    monkeypatch.setattr(advise_command, "_session", lambda args, rank=None: next(looks))
    monkeypatch.setattr(advise_command, "_policy", lambda args, rank: shown["policy"])
    assert main(["advise", "j", "r", "--mtbf", "1h", "--watch", "0.4s", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["policies"][0]["name"] == "now"
    assert answer["policies"][0]["choice"] == shown
    assert answer["iteration_s"] == pytest.approx(0.01)
