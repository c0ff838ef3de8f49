"""HTTP and the real engine together, on a tiny random model: answers, broken connections, and blocks given back."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

import peagle
from peagle import CacheConfig, EngineConfig, EngineStats, LoadedEngine, ModelConfig, PhaseListener, SchedulerConfig
from server.engine_bundle import EngineBundle
from tests.builders.model import write_model
from tests.builders.server import DEADLINE_S, MODEL, LiveServer, chat_body, eventually, eventually_sync, live_server_of
from tests.builders.tokenizer import build_tokenizer_directory


@dataclass(frozen=True, slots=True)
class RealServer:
    """A live server, and the engine behind it for its self-check."""

    server: LiveServer
    loaded: LoadedEngine

    @property
    def url(self) -> str:
        return self.server.url

    def stats(self) -> EngineStats:
        """The engine's latest snapshot."""
        bundle = self.server.lifecycle.bundle
        assert bundle is not None
        return bundle.engine.stats()

    def num_ended(self) -> int:
        """Requests that have ended, for whatever reason."""
        return sum(self.stats().requests_by_reason.values())

    @contextmanager
    def expect_clean_end(self, num_requests: int) -> Iterator[None]:
        """After the block so many requests have ended, nothing runs, no KV block is in use, and the books balance."""
        num_ended = self.num_ended() + num_requests
        yield
        eventually_sync(lambda: self.num_ended() == num_ended)
        stats = self.stats()
        assert (stats.num_running, stats.num_waiting, stats.kv_cache_usage) == (0, 0, 0.0)
        self.loaded.engine.check_integrity()


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    directory: Path = build_tokenizer_directory(write_model(tmp_path_factory.mktemp("tiny")))
    config = EngineConfig(
        model=ModelConfig(model=str(directory), dtype="float64", device="cpu", max_model_len=512, num_threads=1),
        cache=CacheConfig(num_kv_blocks=96),
        scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64),
    )
    loaded: list[LoadedEngine] = []

    def start(on_phase: PhaseListener) -> EngineBundle:
        loaded.append(peagle.load_engine(config, on_phase))
        tokenizer = loaded[0].tokenizer
        engine = peagle.start_engine(loaded[0])
        return EngineBundle(engine=engine, tokenizer=tokenizer, chat_template=tokenizer.chat_template, model_id=MODEL)

    with live_server_of(start) as server:
        yield RealServer(server, loaded[0])


async def ask(client: openai.AsyncOpenAI, text: str, *, temperature: float, stream: bool) -> tuple[str, str | None]:
    """The answer and its finish reason."""
    messages: list[openai.types.chat.ChatCompletionMessageParam] = [{"role": "user", "content": text}]
    if not stream:
        whole = await client.chat.completions.create(
            model=MODEL, messages=messages, temperature=temperature, seed=7, max_tokens=24
        )
        return whole.choices[0].message.content or "", whole.choices[0].finish_reason
    chunks = await client.chat.completions.create(
        model=MODEL, messages=messages, temperature=temperature, seed=7, max_tokens=24, stream=True
    )
    choices = [chunk.choices[0] async for chunk in chunks]
    return "".join(choice.delta.content or "" for choice in choices), choices[-1].finish_reason


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_streamed_or_whole_the_answer_is_the_same(real: RealServer, temperature: float) -> None:
    texts = ["hello", "the thin hen", "ü 🙂"]
    url = f"{real.url}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        whole = [await ask(client, text, temperature=temperature, stream=False) for text in texts]
        streamed = await asyncio.gather(*[ask(client, t, temperature=temperature, stream=True) for t in texts])
    assert whole == streamed
    assert len(set(whole)) == len(texts)


def test_clients_that_leave_a_stream_give_their_blocks_back(real: RealServer) -> None:
    url, body = f"{real.url}/v1/chat/completions", chat_body(max_tokens=400, stream=True)
    for num_events in (0, 1, 3):
        with real.expect_clean_end(1), httpx.stream("POST", url, json=body, timeout=DEADLINE_S) as response:
            lines = response.iter_lines()
            for _ in range(num_events):
                next(lines)
    assert real.stats().requests_by_reason["abort"] >= 3


async def test_clients_that_leave_before_a_whole_answer_give_their_blocks_back(real: RealServer) -> None:
    with real.expect_clean_end(1):
        async with httpx.AsyncClient(timeout=DEADLINE_S) as client:
            asking = asyncio.create_task(client.post(f"{real.url}/v1/chat/completions", json=chat_body(max_tokens=400)))
            await eventually(lambda: real.stats().num_running == 1)
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking


def test_refused_requests_leave_no_trace(real: RealServer) -> None:
    url = f"{real.url}/v1/chat/completions"
    refused: list[dict[str, Any]] = [
        {"temperature": -1},
        {"max_tokens": 0},
        {"max_tokens": 10_000},
        {"logit_bias": {"99999": 1}},
    ]
    with real.expect_clean_end(0):
        for fields in refused:
            assert httpx.post(url, json=chat_body(**fields), timeout=DEADLINE_S).status_code == 400
    metrics = httpx.get(f"{real.url}/metrics", timeout=DEADLINE_S).text
    assert 'vllm:num_requests_running{engine="0",model_name="acme/tiny"} 0\n' in metrics
    assert httpx.get(f"{real.url}/health", timeout=DEADLINE_S).json() == {}
