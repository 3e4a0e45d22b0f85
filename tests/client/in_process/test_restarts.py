"""A process is told of an epoch, and comes to it; or it ends, with the reason."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from unittest import mock

import pytest
import torch
from torch import nn

from ckptd.client.in_process import restarts
from ckptd.client.in_process.restarts import InProcessRestarts, Modes, in_process_restarts
from ckptd.client.recovery.replay import ReplayMismatch
from ckptd.restart_line import LINE_VARIABLE, HostEnd, NextEpoch, TrainerEnd, inherited_line
from tests.ckptd.restart_ends import inherited_end

EPOCH = NextEpoch(1, {"CKPTD_TEST_EPOCH": "1"}, "rank 1: SIGKILL")


@pytest.fixture
def host() -> Iterator[HostEnd]:
    end = HostEnd.make()
    yield end
    end.close()


@pytest.fixture
def line(host: HostEnd, monkeypatch: pytest.MonkeyPatch) -> Iterator[TrainerEnd]:
    monkeypatch.setenv("CKPTD_TEST_EPOCH", "0")
    with inherited_end(host, monkeypatch) as end:
        yield end
        host.close()
        no_thread()


def no_thread() -> None:
    deadline = time.monotonic() + 60
    while any(thread.name == "ckptd-restarts" for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture(autouse=True)
def no_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restarts, "leave_groups", lambda: None)


def offered(host: HostEnd, epoch: NextEpoch = EPOCH) -> bool:
    host.receive()
    return host.offer(os.getpid(), epoch)


def test_a_process_comes_to_the_epoch_that_its_host_offers(host: HostEnd, line: TrainerEnd) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout())
    model.eval()
    model[0].bias.requires_grad_(False)
    made = InProcessRestarts(lambda: "the new model", line)
    assert not offered(host)
    made.settle(model, "")
    model.train()
    model[0].bias.requires_grad_(True)
    model(torch.ones(1, 2)).sum().backward()
    assert offered(host)
    found = made.epoch_after(RuntimeError("Connection closed by peer"))
    assert found == EPOCH
    told_s = time.monotonic()
    returned, heard_s = made.move_to(EPOCH, dict(model.named_parameters()))
    assert returned == "the new model"
    assert told_s - 60 < heard_s <= told_s
    assert host.receive() == (os.getpid(), 1)
    assert os.environ["CKPTD_TEST_EPOCH"] == "1"
    assert not any(module.training for module in model.modules())
    assert not model[0].bias.requires_grad
    assert all(param.grad is None for param in model.parameters())
    assert not made.settled
    assert not offered(host)


def test_the_newest_of_two_epochs_counts(host: HostEnd, line: TrainerEnd) -> None:
    made = InProcessRestarts(lambda: None, line)
    made.settle(nn.Linear(1, 1), "")
    newest = EPOCH._replace(number=2, environment={"CKPTD_TEST_EPOCH": "2"})
    assert offered(host)
    assert made.epoch_after(RuntimeError()) == EPOCH
    assert offered(host, newest)
    with made._told:
        assert made._told.wait_for(lambda: made._next == newest, 60)
    made.move_to(EPOCH, {})
    assert host.receive() == (os.getpid(), 2)
    assert os.environ["CKPTD_TEST_EPOCH"] == "2"


def test_an_error_that_no_other_rank_explains_passes(line: TrainerEnd) -> None:
    made = InProcessRestarts(lambda: None, line)
    assert made.epoch_after(RuntimeError()) is None, "not in the loop"
    made.settle(nn.Linear(1, 1), "")
    with mock.patch.object(restarts, "_EPOCH_S", 0.05):
        assert made.epoch_after(RuntimeError()) is None
    started_s = time.monotonic()
    assert made.epoch_after(ReplayMismatch("a bit")) is None
    assert made.epoch_after(ValueError("a bad batch")) is None
    assert time.monotonic() - started_s < restarts._EPOCH_S, "only errors of collective calls are waited with"


def test_a_reason_against_it_is_said_once(
    host: HostEnd, line: TrainerEnd, caplog: pytest.LogCaptureFixture
) -> None:
    made = InProcessRestarts(lambda: None, line)
    made.settle(nn.Linear(1, 1), "boundaries are logged")
    assert made.settled
    assert not offered(host)
    assert "no restart in this process: boundaries are logged" in caplog.text
    made.disarm()
    assert made.epoch_after(RuntimeError()) is None


def test_a_body_that_is_not_restartable_is_said_once(
    line: TrainerEnd, caplog: pytest.LogCaptureFixture
) -> None:
    made = InProcessRestarts(lambda: None, line)
    for _ in range(3):
        made.check_used()
    assert caplog.text.count("the body of the loop is not in `with ckpt.restartable():`") == 1
    used = InProcessRestarts(lambda: None, line)
    used.used = True  # in a replay, after which it could restart
    used.check_used()
    used.settle(nn.Linear(1, 1), "")
    assert used.epoch_after(ValueError()) is None
    assert caplog.text.count("no restart in this process") == 1


def test_after_the_loop_it_is_over(host: HostEnd, line: TrainerEnd) -> None:
    made = InProcessRestarts(lambda: None, line)
    made.settle(nn.Linear(1, 1), "")
    made.disarm()
    for _ in range(2):
        host.receive()
    assert not host.offer(os.getpid(), EPOCH)


def test_other_calls_than_the_scripts_are_an_error(line: TrainerEnd, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = iter([2, 5])
    monkeypatch.setattr(restarts, "calls_so_far", lambda: next(counts))
    made = InProcessRestarts(lambda: None, line)
    with pytest.raises(RuntimeError, match="has made 5 collective calls, and this script had made 2 before"):
        made.move_to(EPOCH, {})


HANGS = """
import os, threading
from ckptd.client.in_process.restarts import InProcessRestarts
from ckptd.restart_line import NextEpoch, inherited_line
made = InProcessRestarts(threading.Event().wait, inherited_line(), connect_s=0.2)
made.move_to(NextEpoch(1, {}, "rank 1: SIGKILL"), {})
"""


def test_a_function_that_hangs_ends_the_process(host: HostEnd) -> None:
    done = subprocess.run(
        [sys.executable, "-c", HANGS],
        env={**os.environ, LINE_VARIABLE: str(host.descriptor)},
        pass_fds=[host.descriptor],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 1
    assert "has not returned for 0.2 s: this process ends" in done.stderr


def test_the_modes_of_a_model_are_set_back() -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.Dropout())
    modes = Modes(model)
    model.eval()
    model.requires_grad_(False)
    modes.restore()
    assert all(module.training for module in model.modules())
    assert all(param.requires_grad for param in model.parameters())


def test_without_a_host_it_is_said_and_nothing_more(caplog: pytest.LogCaptureFixture) -> None:
    inherited_line.cache_clear()
    with caplog.at_level(logging.INFO):
        assert in_process_restarts(lambda: None) is None
        assert in_process_restarts(None) is None
    assert caplog.text.count("in_process= has no effect without a host") == 1
    inherited_line.cache_clear()


def test_the_end_of_the_host_ends_the_thread(host: HostEnd, line: TrainerEnd) -> None:
    InProcessRestarts(lambda: None, line)
    host.close()
    no_thread()
