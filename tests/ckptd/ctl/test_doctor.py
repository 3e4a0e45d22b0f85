"""Each check of the doctor, in sickness and in health."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from ckptd.config import load_config
from ckptd.ctl import doctor
from ckptd.ctl.doctor import Grade
from ckptd.transport import sealing
from tests.ckptd.running import running_daemon, small_tmpfs


def test_a_daemon_that_answers_is_well_and_the_report_is_complete() -> None:
    with running_daemon() as daemon:
        done = daemon.ctl("doctor", "--json")
        findings = {finding["name"]: finding for finding in json.loads(done.stdout)}
        text = daemon.ctl("doctor").stdout
    assert findings["daemon"]["grade"] == "OK"
    assert set(findings) == {
        "daemon",
        "runtime folder",
        "segment folder",
        "segment memory",
        "damaged segments",
        "memlock",
        "huge pages",
        "pidfd",
        "ptrace",
        "clock",
        "copy speed",
        "peer encryption",
        "versions",
    }
    assert all(name in text for name in findings)
    assert "torch" in findings["versions"]["detail"]


def test_no_daemon_is_a_warning_with_the_fix(tmp_path: Path) -> None:
    finding = doctor.check_daemon(f"ipc://{tmp_path}/s")
    assert finding.grade is Grade.WARN
    assert "ckptd run" in finding.fix


def test_what_goes_to_peers_in_plaintext_is_said() -> None:
    alone = load_config(environ={}).config
    assert doctor.check_peer_data(alone).grade is Grade.OK
    usual = replace(alone, peer_listen="tcp://127.0.0.1:0")
    assert doctor.check_peer_data(usual).detail in ("AES-256-GCM", "ChaCha20-Poly1305")
    assert doctor.check_peer_data(replace(usual, peer_data="zmq")).detail == "CURVE"
    unencrypted = replace(usual, peer_data="stream-plaintext")
    assert doctor.check_peer_data(unencrypted).grade is Grade.WARN
    assert doctor.check_peer_data(replace(usual, peer_security="plain")).grade is Grade.WARN


def test_without_the_library_that_encrypts_peers_cannot_be_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sealing, "_has_library", lambda: False)
    usual = replace(load_config(environ={}).config, peer_listen="tcp://127.0.0.1:0")
    finding = doctor.check_peer_data(usual)
    assert finding.grade is Grade.FAIL
    assert "cryptography" in finding.fix


def test_folders(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    assert doctor.check_folder("f", tmp_path).grade is Grade.OK
    assert "will be made" in doctor.check_folder("f", tmp_path / "new").detail
    tmp_path.chmod(0o777)
    assert "chmod 700" in doctor.check_folder("f", tmp_path).fix
    tmp_path.chmod(0o700)
    file = tmp_path / "file"
    file.write_text("")
    assert doctor.check_folder("f", file).grade is Grade.FAIL
    assert doctor.check_folder("f", file / "below").grade is Grade.FAIL


def test_a_folder_of_another_user(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a folder away")
    os.chown(tmp_path, 12345, -1)
    finding = doctor.check_folder("f", tmp_path)
    assert finding.grade is Grade.FAIL
    assert "belongs to user 12345" in finding.detail


def test_a_small_shm_is_a_warning_and_one_below_the_quota_fails() -> None:
    with small_tmpfs("64m") as folder:
        flags = {"segment_dir": str(folder / "not-made-yet"), "memory": "32MiB"}
        small = doctor.check_segment_filesystem(load_config(flags, environ={}).config)
        assert small.grade is Grade.WARN
        assert "tmpfs of 64 MiB" in small.detail
        assert "--shm-size" in small.fix
        flags["memory"] = "1GiB"
        below = doctor.check_segment_filesystem(load_config(flags, environ={}).config)
        assert below.grade is Grade.FAIL


def test_a_disk_is_no_place_for_segments() -> None:
    flags = {"segment_dir": "/proc/self"}
    finding = doctor.check_segment_filesystem(load_config(flags, environ={}).config)
    assert finding.grade is Grade.FAIL


def test_files_put_aside_are_listed(tmp_path: Path) -> None:
    assert doctor.check_damaged_files(tmp_path / "none").grade is Grade.OK
    (tmp_path / "a~b~r0~g0.seg.bad").write_bytes(bytes(10))
    finding = doctor.check_damaged_files(tmp_path)
    assert finding.grade is Grade.WARN
    assert "a~b~r0~g0.seg.bad" in finding.detail


def test_huge_pages_are_optional(tmp_path: Path) -> None:
    setting = tmp_path / "shmem_enabled"
    setting.write_text("always within_size advise [never] deny force\n")
    assert "huge=advise" in doctor.check_hugepages(setting).fix
    setting.write_text("always within_size [advise] never deny force\n")
    assert doctor.check_hugepages(setting).fix == ""
    assert doctor.check_hugepages(tmp_path / "none").grade is Grade.OK


def test_the_copy_tunable_is_recognised() -> None:
    tunables = "glibc.cpu.x86_non_temporal_threshold=0x40000"
    assert doctor.check_copy_tunable({"GLIBC_TUNABLES": tunables}).fix == ""


def test_memlock_on_demands_more_than_auto() -> None:
    assert doctor.check_memlock("off").grade is Grade.OK
    assert doctor.check_memlock("on").grade in (Grade.OK, Grade.FAIL)


def test_what_cannot_fail_here_says_something() -> None:
    for check in (doctor.check_pidfd, doctor.check_clock, doctor.check_versions):
        assert check().detail
    assert doctor.check_ptrace(Path("/nonexistent")).grade is Grade.OK
