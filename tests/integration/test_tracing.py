"""Spans that really arrive at a collector: their parent is the client's, and they hold figures and no text."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from peagle import PhaseListener
from server.engine_bundle import EngineBundle
from server.main import create_app
from server.settings import ServerConfig, Settings
from tests.builders.engine import engine_config, write_checkpoint
from tests.builders.server import DEADLINE_S, MODEL, chat_body, engine_starter, eventually_sync, live_server_of

TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PROMPT = "a secret word"


@contextmanager
def collector() -> Iterator[tuple[str, list[Any]]]:
    """A URL, and the spans that came to it."""
    spans: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            request = ExportTraceServiceRequest()
            request.ParseFromString(self.rfile.read(int(self.headers["content-length"])))
            spans.extend(span for one in request.resource_spans for scope in one.scope_spans for span in scope.spans)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            """Quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/v1/traces", spans
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def attributes_of(span: Any) -> dict[str, Any]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in span.attributes}


def test_a_request_and_its_answer_are_spans_of_the_clients_trace(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "tiny", max_position_embeddings=512)

    start = engine_starter(engine_config(directory, max_model_len=256, num_kv_blocks=256))
    with collector() as (url, spans):
        with live_server_of(start, otlp_traces_endpoint=url, served_model_name=(MODEL,)) as server:
            headers = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01"}
            for stream in (False, True):
                body = chat_body(
                    messages=[{"role": "user", "content": PROMPT}], max_tokens=5, ignore_eos=True, stream=stream
                )
                reply = httpx.post(f"{server.url}/v1/chat/completions", json=body, headers=headers, timeout=DEADLINE_S)
                assert reply.status_code == 200
            refused = httpx.post(f"{server.url}/v1/chat/completions", json=chat_body(n=0), timeout=DEADLINE_S)
            assert refused.status_code == 400
            server.app.state.tracing.shutdown()
            eventually_sync(lambda: len(spans) >= 5)
    requests = [span for span in spans if span.name == "POST /v1/chat/completions"]
    answers = [span for span in spans if span.name == "generate"]
    assert (len(requests), len(answers)) == (3, 2)
    traced = [span for span in requests if span.trace_id.hex() == TRACE_ID]
    assert [span.parent_span_id.hex() for span in traced] == [PARENT_ID] * 2
    assert sorted(attributes_of(span)["http.response.status_code"] for span in requests) == [200, 200, 400]
    assert {span.parent_span_id for span in answers} == {span.span_id for span in traced}
    for span in answers:
        found = attributes_of(span)
        assert found["gen_ai.usage.output_tokens"] == 5
        assert found["gen_ai.request.model"] == MODEL
        assert span.start_time_unix_nano < span.end_time_unix_nano
        assert [event.name for event in span.events] == ["scheduled", "first token"]
    assert PROMPT not in str(spans)


def test_without_a_collector_there_is_no_tracing() -> None:
    def never(on_phase: PhaseListener) -> EngineBundle:
        raise AssertionError

    assert create_app(Settings(), never).state.tracing is None


def test_a_collector_that_is_not_there_disturbs_nobody(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from tests.builders.server import live_server
    from tests.fakes import ScriptedEngine

    with live_server(ScriptedEngine(), otlp_traces_endpoint="http://127.0.0.1:9/v1/traces") as server:
        reply = httpx.post(f"{server.url}/v1/chat/completions", json=chat_body(), timeout=DEADLINE_S)
        assert reply.status_code == 200


def test_the_endpoint_is_an_option() -> None:
    assert ServerConfig(otlp_traces_endpoint="http://c/v1/traces").otlp_traces_endpoint == "http://c/v1/traces"
