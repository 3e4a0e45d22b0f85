"""`ckptctl status` of a daemon with a store: what is committed, what is under way, and who speaks
to the store.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from ckptd.ctl import daemon_commands
from ckptd.storage.checkpoints.reader import read_catalog
from ckptd.storage.stores.open_store import open_store
from ckptd.transport import messages as m
from tests.ckptd.persistence.slots import fill
from tests.ckptd.running import DaemonProcess, attach, eventually, reserve, running_daemon
from tests.ckptd.scraped import metrics_address, scrape


def durable(daemon: DaemonProcess) -> Any:
    return json.loads(daemon.ctl("status", "--json").stdout)["durable"]


def test_status_tells_what_is_durable(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/store"
    with running_daemon(store=url, persist_every="2", persist_every_s="0") as daemon:
        before = durable(daemon)
        assert (before["url"], before["keeper_pid"], before["ranks"]) == (url, 0, [])
        assert "no store keeper now" in daemon.ctl("status").stdout
        with daemon.client() as client:
            attach(client)
            segment = reserve(client, slots=6)
            here = m.Member(m.NodeCard(client.ask(m.GetStatus(), m.Status).node_id), (0,))
            client.ask(m.Join(1, -1, (here,)), m.Done)
            for iteration in (3, 4, 5):
                fill(segment, iteration % 6, iteration)
            eventually(lambda: [r["committed"] for r in durable(daemon)["ranks"]] == [4], "it is committed")
            for iteration in (6, 7, 8):
                fill(segment, iteration % 6, iteration)
            eventually(lambda: [r["committed"] for r in durable(daemon)["ranks"]] == [8], "so is this")
            fill(segment, 9 % 6, 9)
            eventually(lambda: durable(daemon)["ranks"][0]["lag_iterations"] == 1, "9 is seen")
            told = durable(daemon)
            text = daemon.ctl("status").stdout
            # Before the rank leaves: what is newest is made durable then.
            newest = read_catalog(open_store(url), "job", "run").newest
            client.request(m.Detach())
        (rank,) = told["ranks"]
        assert (rank["job"], rank["run"], rank["rank"]) == ("job", "run", 0)
        assert (rank["lag_iterations"], rank["under_way"], rank["reason"]) == (1, -1, "")
        assert rank["stride"] % 2 == 0
        assert told["keeper_pid"] > 0
        assert told["uploaded_bytes"] >= rank["uploaded_bytes"] > 0
        assert told["spared_bytes"] >= 300_000  # the tensor that never changes
        assert f"durable   {url}, store keeper {told['keeper_pid']};" in text
        assert "8 (1 ago)" in text
        assert newest is not None
        assert newest.id.end == 8
        segment.close()


def test_a_store_that_cannot_be_opened_is_shown_and_counted_as_a_failure(tmp_path: Path) -> None:
    """The status told of no trouble, no failure was counted, and the event came every three seconds."""
    settings = {"store": f"file://{tmp_path}/store", "store_options": '{"key": "without its secret"}'}
    with running_daemon(metrics="127.0.0.1:0", **settings) as daemon, daemon.client() as client:
        attach(client)
        here = m.Member(m.NodeCard(client.ask(m.GetStatus(), m.Status).node_id), (0,))
        client.ask(m.Join(1, -1, (here,)), m.Done)
        page = metrics_address(daemon.endpoint)
        failures = "ckptd_persist_failures_total"
        eventually(
            lambda: scrape(page).by_labels(failures, reason="not_opened")[()] >= 2, "it is tried again"
        )
        (rank,) = durable(daemon)["ranks"]
        assert rank["reason"].startswith("the store cannot be opened: ")
        told = client.ask(m.GetEvents(), m.Events).events
        assert [event.kind for event in told].count("persist.store") == 1


def test_status_of_a_daemon_without_a_store_has_nothing_durable() -> None:
    with running_daemon() as daemon:
        assert durable(daemon) is None
        assert "durable" not in daemon.ctl("status").stdout


def test_no_secret_of_the_urls_is_told(tmp_path: Path) -> None:
    with running_daemon(store="s3://user:hidden-4711@bucket/x?token=hidden-4711") as daemon:
        assert durable(daemon)["url"] == "s3://bucket/x"
        assert "hidden" not in daemon.ctl("status").stdout


STATUS = m.Status(
    version="0",
    node_id="n",
    boot_id="b",
    pid=1,
    uptime_s=1.0,
    endpoint="ipc:///x",
    runtime_dir="/x",
    segment_dir="/y",
    quota_bytes=1,
    used_bytes=0,
    promised_bytes=0,
    fs_total_bytes=1,
    fs_available_bytes=1,
    rss_anon_bytes=0,
    rss_file_bytes=0,
    rss_shmem_bytes=0,
    seal_queue=0,
    sessions=(),
    segments=(),
    counters={},
)


def test_a_status_of_an_older_daemon_is_understood() -> None:
    old = {k: v for k, v in msgspec.to_builtins(STATUS).items() if k != "durable"}
    assert msgspec.convert(old, m.Status) == STATUS


def test_users_that_are_kept_apart_have_a_row_each() -> None:
    users = (m.UserStatus(0, 3 << 30, 4 << 30), m.UserStatus(4_000_000, 1 << 30, 0))
    text = daemon_commands.status_text(msgspec.structs.replace(STATUS, users=users))
    rows = [" ".join(line.split()) for line in text.splitlines()]
    assert {"root (0) 3 GiB 4 GiB", "4000000 1 GiB none"} <= set(rows)
    assert "quota" not in daemon_commands.status_text(STATUS)


def test_lost_updates_of_partial_snapshots_are_shown() -> None:
    metrics = {"lost_tokens_share": 0.041029, "lost_tokens": 211.0, "older_experts": 6.0}
    lost = m.SessionStatus("j", "r", 1, 2, 7, 20, metrics, 1, 1, 1, 1.0, "pidfd")
    exact = msgspec.structs.replace(lost, rank=0, metrics={"lost_tokens_share": 0.0})
    text = daemon_commands.status_text(msgspec.structs.replace(STATUS, sessions=(exact, lost)))
    (line,) = [line for line in text.splitlines() if line.startswith("lost")]
    assert "j/r rank 1: PLT 4.1029% in all recoveries; by the last one updates by 211 tokens of 6" in line


def test_what_is_under_way_and_what_went_wrong_is_shown() -> None:
    rank = m.DurableRank(
        job="moe",
        run="r1",
        rank=3,
        committed=120,
        lag_iterations=7,
        under_way=124,
        stored=2,
        of=6,
        stride=4,
        skipped=5,
        abandoned=1,
        uploaded_bytes=3 << 30,
        last_s=12.5,
        reason="NoSpace: it is full",
    )
    first = msgspec.structs.replace(rank, rank=4, committed=-1, under_way=-1, reason="", last_s=0.0)
    told = m.DurableStatus("s3://bucket/x", 4711, 4 << 30, 1 << 30, (rank, first))
    text = daemon_commands.status_text(msgspec.structs.replace(STATUS, durable=told))
    assert "durable   s3://bucket/x, store keeper 4711; 4 GiB uploaded, 1 GiB there already" in text
    lines = text.splitlines()
    row = next(line for line in lines if line.startswith("moe") and "120" in line)
    assert " ".join(row.split()) == (
        "moe r1 3 120 (7 ago) 124: 2 of 6 4 5 1 3 GiB 12.5 s NoSpace: it is full"
    )
    other = next(line for line in lines if line.startswith("moe") and line != row)
    assert " ".join(other.split()) == "moe r1 4 - - 4 5 1 3 GiB - -"
