"""Files that one other user may open: as the kernel decides, for real users."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptd.config.runtime_dir import UnusableFolder
from ckptd.core.users import UserQuotas
from ckptd.memory import user_files
from ckptd.memory.segment_store import Purpose, SegmentStore
from ckptd.memory.user_files import close_files, open_to_user, readers_of
from tests.ckptd.running import descriptor
from tests.users import GROUP, STRANGER, TRAINER, needs_users

MIB = 1 << 20


@pytest.fixture
def folder() -> Iterator[Path]:
    """On the tmpfs of segments; others may enter it."""
    path = Path(f"/dev/shm/ckptd-test-{secrets.token_hex(6)}")
    path.mkdir()
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


def may(user: int, path: Path) -> str:
    """Which of read and write the kernel lets a user do, who is also in the group of trainers."""
    readable, writable = os.pipe()
    child = os.fork()
    if child == 0:
        os.setgroups([GROUP])
        os.setgid(user)
        os.setuid(user)
        for flags, word in ((os.O_RDONLY, b"r"), (os.O_RDWR, b"w")):
            try:
                os.open(path, flags)
                os.write(writable, word)
            except PermissionError:
                pass
        try:
            os.chmod(path, 0o666)
            os.write(writable, b"!")
        except PermissionError:
            pass
        os._exit(0)
    os.waitpid(child, 0)
    os.close(writable)
    with open(readable, "rb") as told:
        return told.read().decode()


def file_in(folder: Path, mode: int = 0o600) -> int:
    fd = os.open(folder / "f", os.O_RDWR | os.O_CREAT, mode)
    os.fchmod(fd, mode)
    os.fchown(fd, -1, GROUP)
    return fd


@needs_users
@pytest.mark.parametrize(("write", "rights"), [(True, "rw"), (False, "r")])
def test_one_user_may_open_it_and_no_other_even_of_its_group(folder: Path, write: bool, rights: str) -> None:
    fd = file_in(folder, 0o660)
    assert may(STRANGER, folder / "f") == "rw"
    open_to_user(fd, TRAINER, write=write)
    assert may(TRAINER, folder / "f") == rights
    assert may(STRANGER, folder / "f") == ""
    open_to_user(fd, STRANGER)
    assert may(TRAINER, folder / "f") == ""
    open_to_user(fd, None)
    assert may(STRANGER, folder / "f") == ""
    assert readers_of(fd) == {}
    os.close(fd)


def test_our_own_user_needs_no_list(folder: Path) -> None:
    fd = file_in(folder)
    open_to_user(fd, os.geteuid(), write=True)
    assert readers_of(fd) == {}
    assert os.fstat(fd).st_mode & 0o777 == 0o600
    os.close(fd)


@needs_users
def test_files_of_an_earlier_daemon_are_closed_but_for_those_with_a_list(folder: Path) -> None:
    for name in ("legacy", "owned"):
        (folder / name).touch()
        os.chown(folder / name, -1, GROUP)
        (folder / name).chmod(0o660)
    (folder / "elsewhere").symlink_to("/etc/passwd")
    with (folder / "owned").open("rb") as file:
        open_to_user(file.fileno(), TRAINER, write=True)
    close_files(folder)
    assert may(STRANGER, folder / "legacy") == may(TRAINER, folder / "legacy") == ""
    assert may(TRAINER, folder / "owned") == "rw"
    assert Path("/etc/passwd").stat().st_mode & 0o777 == 0o644
    assert sorted(path.name for path in folder.iterdir()) == ["elsewhere", "legacy", "owned"]


def test_a_filesystem_without_lists_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: object, **__: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(user_files, "open_to_user", refuses)
    with pytest.raises(UnusableFolder, match=r"access control lists.*Operation not supported.*tmpfs"):
        close_files(folder)


def store_in(folder: Path) -> SegmentStore:
    return SegmentStore(folder, 64 * MIB, "n", mlock="off", hugepages="off", users=UserQuotas())


@pytest.mark.parametrize(
    ("job", "purpose", "readers"),
    [
        (f"u{TRAINER}.job", Purpose.RANK, {TRAINER: 6}),
        (f"u{TRAINER}.job", Purpose.REPLICA, {TRAINER: 4}),
        (f"u{TRAINER}.job", Purpose.COPY, {TRAINER: 6}),
        (f"u{TRAINER}.job", Purpose.DRILL, {}),
        ("job", Purpose.RANK, {}),
    ],
)
def test_a_segment_is_open_to_the_owner_of_its_job(
    folder: Path, job: str, purpose: Purpose, readers: dict[int, int]
) -> None:
    store = store_in(folder)
    fd = file_in(folder, 0o660)
    store.share(fd, purpose, job)
    assert readers_of(fd) == readers
    assert os.fstat(fd).st_mode & 0o007 == 0
    os.close(fd)


def test_a_segment_of_an_earlier_daemon_is_opened_to_the_owner_of_its_job(folder: Path) -> None:
    """That daemon did not keep users apart."""
    earlier = SegmentStore(folder, 64 * MIB, "n", mlock="off", hugepages="off", group=os.getgid())
    for job in (f"u{TRAINER}.job", "job"):
        segment = earlier.create(descriptor(job), 2, MIB)
        assert segment.path.stat().st_mode & 0o777 == 0o660
        segment.close()
    store = store_in(folder)
    of_user, of_nobody = sorted(store.adopt(0.0).segments, key=lambda s: s.key.job, reverse=True)
    assert readers_of(of_user.fd) == {TRAINER: 6}
    assert readers_of(of_nobody.fd) == {}
    assert of_nobody.path.stat().st_mode & 0o777 == 0o600
    for segment in (of_user, of_nobody):
        segment.close()


@needs_users
@pytest.mark.parametrize(("purpose", "rights"), [(Purpose.RANK, "rw"), (Purpose.REPLICA, "r")])
def test_segments_are_open_to_the_group_again_if_users_are_not_kept_apart_any_more(
    folder: Path, purpose: Purpose, rights: str
) -> None:
    apart = store_in(folder)
    made = [apart.create(descriptor(job), 2, MIB) for job in (f"u{TRAINER}.job", "job")]
    together = SegmentStore(folder, 64 * MIB, "n", mlock="off", hugepages="off", group=GROUP)
    for segment in made:
        assert may(STRANGER, segment.path) == ""
        together.enter_found(segment, purpose)
        assert readers_of(segment.fd) == {}
        assert may(STRANGER, segment.path) == may(TRAINER, segment.path) == rights
        segment.close()


@needs_users
def test_segments_are_closed_again_if_there_is_no_group_of_trainers_any_more(folder: Path) -> None:
    """The group of an earlier daemon, or its users, could read and write them for as long as they lived."""
    shared = SegmentStore(folder, 64 * MIB, "n", mlock="off", hugepages="off", group=GROUP)
    made = [
        shared.create(descriptor("job"), 2, MIB),
        store_in(folder).create(descriptor(f"u{TRAINER}.job"), 2, MIB),
    ]
    own = SegmentStore(folder, 64 * MIB, "n", mlock="off", hugepages="off")
    for segment in made:
        assert may(TRAINER, segment.path) == "rw"
        own.enter_found(segment, Purpose.RANK)
        assert readers_of(segment.fd) == {}
        assert may(TRAINER, segment.path) == ""
        segment.close()
