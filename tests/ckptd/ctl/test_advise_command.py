"""`ckptctl advise`, as a user types it."""

from __future__ import annotations

import json
import re
import struct
import sys
from pathlib import Path
from typing import Any

import pytest

from ckptd.config.daemon_config import load_config
from ckptd.core.advice.advice import ettr_curves
from ckptd.core.advice.job_shape import MODELS, PRECISIONS, Layout, rank_shape
from ckptd.core.advice.node_losses import NodeLosses
from ckptd.core.advice.outlook import Conditions
from ckptd.core.slots.slots import epoch_after
from ckptd.ctl import advise_command
from ckptd.ctl.advice_report import STYLES, curve_label
from ckptd.ctl.advise_command import failures_at_random
from ckptd.ctl.main import main
from ckptd.transport.messages import DurableRank, SessionStatus

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
    assert "and, unless wrappers declare it, which 2 ranks hold the same experts:" in text


def test_json_has_every_number(capsys: pytest.CaptureFixture[str]) -> None:
    answer = json.loads(asked(capsys, "--iteration", "1s", "--json"))
    best, *others, turns, selected = answer["policies"]
    assert best["name"] == "best"
    assert (turns["name"], turns["choice"]["policy"]) == ("loses updates", "partial")
    assert (selected["name"], selected["choice"]["policy"]) == ("loses updates, by risk", "selected")
    assert all(0 < lossy["lost_share"] < 0.0375 for lossy in (turns, selected))
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


def test_what_nobody_says_is_assumed_and_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["advise", "--model", "qwen3-30b-a3b", "--gpus", "512", "--mtbf", "10m"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("Assumed: 4M tokens of an iteration (--tokens), 400 TFLOPS of a GPU (--tflops).")
    assert "snapshots=SnapshotOptions(" in text
    for words, assumed in (
        (["--tokens", "4M"], "400 TFLOPS of a GPU (--tflops)"),
        (["--tflops", "400"], "4M tokens of an iteration (--tokens)"),
        (["--tokens", "4M", "--tflops", "400"], ""),
    ):
        answer = json.loads(asked(capsys, *words, "--json"))
        assert answer["assumed"] == assumed
        assert answer["iteration_s"] == pytest.approx(6 * 3.35e9 * 4e6 / (16 * 400e12), rel=0.01)
    assert json.loads(asked(capsys, "--iteration", "1s", "--json"))["assumed"] == ""


class TestStorage:
    WORDS = ("--iteration", "1s", "--storage", "200MB", "--loss-mtbf", "7d")

    def test_it_says_what_to_store_and_what_a_loss_costs(self, capsys: pytest.CaptureFixture[str]) -> None:
        text = asked(capsys, *self.WORDS)
        assert "a failure every 10 min, and one that takes all copies in memory every 7 d" in text
        assert re.search(
            r"A failure that takes all copies in memory costs \d+ s: [\d.]+ s that are lost", text
        )
        assert re.search(r"An upload takes 172 s, so durable checkpoints may be 215 iterations apart", text)
        assert re.search(r"CKPTD_PERSIST_EVERY=\d+ CKPTD_PERSIST_EVERY_S=0", text)
        assert re.search(r"partial=PartialOptions\(num_experts=128, persist_experts=\d+\)", text)

    def test_json_has_every_number(self, capsys: pytest.CaptureFixture[str]) -> None:
        answer = json.loads(asked(capsys, *self.WORDS, "--json"))
        best, *_, lossy, _ = answer["policies"]
        stored = best["storage"]
        durable = {"persist_every": stored["every"], "persist_every_s": 0}
        assert answer["settings"] == {"replicas": 1, **durable}
        assert stored["every"] >= stored["shortest"] > stored["upload_s"] / answer["iteration_s"]
        assert best["loss_s"] == pytest.approx(
            best["restart_s"] + stored["lost_s"] + stored["load_s"] + stored["replay_s"]
        )
        assert 0 < lossy["choice"]["parts"] < lossy["choice"]["window"]
        assert lossy["storage"]["upload_bytes"] < stored["upload_bytes"] / 2
        assert abs(best["played_ettr"] - best["ettr"]) < 0.01

    def test_settings_of_the_daemon_are_those_that_it_has(self) -> None:
        environ = {"CKPTD_REPLICAS": "3", "CKPTD_PERSIST_EVERY": "339", "CKPTD_PERSIST_EVERY_S": "0"}
        found = load_config(environ=environ).config
        assert (found.replicas, found.persist_every, found.persist_every_s) == (3, 339, 0.0)

    def test_without_it_nothing_is_said_of_it(self, capsys: pytest.CaptureFixture[str]) -> None:
        text = asked(capsys, "--iteration", "1s")
        assert "CKPTD_PERSIST" not in text
        assert "loss" not in text
        assert json.loads(asked(capsys, "--iteration", "1s", "--json"))["settings"] == {"replicas": 1}

    def test_losses_come_beside_recorded_failures(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        path = tmp_path / "failures"
        path.write_text("4000\n8000\n400000\n")
        words = ["--iteration", "1s", "--failures", str(path), "--json"]
        alone = json.loads(asked(capsys, *words))["policies"][0]["played_ettr"]
        stored = ("--storage", "200MB", "--loss-mtbf", "6h")
        assert json.loads(asked(capsys, *words, *stored))["policies"][0]["played_ettr"] < alone - 0.01


class TestReplicas:
    """The job has 16 nodes with a GPU each."""

    WORDS = ("--iteration", "2s", "--storage", "200MB", "--nodes", "16", "--lost-nodes")

    def test_rare_losses_are_worth_no_replica_and_frequent_ones_are(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        text = asked(capsys, *self.WORDS, "2:365d")
        assert "losses of several of 16 nodes at once: 2 every 365 d" in text
        assert re.search(
            r"With 1 replica, a state loses all of its copies with a probability of 13% if 2 nodes are lost; "
            r"the best with 2 replicas \(\w+, W=\d+\) loses \d\.\d\d points\.",
            text,
        )
        assert "    CKPTD_REPLICAS=1 CKPTD_PERSIST_EVERY=" in text
        text = asked(capsys, *self.WORDS, "2:1h")
        assert "With 2 replicas, a state loses all of its copies with a probability of 0%" in text
        assert re.search(r"; the best with 1 replica \(.*\) loses \d+\.\d\d points\.", text)
        assert re.search(r"    CKPTD_REPLICAS=2\n?$", text)

    def test_json_has_the_number_of_every_choice(self, capsys: pytest.CaptureFixture[str]) -> None:
        answer = json.loads(asked(capsys, *self.WORDS, "2:7d", "--lost-nodes", "3:30d", "--json"))
        best, *others = answer["policies"]
        assert answer["settings"]["replicas"] == best["choice"]["replicas"]
        assert {each["choice"]["replicas"] for each in answer["policies"]} == {1, 2, 3}
        for each in answer["policies"]:
            assert (each["storage"] is None) == (each["choice"]["replicas"] == 3)
            assert abs(each["played_ettr"] - each["ettr"]) < 0.02
        assert any("2 replicas" in each["name"] for each in others)

    def test_a_number_that_is_given_is_taken(self, capsys: pytest.CaptureFixture[str]) -> None:
        answer = json.loads(asked(capsys, *self.WORDS, "2:365d", "--replicas", "2", "--json"))
        assert {each["choice"]["replicas"] for each in answer["policies"]} == {2}

    def test_losses_that_are_survived_come_beside_recorded_failures(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        path = tmp_path / "failures"
        path.write_text("4000\n8000\n400000\n")
        words = ["--iteration", "2s", "--failures", str(path), "--replicas", "2", "--json"]
        alone = json.loads(asked(capsys, *words))["policies"][0]["played_ettr"]
        more = ["--storage", "200MB", "--nodes", "16", "--lost-nodes", "2:10m"]
        assert json.loads(asked(capsys, *words, *more))["policies"][0]["played_ettr"] < alone - 0.01

    def test_a_picture_has_the_best_number_at_each_mtbf(self) -> None:
        losses = NodeLosses(16, ((2, 3600.0),), 2e8)
        [sliding] = [
            each
            for each in ettr_curves(RANK, Conditions(2.0, 600.0, 20e9, 12e9), [600.0], losses=losses)
            if each.name == "sliding"
        ]
        assert sliding.points[0] is not None
        assert sliding.points[0].choice.replicas == 2


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

    def test_times_may_be_hours(self, capsys: pytest.CaptureFixture[str]) -> None:
        """As seconds, that record is of a failure each 0.8 s, of which no job would be left."""
        path = Path(__file__).parents[3] / "bench/spot/data/aws-p2-xlarge-2020-11-20_23.csv"
        words = ["--model", "qwen3-30b-a3b", "--gpus", "16", "--expert-ranks", "8", "--iteration", "1s"]
        words += ["--failures", str(path), "--failures-unit", "h", "--json"]
        assert main(["advise", *words]) == 0
        answer = json.loads(capsys.readouterr().out)
        assert answer["mtbf_s"] == pytest.approx(88.665 * 3600 / 112)
        for policy in answer["policies"]:
            assert policy["played_ettr"] == pytest.approx(policy["ettr"], abs=0.01)
            assert policy["played_lost_share"] == pytest.approx(policy["lost_share"], rel=0.1)
            assert (policy["lost_share"] > 0) == policy["name"].startswith("loses updates")

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
        for text, message in (("soon", "line 1, 'soon', is no time, or time and"), (None, "No such file")):
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
        assert [curve_label(curve, 0) for curve in curves] == [
            f"{curve.name}: nothing fits" for curve in curves
        ]

    def test_labels_name_the_choice_at_the_given_mtbf(self) -> None:
        curves = ettr_curves(RANK, Conditions(1.0, 600.0, 20e9, 12e9), [60.0, 600.0])
        labels = [curve_label(curve, 1) for curve in curves]
        assert labels[0].endswith("  sliding, W=3")
        assert labels[-1].endswith(" (loses updates)")
        assert any(re.fullmatch(r"0\.\d{3}  dense, every 15: CheckFreq's interval", each) for each in labels)
        assert {curve.name for curve in curves} == set(STYLES)
        assert re.search(r"  selected, W=\d+ \(loses updates\)$", labels[-1])

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
        (["--iteration", "1s", "--tokens", "4M"], "pass either --iteration, or --tokens and --tflops"),
        (["--iteration", "1s", "--tflops", "400"], "pass either --iteration, or --tokens and --tflops"),
        (["--tokens", "4M", "--tflops", "0"], "--tflops is 0; it must be above 0"),
        (["--tokens", "4M", "--tflops", "nan"], "--tflops is nan; it must be above 0"),
        (["--tokens", "0", "--tflops", "1"], "--tokens is 0; it must be above 0"),
        (["--iteration", "0s"], "--iteration is 0; it must be above 0"),
        (["--iteration", "1s", "--mtbf", "0s"], "--mtbf is 0; it must be above 0"),
        (["--iteration", "1s", "--gpus", "12"], "12 GPUs are no multiple of 1 stages x 8 ranks of experts"),
        (
            ["--iteration", "1s", "--gpus", "0"],
            "0 GPUs, 1 stages, 8 ranks of experts: each must be 1 or more",
        ),
        (["--iteration", "1s", "--storage", "1GB"], "--storage needs --loss-mtbf or --lost-nodes"),
        (["--iteration", "1s", "--lost-nodes", "2:7d"], "--lost-nodes needs --storage: the rate of storage"),
        (["--iteration", "1s", "--nodes", "2"], "--nodes is for --lost-nodes: nothing else depends on"),
        (
            ["--iteration", "1s", "--storage", "1GB", "--lost-nodes", "3:7d"],
            "a loss of 3 nodes at once, of 2 nodes of the job",
        ),
        (["--iteration", "1s", "--skew", "1"], "skew is 1; it must be below 1"),
        (["--iteration", "1s", "--loss-mtbf", "7d"], "--loss-mtbf needs --storage: the rate of storage was"),
        (
            ["--iteration", "1s", "--storage", "1GB", "--loss-mtbf", "0s"],
            "--loss-mtbf is 0; it must be above 0",
        ),
        (["--iteration", "1s", "--replicas", "0"], "--replicas is 0; it must be above 0"),
        (["--iteration", "1s", "--drag", "-1"], "drag is -1; it must be 0 or more"),
        (["--iteration", "1s", "--micro-batches", "8"], "--micro-batches needs the --stages of a pipeline"),
    ],
)
def test_what_cannot_be_is_refused(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in asked(capsys, *words, code=2)


def test_a_network_that_carries_no_partial_snapshots(capsys: pytest.CaptureFixture[str]) -> None:
    """What is no expert is more than it carries; how many experts there are in a snapshot does not matter."""
    told = asked(capsys, "--iteration", "1s", "--network", "50MB")
    assert "loses updates" not in told
    assert "Left out: no partial snapshots, which have " in told
    assert json.loads(asked(capsys, "--iteration", "1s", "--network", "50MB", "--json"))["lossy_rejected"]
    assert json.loads(asked(capsys, "--iteration", "1s", "--json"))["lossy_rejected"] == ""


def test_memory_that_is_too_small_for_anything(capsys: pytest.CaptureFixture[str]) -> None:
    error = asked(capsys, "--iteration", "1s", "--memory", "1GiB", code=1)
    assert re.search(r"nothing fits: .* need more than 1 GiB of memory \(the smallest: .* GiB\)", error)


@pytest.mark.parametrize(
    ("option", "text"),
    [
        ("--mtbf", "soon"),
        ("--tokens", "many"),
        ("--tokens", "inf"),
        ("--link", "fast"),
        ("--lost-nodes", "7d"),
        ("--lost-nodes", "2:often"),
        ("--picture-size", "large"),
    ],
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


def looks(
    monkeypatch: pytest.MonkeyPatch,
    *,
    policy: str = "sliding",
    snapshots: int = 40,
    window: int = 4,
    put_Bps: float = 0.0,
    durable: DurableRank | None = None,
    replicas: int = 0,
    **more: float,
) -> None:
    """Two looks of a stand-in for the daemon: of 40 iterations so many had a snapshot.

    Args:
        more: metrics of the rank.
    """

    def look(step: int, taken: int) -> advise_command._Look:
        metrics = {"dense_bytes": 7e9, "snapshot_bytes": 7e9 if window == 1 else 2.5e9}
        metrics |= {"window": window, "snapshots": taken, "steps": step, "stall_ms_sum": 0.0} | more
        session = SessionStatus("j", "r", 0, 1, 1, step, metrics, 1, 1, 1, 1.0, "pidfd")
        return advise_command._Look(session, policy, put_Bps, durable, replicas)

    both = iter([look(999_960, 50), look(1_000_000, 50 + snapshots)])
    monkeypatch.setattr(advise_command, "_look", lambda args, rank=None: next(both))


class TestRunningJob:
    def rated(self, capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
        assert main(["advise", "j", "r", "--watch", "0.4s", "--json", *words]) == 0
        answer: dict[str, Any] = json.loads(capsys.readouterr().out)
        assert answer["policies"][0]["name"] == "now"
        assert answer["iteration_s"] == pytest.approx(0.01)
        return answer

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
    def test_it_is_rated_as_it_is(
        self,
        snapshots: int,
        window: int,
        shown: dict[str, object],
        capsys: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        looks(monkeypatch, policy=str(shown["policy"]), snapshots=snapshots, window=window)
        answer = self.rated(capsys, "--mtbf", "1h")
        assert answer["policies"][0]["choice"] == {**shown, "parts": 0, "replicas": 1}
        assert answer["mtbf_s"] == 3600.0

    def test_selected_snapshots_are_rated_as_such(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """They are partial to the daemon; the trainer says that it selects. With a skew they lose less."""
        of_experts: dict[str, Any] = {"num_experts": 16.0, "selectable_experts": 16.0}
        looks(monkeypatch, policy="partial", snapshots=20, **of_experts)
        even = self.rated(capsys, "--mtbf", "1h")["policies"][0]
        looks(monkeypatch, policy="partial", snapshots=20, **of_experts)
        skewed = self.rated(capsys, "--mtbf", "1h", "--skew", "0.3")["policies"][0]
        for now in (even, skewed):
            assert now["choice"] == {"policy": "selected", "window": 4, "every": 2, "parts": 0, "replicas": 1}
        assert skewed["lost_share"] < even["lost_share"]
        looks(monkeypatch, policy="partial", snapshots=20, num_experts=16.0)
        turns = self.rated(capsys, "--mtbf", "1h", "--skew", "0.3")["policies"][0]
        assert turns["choice"]["policy"] == "partial"
        assert turns["lost_share"] == pytest.approx(even["lost_share"])
        assert turns["memory_bytes"] < even["memory_bytes"], "rings of two windows"

    @pytest.mark.parametrize(("snapshots", "every"), [(1, 40), (10, 4)])
    def test_it_is_warned_if_its_settings_are_far_from_the_best(
        self,
        snapshots: int,
        every: int,
        capsys: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """With a failure every 3 s, forty iterations of 10 ms between snapshots are too many."""
        words = ["--mtbf", "3s", "--restart", "0.1s", "--link", "100TB", "--network", "100TB"]
        looks(monkeypatch, snapshots=snapshots, window=1)
        answer = self.rated(capsys, *words)
        now, best = (each for each in answer["policies"] if each["name"] in ("now", "best"))
        assert now["choice"]["every"] == every
        points = 100 * (best["ettr"] - now["ettr"])
        looks(monkeypatch, snapshots=snapshots, window=1)
        assert main(["advise", "j", "r", "--watch", "0.4s", *words]) == 0
        told = capsys.readouterr().out
        if every == 4:
            assert points < 1
            assert "The job's settings" not in told
        else:
            assert points > 1
            assert f"The job's settings (dense, every 40) lose {points:.1f} points of its time." in told

    def test_failures_are_those_that_were_seen(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Three starts after the first one, in a million iterations of 10 ms."""
        epoch = 0
        for _ in range(4):
            epoch = epoch_after(epoch, 17)
        looks(monkeypatch, epoch=epoch)
        assert self.rated(capsys)["mtbf_s"] == pytest.approx(1e4 / 3)
        looks(monkeypatch, epoch=epoch_after(-1, 17))
        assert main(["advise", "j", "r", "--watch", "0.4s"]) == 2
        assert "no failure of j/r was seen within 1000000 iterations: pass --mtbf" in capsys.readouterr().err

    def test_a_snapshot_costs_what_was_measured(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """2 ms of stall in each of a million iterations of 10 ms; there is a snapshot in every second one."""
        looks(monkeypatch, policy="partial", snapshots=20, stall_ms_sum=2e6, capture_gb_per_s=1e6)
        assert main(["advise", "j", "r", "--watch", "0.4s", "--json", "--mtbf", "1h"]) == 0
        answer = json.loads(capsys.readouterr().out)
        assert answer["iteration_s"] == pytest.approx(0.008)
        now = answer["policies"][0]
        assert now["choice"]["every"] == 2
        assert now["stall_s"] == pytest.approx(0.002)
        best = next(each for each in answer["policies"] if each["name"] == "best")
        assert best["stall_s"] == pytest.approx(0.004 / best["choice"]["every"])

    def test_it_has_as_many_replicas_as_were_seen(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for words, others in (((), 2), (("--replicas", "3"), 3)):
            looks(monkeypatch, replicas=2)
            answer = self.rated(capsys, "--mtbf", "1h", *words)
            assert answer["policies"][0]["choice"]["replicas"] == 2
            assert {each["choice"]["replicas"] for each in answer["policies"][1:]} == {others}
            assert answer["settings"]["replicas"] == others

    def test_losses_of_nodes_need_their_number(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        words = ["--mtbf", "1h", "--lost-nodes", "2:1d", "--storage", "1GB"]
        looks(monkeypatch, replicas=1)
        assert main(["advise", "j", "r", "--watch", "0.4s", *words]) == 2
        assert "--lost-nodes needs the --nodes of the job" in capsys.readouterr().err
        looks(monkeypatch, replicas=1)
        answer = self.rated(capsys, *words, "--nodes", "4")
        now = answer["policies"][0]
        assert now["choice"]["replicas"] == 1
        # Four of the six pairs of four nodes take a state.
        assert now["ettr"] == pytest.approx(
            1
            / (1 + now["stall_s"] / 0.01)
            / (1 + now["recovery_s"] * (1 / 3600 + 1 / 3 / 86400) + now["loss_s"] * 2 / 3 / 86400),
            rel=1e-3,
        )

    def test_peers_are_as_fast_as_they_were_seen(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for words, rate in (((), 5e11), (("--network", "1TB"), 1e12)):
            looks(monkeypatch, put_Bps=5e11)
            answer = self.rated(capsys, "--mtbf", "1h", *words)
            now = answer["policies"][0]
            # The rate to the host is not known, and taken to be 20 GB/s.
            assert now["lag_s"] == pytest.approx(now["snapshot_bytes"] * (1 / rate + 1 / 20e9))

    def test_storage_is_as_fast_as_the_last_upload(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A partial job that stores 2 of 8 experts, which is a part of its four, every 4,096 iterations."""
        durable = DurableRank("j", "r", 0, 4096, 3, -1, 0, 0, 4096, 0, 0, 10**9, 20.0, "")
        looks(monkeypatch, policy="partial", durable=durable, num_experts=8, persist_experts=2)
        now = self.rated(capsys, "--mtbf", "1h", "--loss-mtbf", "7d")["policies"][0]
        shown = {"policy": "partial", "window": 4, "every": 1, "parts": 1, "replicas": 1}
        assert now["choice"] == shown
        assert now["storage"]["upload_s"] == pytest.approx(20.0)
        assert now["storage"]["every"] == 4096
        looks(monkeypatch, policy="partial", durable=durable, num_experts=8, persist_experts=2)
        now = self.rated(capsys, "--mtbf", "1h", "--loss-mtbf", "7d", "--storage", "1GB")["policies"][0]
        assert now["storage"]["upload_s"] == pytest.approx(now["storage"]["upload_bytes"] / 1e9)
        looks(monkeypatch, policy="partial")
        assert main(["advise", "j", "r", "--watch", "0.4s", "--mtbf", "1h", "--loss-mtbf", "7d"]) == 2
        assert "--loss-mtbf needs --storage: the rate of storage was not measured" in capsys.readouterr().err
