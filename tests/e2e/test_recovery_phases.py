"""A job that was killed tells how long each phase of its recovery took: in its counters, in an event, in
``ckptctl``, and as a trace.
"""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from ckptd.core.recovery.recovery_phases import RecoveryPhase, describe_phases, phases_in_metrics
from ckptd.core.snapshot_policy import PolicyKind
from tests.ckptd.running import eventually
from tests.e2e.habits import SCRIPT, environment, start
from tests.e2e.harness import DaemonProcess, Jobs, own_daemon
from tests.e2e.ranks import KILL_AT, Ranks, story

Phase = RecoveryPhase
# Forked with everything imported.
FORKED_PHASES = [phase for phase in Phase if phase not in (Phase.DETECTED, Phase.IMPORTS)]
OF_RANKS = re.compile(r"the first new iteration is (\d+): ([\d.]+) s from detected to first_new_step: (.+)")

# Each step waits for the snapshot before: a busy daemon would be outrun. `ckptctl status` is asked at the end,
# while the trainer is attached.
SCRIPT_OF = (
    SCRIPT.replace("window=2)", "window=2), run=RunOptions(name='RUN', job='phases')")
    .replace(
        "    loss.backward()",
        """    loss.backward()
    deadline = time.monotonic() + 120
    while step > 3 and not any(each.iteration >= step - 1 for each in saved_iterations("phases", "RUN")):
        assert time.monotonic() < deadline
        time.sleep(0.01)""",
    )
    .replace(
        "ckpt.close()",
        """status = [sys.executable, "-m", "ckptd.ctl", "status"]
print(subprocess.run(status, capture_output=True, text=True).stdout)
ckpt.close()""",
    )
    .replace("import os,", "import subprocess, time\nfrom ckptd.saved import saved_iterations\nimport os,")
)


class Collector:
    """An OTLP/HTTP receiver that parses what it gets.

    Attributes:
        requests: the path of each request, and its spans with the service that sent them.
    """

    def __init__(self) -> None:
        self.requests: list[tuple[str, list[tuple[str, Any]]]] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as otlp

                body = self.rfile.read(int(self.headers["Content-Length"]))
                found = otlp.ExportTraceServiceRequest.FromString(body).resource_spans
                spans = [
                    (attributes_of(each.resource)["service.name"], span)
                    for each in found
                    for scope in each.scope_spans
                    for span in scope.spans
                ]
                collector.requests.append((self.path, spans))
                self.send_response(200)
                self.send_header("Content-Type", "application/x-protobuf")
                self.end_headers()
                self.wfile.write(otlp.ExportTraceServiceResponse().SerializeToString())

            def log_message(self, *_: object) -> None:
                """Nothing."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def spans(self, run: str) -> list[Any]:
        return [s for _, spans in self.requests for _, s in spans if attributes_of(s)["ckptd.run"] == run]


def attributes_of(holder: Any) -> dict[str, Any]:
    return {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in holder.attributes}


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    found = Collector()
    yield found
    found.server.shutdown()
    found.server.server_close()


@pytest.fixture(scope="module")
def daemon(collector: Collector) -> Iterator[DaemonProcess]:
    there = f"http://127.0.0.1:{collector.server.server_address[1]}"
    traced = ("--otel-endpoint", there) if find_spec("opentelemetry") else ()
    with own_daemon("--memory", "2GiB", *traced) as process:
        yield process


@pytest.mark.slow
def test_both_ranks_tell_where_the_time_went(jobs: Jobs, daemon: DaemonProcess, collector: Collector) -> None:
    """And all of a recovery is one trace, if OpenTelemetry is installed."""
    both_ranks_come_back(jobs, daemon, run := uuid.uuid4().hex[:8])
    if not find_spec("opentelemetry"):
        pytest.skip("no traces were sent: opentelemetry is not installed (pip install ckptd[test])")
    recoveries = {
        text: found for text in daemon.events("recovery_phases", run) if (found := OF_RANKS.fullmatch(text))
    }
    assert len(recoveries) == 2

    def told() -> bool:
        return [s.name.startswith("rank ") for s in collector.spans(run)].count(True) == 4

    eventually(told, "two ranks told of two starts each")
    assert {path for path, _ in collector.requests} == {"/v1/traces"}
    assert {service for _, spans in collector.requests for service, _ in spans} == {"ckptd"}
    spans = collector.spans(run)
    whole = {span.name: span for span in spans if not span.parent_span_id}
    assert whole.keys() == {"start", "recovery"}
    assert len({span.trace_id for span in spans}) == 2
    ours = [span for span in spans if span.trace_id == whole["recovery"].trace_id]
    ranks = {span.name: span for span in ours if span.parent_span_id == whole["recovery"].span_id}
    assert ranks.keys() == {"rank 0", "rank 1"}
    for name, rank in ranks.items():
        phases = [span for span in ours if span.parent_span_id == rank.span_id]
        phases.sort(key=lambda span: (span.end_time_unix_nano, list(Phase).index(Phase(span.name))))
        assert [span.name for span in phases] == [Phase.DETECTED, *FORKED_PHASES]
        # As the event says, and without a gap.
        took = [(s.end_time_unix_nano - s.start_time_unix_nano) / 1e9 for s in phases]
        said = describe_phases(dict(zip(FORKED_PHASES, took[1:], strict=True)))
        assert said in {match[3] for match in recoveries.values()}
        starts = [span.start_time_unix_nano for span in phases]
        assert starts == [rank.start_time_unix_nano, *(s.end_time_unix_nano for s in phases[:-1])]
        about = attributes_of(phases[-1])
        assert about == attributes_of(rank)
        assert (about["ckptd.rank"], about["ckptd.world_size"]) == (int(name[-1]), 2)
        assert (about["ckptd.tier"], about["ckptd.policy"]) == ("memory", PolicyKind.SLIDING)
        assert str(about["ckptd.iteration"]) in {match[1] for match in recoveries.values()}


def both_ranks_come_back(jobs: Jobs, daemon: DaemonProcess, run: str) -> None:
    """Rank 0 is killed, and both begin again."""
    before = Ranks(jobs, run, killed=0)
    before.end_by_the_death_of(0)
    # Both are found dead before others come.
    eventually(lambda: len(daemon.events("trainer_gone", run)) == 2, "the daemon knows of both deaths")
    after = Ranks(jobs, run, "--seed", "7")
    reports = [jobs.report(out) for out in after.end()]
    said = daemon.events("recovery_phases", run)
    assert len(said) == 2, story(daemon, run, before, after)
    found = [OF_RANKS.fullmatch(text) for text in said]
    assert None not in found, said
    told = sorted(match[3] for match in found if match is not None)
    assert told == sorted(describe_phases(phases_in_metrics(report)) for report in reports)
    for report in reports:
        phases = phases_in_metrics(report)
        assert list(phases) == FORKED_PHASES, story(daemon, run, before, after)
        assert all(seconds >= 0.0 for seconds in phases.values())
    for match in found:
        assert match is not None
        # The whole is its parts.
        parts = [float(seconds) for seconds in re.findall(r" ([\d.]+) s", match[3])]
        assert float(match[2]) == pytest.approx(sum(parts), abs=1e-3 * len(parts))
        # The other rank may have completed the step in which one was killed.
        assert reports[0]["resumed_from"] <= int(match[1]) <= KILL_AT + 1, story(daemon, run, before, after)
    assert daemon.events("start_phases", run), "the first start had phases, too"


@pytest.mark.slow
def test_a_script_that_was_killed_tells_of_its_imports_and_ckptctl_shows_it(
    daemon: DaemonProcess, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    run = uuid.uuid4().hex[:8]
    script.write_text(SCRIPT_OF.replace("RUN", run))
    assert start(script, daemon, variables={"KILL_AT": "9"}).code != 0
    eventually(lambda: daemon.events("trainer_gone", run) != [], "the daemon knows of the death")
    again = start(script, daemon, fresh=True)
    assert again.code == 0, again.printed
    (text,) = daemon.events("recovery_phases", run)
    # Alone on its node it has no others.
    wanted = [phase for phase in Phase if phase not in (Phase.DETECTED, Phase.OTHERS_STOPPED)]
    assert re.findall(r"(\w+) [\d.]+ s(?:,|$)", text) == wanted, text
    assert " s from detected to first_new_step: process_there " in text
    (line,) = [
        each for each in again.printed.splitlines() if each.startswith(f"start     phases/{run} rank 0")
    ]
    assert text.partition("first_new_step: ")[2] in line
    listed = subprocess.run(
        [sys.executable, "-m", "ckptd.ctl", "events", "--limit", "10000"],
        env=environment(daemon),
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    ).stdout
    assert any("recovery_phases" in each and text in each for each in listed.splitlines()), listed
