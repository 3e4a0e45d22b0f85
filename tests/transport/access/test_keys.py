"""Key files, whom they let in, and where it is safe to listen."""

from __future__ import annotations

import stat
import time
from itertools import chain
from pathlib import Path

import pytest
import zmq

from ckptd.transport.access.keys import (
    Keys,
    KeysError,
    Trust,
    check_security,
    trust,
    trusted,
    trusted_keys,
    untrust,
)


def public() -> str:
    return zmq.curve_keypair()[0].decode()


def test_a_pair_comes_back_and_only_its_owner_may_read_it(tmp_path: Path) -> None:
    made = Keys.create(tmp_path / "keys")
    found = Keys.load(tmp_path / "keys")
    assert (found.public, found.secret) == (made.public, made.secret)
    assert stat.S_IMODE((tmp_path / "keys").stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "keys" / "node.key_secret").stat().st_mode) == 0o600
    assert made.secret not in repr(made)


def test_a_pair_is_never_overwritten(tmp_path: Path) -> None:
    made = Keys.create(tmp_path)
    with pytest.raises(KeysError, match="not overwritten"):
        Keys.create(tmp_path)
    assert Keys.load(tmp_path).public == made.public


def test_a_secret_that_others_may_read_is_not_used(tmp_path: Path) -> None:
    Keys.create(tmp_path)
    (tmp_path / "node.key_secret").chmod(0o644)
    with pytest.raises(KeysError, match="chmod 600"):
        Keys.load(tmp_path)


def test_missing_and_damaged_keys_say_which_file(tmp_path: Path) -> None:
    with pytest.raises(KeysError, match=r"node\.key_secret"):
        Keys.load(tmp_path)
    Keys.create(tmp_path)
    for text in ("nothing", 'public-key "x"\nsecret-key\n', f'public-key = "{"#" * 40}"\nsecret-key = "x"\n'):
        (tmp_path / "node.key_secret").write_text(f"curve\n{text}")
        with pytest.raises(KeysError, match=r"node\.key_secret|40 characters"):
            Keys.load(tmp_path)


def test_trusted_keys_are_listed_by_name(tmp_path: Path) -> None:
    one, other = public(), public()
    trust(tmp_path, "one", public())
    trust(tmp_path, "one", one)
    trust(tmp_path, "other", other)
    assert trusted(tmp_path) == {"one": one, "other": other}


@pytest.mark.parametrize("name", ["", "..", "a/b", "x" * 65, "a b"])
def test_names_that_are_no_file_names_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(KeysError, match="node name"):
        trust(tmp_path, name, public())


@pytest.mark.parametrize("key", ["", "x" * 39, '"' * 40, "é" * 40, "#" * 40])
def test_what_is_no_key_is_refused(tmp_path: Path, key: str) -> None:
    with pytest.raises(KeysError, match="Z85"):
        trust(tmp_path, "one", key)


def test_one_key_has_one_name(tmp_path: Path) -> None:
    key = public()
    trust(tmp_path, "one", key)
    with pytest.raises(KeysError, match="'one'"):
        trust(tmp_path, "other", key)


@pytest.mark.parametrize(
    "text", ["nothing", "curve\n    public-key\n", f'curve\n    public-key = "{"#" * 40}"\n']
)
def test_a_damaged_file_costs_only_itself(tmp_path: Path, text: str) -> None:
    """Of some, fuzzing found, pyzmq raises an IndexError or struct.error: then no node could connect."""
    key = public()
    trust(tmp_path, "one", key)
    (tmp_path / "trusted" / "other.key").write_text(text)
    assert trusted(tmp_path) == {"one": key}


def test_changes_are_seen_in_both_directions(tmp_path: Path) -> None:
    key = public()
    trust(tmp_path, "other", public())
    book = Trust(tmp_path)
    assert book.node_of(key) is None
    trust(tmp_path, "one", key)
    assert book.node_of(key) == "one"
    (tmp_path / "trusted" / "one.key").unlink()
    assert book.node_of(key) is None


@pytest.mark.parametrize(
    ("endpoint", "security", "advertise", "allow_plain"),
    [
        ("tcp://127.0.0.1:0", "plain", None, False),
        ("tcp://[::1]:5", "plain", None, False),
        ("tcp://localhost:5", "plain", None, False),
        ("tcp://10.0.0.5:5", "curve", None, False),
        ("tcp://10.0.0.5:5", "plain", None, True),
        ("tcp://0.0.0.0:5", "curve", "10.0.0.5", False),
        ("tcp://*:*", "plain", "10.0.0.5", True),
    ],
)
def test_safe_places(endpoint: str, security: str, advertise: str | None, allow_plain: bool) -> None:
    check_security(endpoint, security, advertise=advertise, allow_plain=allow_plain)


@pytest.mark.parametrize(
    ("endpoint", "security", "advertise", "says"),
    [
        ("tcp://10.0.0.5:5", "plain", None, "authenticated"),
        ("tcp://host:5", "plain", None, "authenticated"),
        ("tcp://0.0.0.0:5", "plain", "10.0.0.5", "authenticated"),
        ("tcp://0.0.0.0:5", "curve", None, "advertise"),
        ("tcp://[::]:5", "curve", None, "advertise"),
        ("tcp://*:5", "curve", None, "advertise"),
        ("ipc:///tmp/x", "curve", None, "endpoint"),
        ("tcp://127.0.0.1", "curve", None, "endpoint"),
        ("tcp://127.0.0.1:5", "none", None, "security"),
    ],
)
def test_places_that_are_not_safe(endpoint: str, security: str, advertise: str | None, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        check_security(endpoint, security, advertise=advertise)


def test_a_public_key_can_be_typed_after_a_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Z85 has a dash: one key in 85 would begin with it, and be taken for an option."""
    pairs = chain([(b"-" * 40, b"s" * 40)], iter(zmq.curve_keypair, None))
    monkeypatch.setattr(zmq, "curve_keypair", lambda: next(pairs))
    assert not Keys.create(tmp_path).public.startswith("-")


def test_a_node_that_is_untrusted_is_unknown_at_once(tmp_path: Path) -> None:
    """Before, a key could be given and never be taken back: a node stayed trusted until somebody
    found its file.
    """
    old, key = public(), public()
    trust(tmp_path, "one", old)
    trust(tmp_path, "one", key, keep_previous_s=60)
    book = Trust(tmp_path)
    assert book.node_of(key) == book.node_of(old) == "one"
    untrust(tmp_path, "one")
    assert book.node_of(key) is None
    assert book.node_of(old) is None
    assert trusted_keys(tmp_path) == []
    with pytest.raises(KeysError, match="not trusted"):
        untrust(tmp_path, "one")
    with pytest.raises(KeysError, match="not trusted"):
        untrust(tmp_path, "../../etc/passwd")


def test_a_key_counts_until_it_expires(tmp_path: Path) -> None:
    key = public()
    trust(tmp_path, "one", key, valid_for_s=100)
    now_s = time.time()
    book = Trust(tmp_path, wall_clock=lambda: now_s)
    assert book.node_of(key) == "one"
    now_s += 101
    assert book.node_of(key) is None
    with pytest.raises(KeysError, match="positive"):
        trust(tmp_path, "one", key, valid_for_s=0)


def test_a_rotated_key_is_accepted_beside_its_successor_for_a_while(tmp_path: Path) -> None:
    old, new, third = public(), public(), public()
    trust(tmp_path, "one", old)
    trust(tmp_path, "one", new, keep_previous_s=100)
    now_s = time.time()
    book = Trust(tmp_path, wall_clock=lambda: now_s)
    assert book.node_of(old) == book.node_of(new) == "one"
    assert trusted(tmp_path) == {"one": new}
    with pytest.raises(KeysError, match="'one'"):
        trust(tmp_path, "other", old)
    now_s += 101
    assert (book.node_of(old), book.node_of(new)) == (None, "one")
    trust(tmp_path, "one", third)  # nothing is to be kept: the key before goes, and the one before that
    assert [k.public for k in trusted_keys(tmp_path)] == [third]


def test_a_rotation_replaces_the_pair(tmp_path: Path) -> None:
    with pytest.raises(KeysError, match=r"node\.key_secret"):
        Keys.rotate(tmp_path)
    made = Keys.create(tmp_path)
    rotated = Keys.rotate(tmp_path)
    found = Keys.load(tmp_path)
    assert (found.public, found.secret) == (rotated.public, rotated.secret)
    assert found.secret != made.secret
    assert stat.S_IMODE((tmp_path / "node.key_secret").stat().st_mode) == 0o600
    assert {path.name for path in tmp_path.iterdir()} == {"node.key", "node.key_secret", "trusted"}


@pytest.mark.parametrize("where", [".", "trusted"])
def test_a_folder_of_keys_that_others_may_write_to_is_refused(tmp_path: Path, where: str) -> None:
    """They could add a key of their own, and be trusted."""
    Keys.create(tmp_path / "keys")
    (tmp_path / "keys" / where).chmod(0o770)
    with pytest.raises(KeysError, match=r"others may write to .*; run `chmod go-w "):
        Keys.load(tmp_path / "keys")
