"""Somebody between two nodes who reads, changes, repeats and leaves out what passes on data streams."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

from ckptd.transport.access.keys import Keys, trust
from ckptd.transport.fabric import frames as f
from ckptd.transport.fabric.frames import Ticket
from ckptd.transport.fabric.serving import Connection
from ckptd.transport.tcp import sealing
from ckptd.transport.tcp.sealing import TAG_BYTES, Cipher, stream_keys
from ckptd.transport.tcp.stream_fabric import StreamFabric
from ckptd.transport.tcp.stream_frames import (
    ANSWER_BYTES,
    ASK_BYTES,
    PREAMBLE_BYTES,
    StreamKind,
    decode_answer,
    decode_ask,
    encode_answer,
    encode_preamble,
)
from ckptd.transport.verbs import Access, Fault, Peer, RegionKey, Scope
from tests.cluster.proxy import FaultProxy, LastBytes, Meddler
from tests.transport.fabric_pairs import CHUNK, WAIT_S, settings, until
from tests.transport.tcp.test_stream_fabric import LOOPBACK, BehindProxies, knock, nobody

CHUNKS = 12
RECORD = CHUNK + TAG_BYTES


class Two:
    """Two fabrics with keys, and a proxy in front of the data port of one."""

    def __init__(self, folder: Path, here: dict[str, Any], there: dict[str, Any]) -> None:
        for name in ("here", "there"):
            Keys.create(folder / name)
        for name, other in (("here", "there"), ("there", "here")):
            trust(folder / name, other, Keys.load(folder / other).public)
        self.here, self.there = (
            BehindProxies(
                name,
                LOOPBACK,
                serve=nobody,
                keys=Keys.load(folder / name),
                **settings(**options),
            )
            for name, options in (("here", here), ("there", there))
        )
        self.proxy = FaultProxy(self.there.data_address)
        self.there.told = self.proxy.address

    @property
    def peer(self) -> Peer:
        return self.here.peer(self.there.address)

    def region(self, buffer: bytearray) -> RegionKey:
        both = Access.READ | Access.WRITE
        return self.there.register(memoryview(buffer), access=both, scope=Scope("here")).key

    @property
    def noticed(self) -> int:
        """What the two have counted of attacks."""
        sides = (self.here.counters, self.there.counters)
        return sum(side.forged + side.garbage + side.unauthenticated for side in sides)

    def close(self) -> None:
        self.here.close()
        self.there.close()
        self.proxy.close()


Make = Callable[..., Two]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    made: list[Two] = []

    def two(here: dict[str, Any] | None = None, there: dict[str, Any] | None = None) -> Two:
        made.append(Two(tmp_path / str(len(made)), here or {}, there or {}))
        return made[-1]

    yield two
    for each in made:
        each.close()


def source() -> bytearray:
    """No byte of it is zero, so that what was written can be told from what was not."""
    values = np.random.default_rng(5).integers(1, 256, CHUNKS * CHUNK, dtype=np.uint8)
    return bytearray(values.tobytes())


def foreign(target: bytearray, wanted: bytearray) -> int:
    """How many bytes are neither what was sent there nor untouched."""
    ours, theirs = np.frombuffer(target, np.uint8), np.frombuffer(wanted, np.uint8)
    return int(np.count_nonzero((ours != theirs) & (ours != 0)))


# --- who knows the format, and no key ----------------------------------------------------------------------


class Forger:
    """Puts zs into every chunk that is put, with digests to match. Passes on what it cannot read."""

    def __init__(self) -> None:
        self._up, self._down = bytearray(), bytearray()
        self._digests: dict[int, tuple[int, int]] = {}
        self._begun = self._blind = False
        self.forged = 0

    def up(self, data: bytes) -> bytes:
        self._up += data
        out = bytearray()
        if not self._begun and len(self._up) >= PREAMBLE_BYTES:
            self._begun = True
            out += self._take(self._up, PREAMBLE_BYTES)
        while self._begun and not self._blind and len(self._up) >= ASK_BYTES:
            try:
                ask = decode_ask(self._up[:ASK_BYTES])
            except ValueError:
                self._blind = True
                break
            if len(self._up) < ASK_BYTES + ask.length + 8:
                break
            out += self._take(self._up, ASK_BYTES)
            content = self._take(self._up, ask.length)
            (true,) = struct.unpack("<Q", self._take(self._up, 8))
            fake = b"z" * len(content)
            false = xxhash.xxh3_64_intdigest(fake, seed=f.seed_of(ask.region, ask.offset, ask.length))
            self._digests[ask.op] = (false, true)
            self.forged += ask.length
            out += fake + struct.pack("<Q", false)
        if self._blind:
            out += self._take(self._up, len(self._up))
        return bytes(out)

    def down(self, data: bytes) -> bytes:
        """Acknowledges what the sender means to have put."""
        self._down += data
        out = bytearray()
        while not self._blind and len(self._down) >= ANSWER_BYTES:
            try:
                answer = decode_answer(self._down[:ANSWER_BYTES])
            except ValueError:
                self._blind = True
                break
            self._take(self._down, ANSWER_BYTES)
            if answer.kind is StreamKind.ACK:
                answer = answer._replace(digest=self._digests[answer.op][1])
            out += encode_answer(answer)
        if self._blind:
            out += self._take(self._down, len(self._down))
        return bytes(out)

    def _take(self, buffer: bytearray, size: int) -> bytes:
        taken = bytes(buffer[:size])
        del buffer[:size]
        return taken


def test_who_can_compute_digests_cannot_put_bytes_of_his_own(make: Make) -> None:
    """xxh3 has no key: a man in the middle put his bytes into a region, with an acknowledgement of
    the sender's, and nobody noticed. On plaintext streams, which both sides have to ask for, he
    still can; that shows that he is up to it.
    """
    for asked, taken in (({"plaintext": True}, CHUNKS * CHUNK), ({}, 0)):
        two = make(asked, asked)
        forgers: list[Forger] = []

        def attack(forgers: list[Forger] = forgers) -> Meddler:
            forgers.append(Forger())
            return forgers[-1]

        two.proxy.meddle = attack
        wanted, target = source(), bytearray(CHUNKS * CHUNK)
        assert two.peer.put(memoryview(wanted), two.region(target)).wait(WAIT_S).ok
        assert target.count(b"z" * 1000) == taken // 1000
        assert sum(forger.forged for forger in forgers) == taken
        assert forgers
        assert (target == wanted) == (taken == 0)


class Listener:
    """Keeps what passes."""

    def __init__(self, heard: bytearray) -> None:
        self._heard = heard

    def up(self, data: bytes) -> bytes:
        self._heard += data
        return data

    down = up


@pytest.mark.parametrize("plaintext", [True, False])
def test_who_listens_hears_neither_contents_nor_tokens(make: Make, plaintext: bool) -> None:
    """Plaintext streams show that the listener would hear them."""
    two = make({"plaintext": plaintext}, {"plaintext": plaintext})
    heard = bytearray()
    two.proxy.meddle = lambda: Listener(heard)
    wanted, target = bytearray(b"the weights of the model" * 9000), bytearray(24 * 9000)
    key = two.region(target)
    assert two.peer.put(memoryview(wanted), key).wait(WAIT_S).ok
    assert two.peer.get(key, memoryview(bytearray(len(wanted)))).wait(WAIT_S).ok
    assert len(heard) > 2 * len(wanted)
    assert (b"the weights" in heard, key.token in heard) == (plaintext, plaintext)


# --- every place, every trick ------------------------------------------------------------------------------


class RecordMeddler:
    """Cuts a sealed stream into its records, and does something to some of one kind."""

    def __init__(self, attack: Attack) -> None:
        self._attack = attack
        asks = ("ask", "body") if attack.put else ("ask",)
        answers = ("ack",) if attack.put else ("data", "payload")
        self._sides = {
            "up": _Side(_names("preamble", asks)),
            "down": _Side(_names("welcome", answers)),
        }

    def up(self, data: bytes) -> bytes | None:
        return self._pass("up", data)

    def down(self, data: bytes) -> bytes | None:
        return self._pass("down", data)

    def _pass(self, side: str, data: bytes) -> bytes | None:
        return self._sides[side].take(data, self._attack)


def _names(first: str, again: tuple[str, ...]) -> Iterator[str]:
    yield first
    while True:
        yield from again


SIZES = {
    "preamble": PREAMBLE_BYTES,
    "welcome": ANSWER_BYTES + TAG_BYTES,
    "ask": ASK_BYTES + TAG_BYTES,
    "ack": ANSWER_BYTES + TAG_BYTES,
    "data": ANSWER_BYTES + TAG_BYTES,
    "body": RECORD,
    "payload": RECORD,
}


class _Side:
    def __init__(self, names: Iterator[str]) -> None:
        self._names = names
        self._name = next(names)
        self._buffer = bytearray()
        self._held = b""  # of a swap
        self._seen = 0
        self._ended = False

    def take(self, data: bytes, attack: Attack) -> bytes | None:
        self._buffer += data
        out = bytearray()
        while len(self._buffer) >= SIZES[self._name] and not self._ended:
            size = SIZES[self._name]
            record = bytes(self._buffer[:size])
            del self._buffer[:size]
            out += self._done_to(record, attack)
            self._name = next(self._names)
        # Nothing may come after a record that is cut short: the connection ends with it, and not with the next one.
        return LastBytes(out) if self._ended else bytes(out)

    def _done_to(self, record: bytes, attack: Attack) -> bytes:
        held, self._held = self._held, b""
        if held or self._name != attack.name:
            return record + held
        self._seen += 1
        alone = self._name in ("preamble", "welcome")
        if attack.left <= 0 or self._seen != (1 if alone else 2):
            return record
        attack.left -= 1
        match attack.trick:
            case "drop":
                return b""
            case "repeat":
                return record + record
            case "swap":
                self._held = record
                return b""
            case "truncate":
                self._ended = True
                return record[: len(record) // 2]
            case "replace":
                return bytes(reversed(record))
            case at:
                assert isinstance(at, int)
                changed = bytearray(record)
                changed[at] ^= 0x40
                return bytes(changed)


class Attack:
    """On the first ``times`` streams; what it does to records of this name: a trick, or the byte to change."""

    def __init__(self, put: bool, name: str, trick: str | int, times: float) -> None:
        self.put, self.name, self.trick, self.left = put, name, trick, times


PLACES = {
    (True, "preamble"): (0, 5, 8, 39, 40, 55),
    (True, "welcome"): (0, 39, 40, 55),
    (True, "ask"): (0, 4, 8, 24, 40, 48, 63, 64, 79),
    (True, "body"): (0, CHUNK // 2, CHUNK - 1, CHUNK, RECORD - 1),
    (True, "ack"): (0, 8, 24, 39, 40, 55),
    (False, "data"): (0, 16, 40, 55),
    (False, "payload"): (0, CHUNK // 2, CHUNK - 1, CHUNK, RECORD - 1),
}
TRICKS = ("drop", "repeat", "swap", "truncate", "replace")
CASES = [
    (put, name, trick)
    for (put, name), places in PLACES.items()
    for trick in (*places, *(TRICKS if name not in ("preamble", "welcome") else TRICKS[4:]))
]


@pytest.mark.parametrize(("put", "name", "trick"), CASES)
def test_nothing_that_is_done_to_a_stream_brings_a_foreign_byte(
    make: Make, put: bool, name: str, trick: str | int
) -> None:
    """Two streams are attacked, then the attacker gives up: what is there then is what was sent,
    and the attack was counted.
    """
    two = make()
    attack = Attack(put, name, trick, 2)
    two.proxy.meddle = lambda: RecordMeddler(attack)
    data, other = source(), bytearray(CHUNKS * CHUNK)
    key = two.region(other if put else data)
    verb = two.peer.put(memoryview(data), key) if put else two.peer.get(key, memoryview(other))
    assert verb.wait(WAIT_S).ok
    assert other == data
    assert attack.left == 0
    assert two.noticed or trick == "truncate"  # an end in the middle is what any lost connection is


@pytest.mark.parametrize(("put", "name"), [(True, "body"), (False, "payload")])
@pytest.mark.parametrize("trick", [0, CHUNK - 1, CHUNK + 3, "replace", "drop"])
def test_while_he_goes_on_nothing_of_his_lies_in_memory(
    make: Make, put: bool, name: str, trick: str | int
) -> None:
    """AES-GCM decrypts what was changed into what the attacker chose to change, before the tag is
    known to be wrong.
    """
    two = make()
    two.proxy.meddle = lambda: RecordMeddler(Attack(put, name, trick, float("inf")))
    data, other = source(), bytearray(CHUNKS * CHUNK)
    key = two.region(other if put else data)
    if put:
        done = two.peer.put(memoryview(data), key, deadline_s=2).wait(WAIT_S)
    else:
        done = two.peer.get(key, memoryview(other), deadline_s=2).wait(WAIT_S)
    assert foreign(other, data) == 0
    forged = two.there.counters.forged if put else two.here.counters.forged
    assert forged > 0
    assert done.ok or done.fault in (Fault.DIGEST, Fault.DEADLINE)
    newest = two.there.newest_forgery if put else two.here.newest_forgery
    assert ("here" if put else "there") in newest


# --- tickets -----------------------------------------------------------------------------------------------


def test_a_ticket_that_was_overheard_is_of_no_use(make: Make) -> None:
    """It goes over the wire in clear. Who shows it without its key is turned away, and does not use it up."""
    two = make()
    tickets: list[Ticket] = []
    peer = Connection("here", two.here.address.public_key, data=True, heard_at=0.0)
    ask = f.Dial(1, bytes(16), two.here._ciphers, b"a" * 32)
    two.there._dial(peer, ask, tickets.append)
    until(lambda: bool(tickets))
    (ticket,) = tickets
    port = two.proxy.target
    assert knock(port, encode_preamble(ticket.ticket)) == b""
    assert knock(port, encode_preamble(ticket.ticket)[:-16] + ticket.ticket[:16]) == b""
    assert two.there.counters.forged == 2
    keys = stream_keys(Cipher(ticket.cipher), ticket.ticket, (b"a" * 32, ticket.secret), ("here", "there"))
    preamble = encode_preamble(ticket.ticket, keys[0])
    assert len(knock(port, preamble)) == ANSWER_BYTES + TAG_BYTES
    assert knock(port, preamble) == b""  # once
    assert two.there.counters.unauthenticated == 1


# --- what both sides speak -----------------------------------------------------------------------------------


@pytest.mark.parametrize("asks", ["here", "there"])
def test_one_side_that_asks_for_plaintext_does_not_get_it(make: Make, asks: str) -> None:
    two = make(**{asks: {"plaintext": True}})
    heard = bytearray()
    two.proxy.meddle = lambda: Listener(heard)
    wanted, target = bytearray(b"the weights of the model" * 9000), bytearray(24 * 9000)
    assert two.peer.put(memoryview(wanted), two.region(target)).wait(WAIT_S).ok
    assert target == wanted
    assert len(heard) > len(wanted)
    assert b"the weights" not in heard


@pytest.mark.parametrize("plain", ["here", "there"])
def test_a_peer_that_can_only_plaintext_is_spoken_to_under_curve(
    make: Make, plain: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It lacks the library: its streams are refused, and its bytes go over the control connection's
    encryption.
    """
    two = make()
    monkeypatch.setattr(getattr(two, plain), "_ciphers", (Cipher.PLAINTEXT,))
    heard = bytearray()
    two.proxy.meddle = lambda: Listener(heard)
    wanted, target = source(), bytearray(CHUNKS * CHUNK)
    assert two.peer.put(memoryview(wanted), two.region(target)).wait(WAIT_S).ok
    assert target == wanted
    assert not heard
    assert "go over ZeroMQ" in caplog.text


def test_a_server_cannot_choose_what_was_not_offered(make: Make) -> None:
    """A node that was taken over would have others send it plaintext past whoever listens."""
    two = make()
    heard = bytearray()
    two.proxy.meddle = lambda: Listener(heard)
    dial = two.there._dial

    def lowered(peer: Connection, ask: f.Dial, answer: Callable[[f.Ticket], None]) -> None:
        dial(peer, ask, lambda t: answer(f.Ticket(t.op, t.host, t.port, t.ticket, 0, t.secret)))

    two.there._server.dial = lowered
    wanted, target = source(), bytearray(CHUNKS * CHUNK)
    assert two.peer.put(memoryview(wanted), two.region(target)).wait(WAIT_S).ok
    assert target == wanted
    assert not heard


def test_without_keys_there_is_nothing_to_encrypt_with_and_without_the_library_nothing_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fabric = StreamFabric("here", LOOPBACK, serve=nobody)
    assert fabric.encryption == "plaintext"
    fabric.close()
    monkeypatch.setattr(sealing, "_has_library", lambda: False)
    with pytest.raises(ValueError, match="cryptography"):
        StreamFabric("here", LOOPBACK, serve=nobody, keys=Keys.create(tmp_path / "keys"))
