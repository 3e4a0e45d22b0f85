"""What every fabric must do, held by each backend: ``class TestMine(FabricContract)`` with a
fixture ``make``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ckptd.transport.verbs import Fault, RegionKey
from tests.transport.contract_faults import FaultContract
from tests.transport.contract_regions import RegionContract
from tests.transport.contract_transfers import TransferContract
from tests.transport.fabric_pairs import WAIT_S, FabricTests, Make, Pair, until

__all__ = ["FabricContract", "MessageContract"]


class MessageContract(FabricTests):
    """Control messages."""

    def test_a_request_is_answered_with_the_peers_name(self, pair: Pair) -> None:
        answers: list[bytes | Fault] = []
        pair.peer.request(b"hello", timeout_s=WAIT_S, answered=answers.append)
        until(lambda: bool(answers))
        assert answers == [b"here:hello"]

    def test_an_answer_may_come_later_from_any_thread_and_counts_once(self, make: Make) -> None:
        kept: list[Callable[[bytes], None]] = []
        here, there = make("here"), make("there", lambda node, body, answer: kept.append(answer))
        answers: list[bytes | Fault] = []
        here.peer(there.address).request(b"?", timeout_s=WAIT_S, answered=answers.append)
        until(lambda: bool(kept))
        kept[0](b"first")
        kept[0](b"second")
        until(lambda: bool(answers))
        assert answers == [b"first"]

    def test_a_request_without_an_answer_ends_at_its_deadline(self, make: Make) -> None:
        here, there = make("here"), make("there", lambda node, body, answer: None)
        answers: list[bytes | Fault] = []
        here.peer(there.address).request(b"?", timeout_s=0.3, answered=answers.append)
        until(lambda: bool(answers))
        assert answers == [Fault.DEADLINE]

    def test_a_server_that_fails_answers_the_next_one(self, make: Make) -> None:
        def serve(node: str, body: bytes, answer: Callable[[bytes], None]) -> None:
            if body == b"fail":
                raise RuntimeError("mine")
            answer(body)

        here, there = make("here"), make("there", serve)
        answers: list[bytes | Fault] = []
        here.peer(there.address).request(b"fail", timeout_s=0.2, answered=answers.append)
        here.peer(there.address).request(b"fine", timeout_s=WAIT_S, answered=answers.append)
        until(lambda: len(answers) == 2)
        assert set(answers) == {Fault.DEADLINE, b"fine"}

    def test_another_node_at_the_address_is_refused(self, make: Make) -> None:
        here, there = make("here"), make("there")
        peer = here.peer(replace(there.address, node="another"))
        done = peer.put(memoryview(b"1"), RegionKey(1, bytes(16), 1), deadline_s=5).wait(WAIT_S)
        assert done.fault is Fault.REFUSED


class FabricContract(TransferContract, RegionContract, FaultContract, MessageContract):
    """Every clause of ``ckptd.transport.verbs``, over real sockets."""
