"""`ckptctl export` and `ckptctl import` as they are typed."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ckptd.ctl.main import main
from ckptd.storage.stores.open_store import open_store
from tests.ckptd.export.samples import (
    Tensors,
    entries,
    segment_folder,
    snapshot,
    stored_window,
)
from tests.ckptd.export.shared import Op, client_payload, rank_tensors

WEIGHTS = torch.arange(12.0).reshape(3, 4)


@pytest.fixture
def folder() -> Iterator[Path]:
    with segment_folder() as path:
        snapshot(path, 3, entries(w=WEIGHTS))
        yield path


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A store with one checkpoint, whose snapshot at 3 is WEIGHTS and at 4 one more."""
    path = tmp_path / "store"
    opened = open_store(f"file://{path}")
    stored_window(opened, {3: (entries(w=WEIGHTS), 0b01), 4: (entries(w=WEIGHTS + 1), 0b10)})
    opened.close()
    return path


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_folder_for_hugging_face_out_of_memory(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text("{}")
    command = [
        "export",
        "--segment-dir",
        str(folder),
        "--format",
        "hf",
        "--to",
        str(tmp_path / "m"),
    ]
    assert main([*command, "--config", str(tmp_path / "config.json"), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["iteration"], report["place"], report["notes"]) == (3, "memory", [])
    assert sorted(os.listdir(tmp_path / "m")) == ["config.json", "model.safetensors"]
    assert main(command) == 4
    assert "pass --force" in capsys.readouterr().err
    assert main([*command, "--force"]) == 0
    out = capsys.readouterr().out
    assert "1 tensors, 240 B, iteration 3 of job/run rank 0\nthe folder has no config.json" in out


def test_out_of_a_store_by_its_url_or_as_configured(
    store: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    which = ["--job", "job", "--run", "run", "--to", str(tmp_path / "m"), "--json", "--force"]
    assert main(["export", "--store", str(store), "--iteration", "3", *which]) == 0
    assert json.loads(capsys.readouterr().out)["place"] == f"file://{store}"
    assert torch.equal(load_file(tmp_path / "m")["w"], WEIGHTS)
    monkeypatch.setenv("CKPTD_STORE", f"file://{store}")
    assert main(["export", "--durable", *which]) == 0
    assert torch.equal(load_file(tmp_path / "m")["w"], WEIGHTS + 1)
    capsys.readouterr()
    assert main(["export", "--durable", "--iteration", "9", *which]) == 4
    assert "committed checkpoints: 4" in json.loads(capsys.readouterr().out)["error"]
    assert main(["export", "--durable", "--to", str(tmp_path / "n")]) == 2
    assert "pass --job and --run" in capsys.readouterr().err


def test_a_damaged_object_ends_with_its_status(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    victim = max(store.rglob("*.safetensors"))
    data = bytearray(victim.read_bytes())
    data[-1] ^= 1
    victim.write_bytes(data)
    target = tmp_path / "m"
    which = ["--job", "job", "--run", "run", "--to", str(target)]
    assert main(["export", "--store", str(store), *which]) == 5
    assert "is damaged: 'w'" in capsys.readouterr().err
    assert sorted(os.listdir(tmp_path)) == ["store"]


def test_a_bar_is_for_terminals_and_not_with_json(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["export", "--segment-dir", str(folder), "--force", "--to", str(tmp_path / "m")]
    shown = []
    for more in ([], ["--json"]):
        terminal = Terminal()
        monkeypatch.setattr("sys.stderr", terminal)
        assert main(command + more) == 0
        shown.append(terminal.getvalue())
    assert "exporting [########################] 100 %, 48 B of 48 B" in shown[0]
    assert shown[1] == ""


@pytest.mark.parametrize(
    ("flags", "status", "reason"),
    [
        (["--config", "c"], 4, "--config needs --format hf"),
        (["--older-experts"], 4, "--older-experts is for partial snapshots, and this one is not"),
        (["--older-experts", "--format", "dcp"], 4, "--older-experts needs --format safetensors or hf"),
        (["--format", "hf", "--config", "/nowhere"], 4, "cannot read /nowhere"),
        (["--iteration", "7"], 4, "no sealed snapshot of iteration 7"),
        (["--job", "jobs"], 4, "no segment in memory is of this job, run and rank; there are: job/run"),
        (["--store", "/nowhere", "--job", "j"], 2, "pass --job and --run"),
        (
            ["--store", "/nowhere", "--job", "j", "--run", "r"],
            2,
            "the folder /nowhere does not exist",
        ),
    ],
)
def test_what_cannot_be_done_is_said(
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    flags: list[str],
    status: int,
    reason: str,
) -> None:
    target = tmp_path / "m"
    command = ["export", "--segment-dir", str(folder), "--to", str(target), *flags]
    assert main(command) == status
    assert reason in capsys.readouterr().err
    assert not target.exists()


@pytest.mark.parametrize("size", ["0", "much", "-1GB"])
def test_a_size_that_is_none_is_wrong_usage(size: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["export", "--to", "m", "--format", "hf", f"--max-shard-size={size}"])
    assert ended.value.code == 2
    assert "--max-shard-size" in capsys.readouterr().err


SHARED = [Op("a", None, 0), Op("b", None, 1)]


def shared(rank: int) -> Tensors:
    """Of two ranks that have the same parameters each captures one."""
    return rank_tensors(rank, SHARED, {"a": WEIGHTS, "b": WEIGHTS + 1})


def test_ranks_that_captured_a_share_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = client_payload(SHARED)
    target = tmp_path / "m"
    command = ["export", "--rank", "0", "--force", "--to", str(target)]
    with segment_folder() as folder:
        here = [*command, "--segment-dir", str(folder)]
        snapshot(folder, 3, shared(0), 0, client=told)
        assert main(here) == 4
        assert "rank 1 captured b for all ranks" in capsys.readouterr().err
        assert not target.exists()
        snapshot(folder, 3, shared(1), 1, client=told)
        assert main(here) == 0
        assert "rank 0, with what rank 1 captured for it" in capsys.readouterr().out
        assert main([*here, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["joined_ranks"] == [1]
    assert torch.equal(load_file(target)["b"], WEIGHTS + 1)


def test_a_store_of_shared_images_is_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing that looks at what is durable takes one rank's image for all of its model."""
    store = open_store(f"file://{tmp_path}/store")
    for rank in range(2):
        window = {3: (shared(rank), 0b01), 4: (shared(rank), 0b10)}
        stored_window(store, window, rank=rank, world_size=2, client=client_payload(SHARED))
    store.close()
    place = ["--store", f"file://{tmp_path}/store"]
    for command in (
        ["verify", place[1]],
        ["checkpoints", "verify", "job", "run", *place],
        ["checkpoints", "show", "job", "run", "4", *place],
    ):
        assert main([*command, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)
    command = ["export", *place, "--job", "job", "--run", "run", "--rank", "1"]
    assert main([*command, "--to", str(tmp_path / "m"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["joined_ranks"] == [0]
    assert torch.equal(load_file(tmp_path / "m")["a"], WEIGHTS)
    assert torch.equal(load_file(tmp_path / "m")["b"], WEIGHTS + 1)


def test_an_import_to_a_store_tells_what_to_start_from(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_file({"w": WEIGHTS}, tmp_path / "model.safetensors")
    command = ["import", "--from", str(tmp_path), "--store", str(store), "job", "next"]
    assert main([*command, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["start_from"] == f"file://{store}/job/next/import"
    assert sorted(os.listdir(store / "job/next/import")) == ["import.json", "model.safetensors"]
    assert main(command) == 4
    assert "holds an import already" in capsys.readouterr().err
    assert main([*command, "--force"]) == 0
    assert (
        f"Checkpointer(…, recovery=RecoveryOptions(start_from='file://{store}/job/next/import'))"
        in capsys.readouterr().out
    )


@pytest.mark.usefixtures("no_configuration")
def test_an_import_needs_a_place(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_file({"w": WEIGHTS}, tmp_path / "model.safetensors")
    command = ["import", "--from", str(tmp_path)]
    assert main(command) == 4
    assert "name the JOB and the RUN" in capsys.readouterr().err
    assert main([*command, "job", "run"]) == 2
    assert "no store is configured here, and this command changes a store" in capsys.readouterr().err
    assert main([*command, "--to", str(tmp_path / "set")]) == 0
    assert (
        f"1 tensors, 48 B: Checkpointer(…, recovery=RecoveryOptions(start_from='{tmp_path}/set'))"
        in capsys.readouterr().out
    )
