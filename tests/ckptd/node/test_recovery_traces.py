"""Spans of recoveries: their ids and times, and what a daemon does if nobody takes them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest

from ckptd.core.recovery.recovery_phases import RecoveryPhase, ToldStart
from ckptd.event_log import EventLog
from tests.ckptd.running import eventually
from tests.ports import free_port

pytestmark = pytest.mark.skipif(
    not find_spec("opentelemetry"), reason="opentelemetry is not installed: pip install ckptd[test]"
)

SECOND = 10**9
TOLD = ToldStart(
    "job",
    "run",
    0,
    2,
    epoch=3,
    iteration=37,
    recovery=True,
    began_with=RecoveryPhase.DETECTED,
    durations={RecoveryPhase.IMPORTS: 2.0, RecoveryPhase.LOADED: 0.5, RecoveryPhase.FIRST_NEW_STEP: 0.25},
    ended_ns=1_700_000_000 * SECOND,
    tier="peers",
    policy="sparse",
)


def spans_of(told: ToldStart) -> dict[str, Any]:
    from ckptd.node.recovery_traces import spans_of

    return {span.name: span for span in spans_of(told)}


def test_phases_follow_each_other_under_their_rank_and_that_under_the_recovery() -> None:
    found = spans_of(TOLD)
    assert list(found) == ["detected", "imports", "loaded", "first_new_step", "rank 0", "recovery"]
    begun = TOLD.ended_ns - 2750 * SECOND // 1000
    ends = [begun, begun + 2 * SECOND, begun + 5 * SECOND // 2, TOLD.ended_ns]
    assert [found[name].end_time for name in list(found)[:4]] == ends
    assert [found[name].start_time for name in list(found)[:4]] == [begun, *ends[:3]]
    for name in ("rank 0", "recovery"):
        assert (found[name].start_time, found[name].end_time) == (begun, TOLD.ended_ns)
    assert found["recovery"].parent is None
    assert found["rank 0"].parent == found["recovery"].context
    assert all(found[name].parent == found["rank 0"].context for name in list(found)[:4])
    assert dict(found["loaded"].attributes) == {
        "ckptd.job": "job",
        "ckptd.run": "run",
        "ckptd.rank": 0,
        "ckptd.world_size": 2,
        "ckptd.epoch": 3,
        "ckptd.iteration": 37,
        "ckptd.tier": "peers",
        "ckptd.policy": "sparse",
    }


def test_ranks_are_in_one_trace_with_ids_of_their_own() -> None:
    one, other = spans_of(TOLD), spans_of(replace(TOLD, rank=1))
    assert "recovery" not in other
    assert other["rank 1"].parent == one["recovery"].context
    contexts = [span.context for span in (*one.values(), *other.values())]
    assert len({each.trace_id for each in contexts}) == 1
    assert len({each.span_id for each in contexts}) == len(contexts)


def test_another_recovery_is_another_trace() -> None:
    ids = {
        spans_of(told)["rank 0"].context.trace_id
        for told in (TOLD, replace(TOLD, epoch=4), replace(TOLD, run="other"), replace(TOLD, job="other"))
    }
    assert len(ids) == 4


needs_grpc = pytest.mark.skipif(
    not find_spec("opentelemetry.exporter.otlp.proto.grpc") if find_spec("opentelemetry") else True,
    reason="the exporter over gRPC is not installed: pip install ckptd[test]",
)


@needs_grpc
@pytest.mark.parametrize("named_by", ["setting", "variables"])
def test_a_collector_over_grpc_gets_the_spans(named_by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import grpc
    from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

    from ckptd.node.recovery_traces import RecoveryTraces

    heard: list[tuple[Any, dict[str, str]]] = []

    class Collector(trace_service_pb2_grpc.TraceServiceServicer):
        def Export(self, request: Any, context: Any) -> Any:
            heard.append((request, dict(context.invocation_metadata())))
            return trace_service_pb2.ExportTraceServiceResponse()

    server = grpc.server(ThreadPoolExecutor(1))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(Collector(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "key=of-the-user")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{port}")
    events = EventLog(16)
    node: Any = SimpleNamespace(node_id="n", events=events, post=lambda work: work())
    traces = RecoveryTraces(node, f"grpc://127.0.0.1:{port}" if named_by == "setting" else "grpc:")
    try:
        traces.tell(TOLD)
        eventually(lambda: events.counters["otel.sent"] == 1, "the collector has answered")
    finally:
        traces.close()
        server.stop(None)
    [(request, metadata)] = heard
    [resource] = request.resource_spans
    spans = {span.name: span for scope in resource.scope_spans for span in scope.spans}
    assert {name: span.span_id for name, span in spans.items()} == {
        name: span.context.span_id.to_bytes(8) for name, span in spans_of(TOLD).items()
    }
    assert {each.key for each in resource.resource.attributes} >= {"service.name", "ckptd.node"}
    assert metadata["key"] == "of-the-user"


@pytest.mark.parametrize("scheme", ["http", pytest.param("grpc", marks=needs_grpc)])
def test_a_collector_that_is_away_costs_a_counter_and_one_line(
    scheme: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ckptd.node.recovery_traces import RecoveryTraces

    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.2")
    events = EventLog(16)

    def post(work: Callable[[], None]) -> None:
        work()

    node: Any = SimpleNamespace(node_id="n", events=events, post=post)
    path = "/v1/traces" if scheme == "http" else ""
    traces = RecoveryTraces(node, f"{scheme}://127.0.0.1:{free_port()}{path}")
    try:
        for number in range(1, 4):
            traces.tell(TOLD)
            eventually(lambda: events.counters["otel.failed"] == number, "it has given up")  # noqa: B023
    finally:
        traces.close()
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(said) == 1, said
    assert said[0].startswith("a trace of a recovery was not sent (counter otel.failed): ")
    assert len(said[0]) > len("a trace of a recovery was not sent (counter otel.failed): ")


def test_the_daemon_drains_while_a_slow_collector_takes_the_last_trace() -> None:
    """It waited for the collector first, with the loop, before slots were sealed."""
    from ckptd.node.recovery_traces import RecoveryTraces

    asked, may_answer = threading.Event(), threading.Event()

    class Slow(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            asked.set()
            may_answer.wait(60)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Nothing."""

    events = EventLog(16)
    node: Any = SimpleNamespace(node_id="n", events=events, post=lambda work: work())
    with ThreadingHTTPServer(("127.0.0.1", 0), Slow) as collector:
        threading.Thread(target=collector.serve_forever, daemon=True).start()
        traces = RecoveryTraces(node, f"http://127.0.0.1:{collector.server_port}/v1/traces")
        traces.tell(TOLD)
        assert asked.wait(60)
        traces.end()
        assert not events.counters, "the collector has not answered yet"
        may_answer.set()
        eventually(lambda: events.counters["otel.sent"] == 1, "it has answered")
        traces.close()
        collector.shutdown()
