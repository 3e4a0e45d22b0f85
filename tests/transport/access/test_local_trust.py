"""Whose is a socket, a folder on the way to it, a file: what is refused, and in which words."""

from __future__ import annotations

import os
import socket
import stat
import struct
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ckptd.transport import messages as m
from ckptd.transport.access.local_trust import (
    LocalFileError,
    check_way,
    find_listener,
    open_file,
    own_users,
)
from ckptd.transport.wire import ControlClient, WireError
from tests.users import STRANGER, needs_users, spawn_as

US = own_users()


@pytest.fixture
def folder() -> Iterator[Path]:
    """A private folder directly in the sticky /tmp, where a daemon's default folder is."""
    with tempfile.TemporaryDirectory(prefix="ckptd-way-", dir="/tmp") as path:
        yield Path(path)


@contextmanager
def listening(path: Path, mode: int = 0o600) -> Iterator[str]:
    """Somebody of this user listens there; the endpoint."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(path))
        path.chmod(mode)
        listener.listen()
        yield f"ipc://{path}"


def test_our_own_listener_is_found(folder: Path) -> None:
    with listening(folder / "s") as endpoint:
        assert find_listener(endpoint, US)


@pytest.mark.parametrize("name", ["nothing", "no/folder/either"])
def test_nobody_there_is_no_error(folder: Path, name: str) -> None:
    assert not find_listener(f"ipc://{folder}/{name}", US)


def test_a_socket_that_a_killed_daemon_left_is_nobody(folder: Path) -> None:
    with listening(folder / "s") as endpoint:
        pass
    assert not find_listener(endpoint, US)


@pytest.mark.parametrize(
    "endpoint", ["ipc://@ckptd", "ipc://relative/s", "tcp://127.0.0.1:7077", "inproc://x", ""]
)
def test_an_endpoint_whose_owner_cannot_be_asked_is_refused(endpoint: str) -> None:
    """Whoever binds an abstract name or a port first is the daemon: no folder protects it."""
    with pytest.raises(ValueError, match="absolute path"):
        find_listener(endpoint, US)
    with pytest.raises(WireError, match="absolute path"):
        ControlClient(endpoint)


def test_a_socket_that_is_open_to_everybody_is_refused(folder: Path) -> None:
    with (
        listening(folder / "s", 0o777) as endpoint,
        pytest.raises(LocalFileError, match=r"mode 0777.*run `chmod o= .*/s`"),
    ):
        find_listener(endpoint, US)


def test_a_file_in_the_place_of_the_socket_is_refused(folder: Path) -> None:
    (folder / "s").touch()
    with pytest.raises(LocalFileError, match="not a socket"):
        find_listener(f"ipc://{folder}/s", US)


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o722])
def test_a_folder_that_others_may_write_to_is_refused_with_its_mode(folder: Path, mode: int) -> None:
    """Who may write there can put a socket of his own in the place of ours at any moment, whoever
    owns the one there now.
    """
    inner = folder / "run"
    inner.mkdir()
    with listening(inner / "s") as endpoint:
        inner.chmod(mode)
        with pytest.raises(LocalFileError, match=rf"run may be.*mode 0{mode:o}.*chmod go-w .*run"):
            find_listener(endpoint, US)


def test_so_is_one_further_up(folder: Path) -> None:
    inner = folder / "open" / "run"
    inner.mkdir(parents=True)
    with listening(inner / "s") as endpoint:
        inner.parent.chmod(0o777)
        with pytest.raises(LocalFileError, match="open may be written to by others"):
            find_listener(endpoint, US)
        inner.parent.chmod(0o1777)  # sticky: others cannot rename what is ours
        assert find_listener(endpoint, US)


def test_links_are_followed_and_the_way_behind_them_is_walked(folder: Path) -> None:
    inner = folder / "a" / "run"
    inner.mkdir(parents=True)
    (folder / "link").symlink_to("a/../a/run")
    with listening(inner / "s"):
        assert find_listener(f"ipc://{folder}/link/s", US)
        inner.parent.chmod(0o777)
        with pytest.raises(LocalFileError, match="a may be written to by others"):
            find_listener(f"ipc://{folder}/link/s", US)
    (folder / "loop").symlink_to("loop")
    with pytest.raises(OSError, match="symbolic links"):
        check_way(f"{folder}/loop/s", US)


@needs_users
def test_a_folder_of_another_user_is_refused_with_owner_and_what_to_do(folder: Path) -> None:
    """/tmp/ckptd-<uid> is known to everybody: another user made it first, and listens in it."""
    inner = folder / "run"
    inner.mkdir(mode=0o755)
    with listening(inner / "s") as endpoint:
        os.chown(inner, STRANGER, STRANGER)
        with pytest.raises(
            LocalFileError,
            match=rf"run belongs to somebody else \(owner {STRANGER}, mode 0755\); expected user .*"
            "root .*CKPTD_DAEMON_USER",
        ):
            find_listener(endpoint, US)
        assert find_listener(endpoint, US | {STRANGER})


@needs_users
def test_a_link_of_another_user_is_not_followed(folder: Path) -> None:
    """In a sticky folder nobody can rename what is ours; a link of a stranger there is his to turn."""
    folder.chmod(0o1777)
    (folder / "run").mkdir(mode=0o700)
    (folder / "link").symlink_to("run")
    os.lchown(folder / "link", STRANGER, STRANGER)
    with (
        listening(folder / "run" / "s"),
        pytest.raises(LocalFileError, match="link belongs to somebody else"),
    ):
        find_listener(f"ipc://{folder}/link/s", US)


@needs_users
def test_a_socket_of_another_user_in_a_sticky_folder_is_refused(folder: Path) -> None:
    folder.chmod(0o1777)
    with listening(folder / "s") as endpoint:
        os.chown(folder / "s", STRANGER, STRANGER)
        with pytest.raises(LocalFileError, match="s belongs to somebody else"):
            find_listener(endpoint, US)


@needs_users
def test_the_user_of_the_process_that_listens_is_asked_of_the_kernel(folder: Path) -> None:
    """Folder and socket are root's; the process behind the socket was handed it, and is another user's."""
    script = """
listener = socket.socket(socket.AF_UNIX, fileno=int(sys.argv[3]))
listener.listen()
print("listens", flush=True)
sys.stdin.read()
"""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(f"{folder}/s")
        os.chmod(folder / "s", 0o600)
        os.set_inheritable(listener.fileno(), True)
        number = str(listener.fileno())
        process = spawn_as(STRANGER, script, number, imports="import socket", keep=listener)
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "listens\n"
            with pytest.raises(LocalFileError, match=rf"runs as user {STRANGER}, expected"):
                find_listener(f"ipc://{folder}/s", US)
        finally:
            process.kill()
            process.communicate()


@needs_users
def test_a_daemon_that_may_not_be_asked_says_who_may(folder: Path) -> None:
    script = """
try:
    local_trust.find_listener(sys.argv[3], {0, os.geteuid()})
except local_trust.LocalFileError as error:
    print(error)
"""
    imports = "from ckptd.transport.access import local_trust"
    folder.chmod(0o755)
    with listening(folder / "s") as endpoint:
        process = spawn_as(STRANGER, script, endpoint, imports=imports)
        said, _ = process.communicate(timeout=60)
    assert f"user {STRANGER} may not connect" in said
    assert "trainer_group" in said


@needs_users
def test_nothing_is_said_to_a_stranger(folder: Path) -> None:
    """He listens on the predictable path; before, he heard Hello and Attach, and whatever came after."""
    folder.chmod(0o1777)
    script = """
os.umask(0)
os.mkdir(sys.argv[3])
router = zmq.Context().socket(zmq.ROUTER)
router.bind(f"ipc://{sys.argv[3]}/ckptd.sock")
print("listens", flush=True)
print("heard" if router.poll(int(sys.argv[4])) else "heard nothing", flush=True)
"""
    process = spawn_as(STRANGER, script, f"{folder}/run", "1500", imports="import zmq")
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "listens\n"
        with pytest.raises(WireError, match=f"owner {STRANGER}, mode 0777") as caught:
            ControlClient(f"ipc://{folder}/run/ckptd.sock").request(m.Ping(), timeout_s=1)
        assert caught.value.code == "untrusted"
        assert process.stdout.readline() == "heard nothing\n"
    finally:
        process.kill()
        process.communicate()


def test_a_file_is_opened_if_it_is_ours_and_regular(folder: Path) -> None:
    path = folder / "segment"
    path.write_bytes(b"x")
    path.chmod(0o660)
    fd = open_file(path, os.O_RDWR, US)
    assert stat.S_ISREG(os.fstat(fd).st_mode)
    os.close(fd)
    path.chmod(0o606)
    with pytest.raises(LocalFileError, match=r"segment may be written.*0606.*chmod o= "):
        open_file(path, os.O_RDWR, US)
    (folder / "link").symlink_to(path)
    with pytest.raises(OSError, match="symbolic links"):
        open_file(folder / "link", os.O_RDWR, US)
    os.mkfifo(folder / "pipe", 0o600)
    with pytest.raises(LocalFileError, match="not a regular file"):
        open_file(folder / "pipe", os.O_RDONLY, US)


@needs_users
def test_a_file_of_another_user_is_not_opened(folder: Path) -> None:
    path = folder / "segment"
    path.write_bytes(struct.pack("Q", 0))
    os.chown(path, STRANGER, STRANGER)
    with pytest.raises(LocalFileError, match=rf"owner {STRANGER}.*expected user"):
        open_file(path, os.O_RDONLY, US)
    os.close(open_file(path, os.O_RDONLY, US | {STRANGER}))
