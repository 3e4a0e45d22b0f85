"""Traces of recoveries for OpenTelemetry: one trace a recovery, a span for each phase, over OTLP.

All ranks of a recovery are in one trace, whichever node they are on: its id follows from job, run and epoch,
so nothing is exchanged. The span of the whole recovery comes from rank 0's daemon, and its id follows, too.
Under it is a span for each rank, and under that one for each phase, by the names of `RecoveryPhase`.

The daemon's loop only puts what a trainer told into a queue. A thread makes the spans and sends them; a
collector that is slow, away or refuses costs a counter (``otel.failed``) and one line in the log.
"""

from __future__ import annotations

import hashlib
import logging
import queue
import threading
from collections.abc import Iterator
from contextlib import suppress

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, TraceFlags

import ckptd
from ckptd.core.recovery.recovery_phases import ToldStart
from ckptd.node_context import NodeContext

logger = logging.getLogger(__name__)

_WAITING = 1024  # ranks whose spans were not made yet
_TOGETHER = 64  # ranks whose spans are sent together
_LAST_S = 2.0  # for what is still to be sent when the daemon stops
_SCOPE = InstrumentationScope("ckptd", ckptd.__version__)


class RecoveryTraces:
    """Sends what it is told in a thread of its own.

    Args:
        endpoint: the URL for traces, as of `traces_wanted`.
    Raises:
        ModuleNotFoundError: the exporter for it is not installed.
    """

    def __init__(self, node: NodeContext, endpoint: str) -> None:
        self._node = node
        self._exporter = _exporter(endpoint)
        self._resource = Resource.create({"service.name": "ckptd", "ckptd.node": node.node_id})
        self._said = _LastWarning()
        self._queue: queue.Queue[ToldStart | None] = queue.Queue(_WAITING)
        self._failing = False
        self._thread = threading.Thread(target=self._run, name="traces", daemon=True)
        self._thread.start()

    def tell(self, told: ToldStart) -> None:
        """Send the spans of a rank soon; on the daemon's loop, never waits."""
        try:
            self._queue.put_nowait(told)
        except queue.Full:
            self._node.events.count("otel.dropped")

    def end(self) -> None:
        """Begin the end: what is left is sent; never waits."""
        with suppress(queue.Full):
            self._queue.put_nowait(None)

    def close(self) -> None:
        """End; waits a moment for what is left."""
        self.end()  # again: the queue may have been full
        self._thread.join(_LAST_S)
        self._exporter.shutdown()  # ends its retries
        self._said.remove()

    # -- on the thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        while (first := self._queue.get()) is not None:
            told, over = [first], False
            while len(told) < _TOGETHER and not over:
                try:
                    following = self._queue.get_nowait()
                except queue.Empty:
                    break
                over = following is None
                told += [] if following is None else [following]
            self._send(told)
            if over:
                return

    def _send(self, told: list[ToldStart]) -> None:
        try:
            spans = [span for each in told for span in spans_of(each, self._resource)]
            failed = self._exporter.export(spans) is not SpanExportResult.SUCCESS
            why = self._said.text
        # Whatever a foreign library raises: its next trace may be sent.
        except Exception as error:  # noqa: BLE001 - it is logged below, once
            failed, why = True, repr(error)
        if failed and not self._failing:
            logger.warning("a trace of a recovery was not sent (counter otel.failed): %s", why)
        self._failing = failed
        self._node.post(lambda: self._node.events.count("otel.failed" if failed else "otel.sent", len(told)))


def _exporter(endpoint: str) -> SpanExporter:
    """Headers, certificates, compression and the timeout come from OpenTelemetry's variables."""
    if not endpoint.startswith("grpc"):
        from opentelemetry.exporter.otlp.proto.http import trace_exporter as over_http

        return over_http.OTLPSpanExporter(endpoint or None)
    from opentelemetry.exporter.otlp.proto.grpc import trace_exporter as over_grpc

    scheme, _, address = endpoint.partition("://")
    if not address:
        return over_grpc.OTLPSpanExporter()
    return over_grpc.OTLPSpanExporter(f"{'https' if scheme == 'grpcs' else 'http'}://{address}")


class _LastWarning(logging.Handler):
    """Keeps what the exporter says instead of logging it: it warns of each attempt."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.text = ""
        self._library = logging.getLogger("opentelemetry")
        self._library.addHandler(self)
        self._library.propagate = False

    def emit(self, record: logging.LogRecord) -> None:
        self.text = record.getMessage()

    def remove(self) -> None:
        self._library.removeHandler(self)
        self._library.propagate = True


# -- spans ----------------------------------------------------------------------------------------


def spans_of(told: ToldStart, resource: Resource | None = None) -> Iterator[ReadableSpan]:
    """The spans of a rank; rank 0's are followed by that of the whole recovery."""
    trace_id = _number(16, told.job, told.run, told.epoch)
    root, rank = _context(trace_id), _context(trace_id, told.rank)
    about: dict[str, str | int] = {
        "ckptd.job": told.job,
        "ckptd.run": told.run,
        "ckptd.epoch": told.epoch,
        "ckptd.world_size": told.world_size,
        "ckptd.iteration": told.iteration,
    }
    of_rank = {**about, "ckptd.rank": told.rank, "ckptd.tier": told.tier, "ckptd.policy": told.policy}
    begun_ns = told.ended_ns - round(sum(told.durations.values()) * 1e9)

    def span(
        name: str, context: SpanContext, parent: SpanContext | None, from_ns: int, to_ns: int
    ) -> ReadableSpan:
        return ReadableSpan(
            name,
            context,
            parent,
            resource,
            about if parent is None else of_rank,
            start_time=from_ns,
            end_time=to_ns,
            instrumentation_scope=_SCOPE,
        )

    at_ns, elapsed_s = begun_ns, 0.0
    if told.began_with is not None:
        yield span(told.began_with, _context(trace_id, told.rank, told.began_with), rank, at_ns, at_ns)
    for phase, seconds in told.durations.items():
        elapsed_s += seconds
        end_ns = begun_ns + round(elapsed_s * 1e9)
        yield span(phase, _context(trace_id, told.rank, phase), rank, at_ns, end_ns)
        at_ns = end_ns
    yield span(f"rank {told.rank}", rank, root, begun_ns, told.ended_ns)
    if told.rank == 0:
        yield span("recovery" if told.recovery else "start", root, None, begun_ns, told.ended_ns)


def _context(trace_id: int, *what: object) -> SpanContext:
    span_id = _number(8, trace_id, *what)
    return SpanContext(trace_id, span_id, is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))


def _number(size_bytes: int, *parts: object) -> int:
    """A number that follows from the parts, the same on every node."""
    text = "\0".join(map(str, parts))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=size_bytes).digest())
