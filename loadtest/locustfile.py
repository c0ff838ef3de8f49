"""Load on a running server, as people would make it: streamed chats, measured per token. See docs/deploy.md.

    locust -f loadtest/locustfile.py --headless --host http://127.0.0.1:8000 -u 4 -r 4 -t 60s
    ... --arrival poisson --rate 3              requests come when they come, whether or not the server keeps up
    ... --compare-with http://127.0.0.1:8001    the same request to both servers; the answers must be equal
    ... --abort-share 0.2                       some clients leave in the middle
    locust -f loadtest/locustfile.py,loadtest/steps.py ...     the load rises in steps

Each option is also a variable: --rate is LOADTEST_RATE. The events of type LLM are times in milliseconds, except
`tokens per chunk x1000`. They count as requests in Locust's totals: the lines of type POST have the rate of requests.
The exit code is 1 if a limit is exceeded, a request failed, or the server keeps running what its clients have left.
"""

from __future__ import annotations

import itertools
import json
import logging
import random
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

import gevent
import requests
from chat_stream import BrokenStreamError, ChatMeasurement, measure
from gevent.pool import Group
from locust import HttpUser, events, task
from locust.argument_parser import LocustArgumentParser
from locust.env import Environment
from urllib3 import PoolManager

logger = logging.getLogger("loadtest")

CHAT = "/v1/chat/completions"
TIMEOUT_S = (5, 120)  # to connect, and between chunks: the server sends a comment every 15 s
USER_NUMBERS = itertools.count()  # so that each user draws its own numbers, and the next run the same
SETTLE_S = 15.0  # a server that aborts at the next step is idle long before
PROMPTS = (
    "What is the capital of France?",
    "Explain in three sentences why the sky is blue.",
    "Write a short poem about a lighthouse in winter.",
    "List five uses of a paper clip.",
    "Repeat word for word: the quick brown fox jumps over the lazy dog.",
    "Write a Python function that returns the n-th Fibonacci number.",
)


@events.init_command_line_parser.add_listener
def add_options(parser: LocustArgumentParser) -> None:
    """Describe our options; Locust adds its own."""

    def add(name: str, **details: Any) -> None:
        parser.add_argument(name, env_var="LOADTEST_" + name.removeprefix("--").replace("-", "_").upper(), **details)

    add("--model", default="", help="name of the model; default: the first that the server lists")
    add("--max-tokens", type=int, default=64, help="longest answer")
    add("--prompts", default="", help="JSONL file whose lines have `prompt`, or `turns`, whose first is used")
    add("--prefix-words", type=int, default=0, help="words of a system prompt that all requests share")
    add("--load-seed", type=int, default=0, help="of the choice of prompts, arrivals and leavers")
    add("--arrival", choices=("closed", "poisson"), default="closed", help="ask again when answered, or at --rate")
    add("--rate", type=float, default=1.0, help="poisson: requests a second, of all users together")
    add("--abort-share", type=float, default=0.0, help="share of the clients that leave in the middle of an answer")
    add("--compare-with", default="", help="base URL of a second server, such as one without speculation")
    add("--limit-first-token-ms", type=float, default=0.0, help="95th percentile of the first token; 0: no limit")
    add("--limit-per-token-ms", type=float, default=0.0, help="95th percentile of the time per token; 0: no limit")
    add("--limit-refused", type=float, default=0.0, help="share of requests that may be refused with Retry-After")


class ChatUser(HttpUser):
    """Asks, reads, asks again; or lets requests start at random times, each in a greenlet of its own."""

    pool_manager = PoolManager(maxsize=1024)  # an open arrival has many requests under way

    def on_start(self) -> None:
        """Read the options."""
        self.options: Namespace = self.environment.parsed_options
        self.prompts = _read_prompts(self.options.prompts)
        self.random = random.Random(f"{self.options.load_seed} {next(USER_NUMBERS)}")
        self.model = self.options.model or self._first_model()
        self.under_way = Group()

    def on_stop(self) -> None:
        """Let what is under way finish; Locust's --stop-timeout bounds it."""
        self.under_way.join()

    @task
    def chat(self) -> None:
        """One request of a closed loop, or one arrival of an open one."""
        if self.options.arrival == "closed":
            self._ask()
            return
        num_users = max(1, self.environment.runner.target_user_count)
        gevent.sleep(self.random.expovariate(self.options.rate / num_users))  # the sum of these is Poisson as well
        self.under_way.spawn(self._ask)

    def _ask(self) -> None:
        body = self._body()
        if self.random.random() < self.options.abort_share:
            self._leave_early(body)
            return
        answer = self._stream(self.host, body, "")
        if answer is None or not self.options.compare_with:
            return
        other = self._stream(self.options.compare_with, body, " (compared)")
        if other is not None:
            differs = ValueError(f"answers differ: {answer.text[:80]!r}, {other.text[:80]!r}")
            _fire("answers equal", 0.0, None if answer.text == other.text else differs)

    def _stream(self, base_url: str, body: dict[str, Any], suffix: str) -> ChatMeasurement | None:
        started_at = time.perf_counter()
        with self._post(base_url, body, CHAT + suffix) as reply:
            if not self._is_answered(reply):
                return None
            try:
                answer = measure(reply.iter_lines(), started_at=started_at)
            except (BrokenStreamError, requests.RequestException, ValueError) as error:
                reply.failure(f"{type(error).__name__}: {error}")
                return None
            reply.success()
        _report(answer, suffix)
        return answer

    def _leave_early(self, body: dict[str, Any]) -> None:
        num_chunks = self.random.randint(1, 5)

        def count() -> None:
            nonlocal num_chunks
            num_chunks -= 1
            if num_chunks == 0:
                raise _LeavingError

        started_at = time.perf_counter()
        with self._post(self.host, body, CHAT + " (left)") as reply:
            if not self._is_answered(reply):
                return
            try:
                measure(reply.iter_lines(), started_at=started_at, on_chunk=count)
            except _LeavingError:
                reply.close()
            except (BrokenStreamError, requests.RequestException, ValueError) as error:
                reply.failure(f"{type(error).__name__}: {error}")
                return
            reply.success()

    def _is_answered(self, reply: Any) -> bool:
        """False if not, and then what it was has been counted. A server that is full may say so, with Retry-After."""
        if reply.status_code == 200:
            return True
        if reply.status_code in (429, 503) and reply.headers.get("Retry-After", "").isdigit():
            reply.success()
            _fire("refused", 0.0)
            gevent.sleep(min(5, int(reply.headers["Retry-After"])))
        else:
            reply.failure(f"HTTP {reply.status_code}: {reply.text[:200]}")
        return False

    def _post(self, base_url: str, body: dict[str, Any], name: str) -> Any:
        url = base_url.rstrip("/") + CHAT
        return self.client.post(url, json=body, name=name, stream=True, catch_response=True, timeout=TIMEOUT_S)

    def _body(self) -> dict[str, Any]:
        messages = [{"role": "user", "content": self.random.choice(self.prompts)}]
        if num_words := self.options.prefix_words:
            prefix = " ".join(f"Rule {index}." for index in range((num_words + 1) // 2))
            messages.insert(0, {"role": "system", "content": prefix})
        return {
            "model": self.model,
            "messages": messages,
            "max_tokens": self.options.max_tokens,
            "temperature": 0,  # so that two servers can be compared
            "stream": True,
            "stream_options": {"include_usage": True},
        }

    def _first_model(self) -> str:
        reply = self.client.get("/v1/models")
        reply.raise_for_status()
        name: str = reply.json()["data"][0]["id"]
        return name


class _LeavingError(Exception):
    """The client has read enough."""


def _read_prompts(path: str) -> list[str]:
    if not path:
        return list(PROMPTS)
    rows = [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines() if line.strip()]
    return [row["turns"][0] if "turns" in row else row["prompt"] for row in rows]


def _fire(name: str, milliseconds: float, exception: Exception | None = None) -> None:
    events.request.fire(
        request_type="LLM", name=name, response_time=milliseconds, response_length=0, exception=exception, context={}
    )


def _report(answer: ChatMeasurement, suffix: str) -> None:
    _fire("first token" + suffix, answer.first_token_s * 1e3)
    _fire("whole answer" + suffix, answer.last_token_s * 1e3)
    if answer.time_per_token_s is not None:
        _fire("per token" + suffix, answer.time_per_token_s * 1e3)
    for gap in answer.gaps_s:
        _fire("between chunks" + suffix, gap * 1e3)
    _fire("tokens per chunk x1000" + suffix, answer.tokens_per_chunk * 1e3)


@events.quitting.add_listener
def judge(environment: Environment, **_: Any) -> None:
    """Compare with the limits, and set the exit code."""
    problems = [*_exceeded(environment), *_left_running(environment.host)]
    for problem in problems:
        logger.error(problem)
    if problems:
        environment.process_exit_code = 1


def _exceeded(environment: Environment) -> list[str]:
    options, stats = environment.parsed_options, environment.stats
    asked = stats.get(CHAT, "POST").num_requests + stats.get(CHAT + " (left)", "POST").num_requests
    problems = [] if asked else ["no request was made"]
    if stats.total.num_failures:
        problems.append(f"{stats.total.num_failures} failures")
    for name, limit in (("first token", options.limit_first_token_ms), ("per token", options.limit_per_token_ms)):
        reached = stats.get(name, "LLM").get_response_time_percentile(0.95) or 0
        if limit and reached > limit:
            problems.append(f"{name}: the 95th percentile is {reached:.0f} ms, the limit {limit:.0f} ms")
    refused = stats.get("refused", "LLM").num_requests
    if refused > options.limit_refused * asked:
        problems.append(f"{refused} of {asked} requests were refused, above the share of {options.limit_refused}")
    return problems


def _left_running(host: str) -> list[str]:
    """What the server still computes although every client is gone. Nothing may be left."""
    give_up_at = time.monotonic() + SETTLE_S
    while True:
        try:
            text = requests.get(host.rstrip("/") + "/metrics", timeout=TIMEOUT_S).text
        except requests.RequestException as error:
            return [f"/metrics does not answer: {error}"]
        lines = [line for line in text.splitlines() if line.startswith("vllm:num_requests_running")]
        num_running = sum(float(line.rsplit(" ", 1)[1]) for line in lines)
        if num_running == 0:
            return []
        if time.monotonic() > give_up_at:
            return [f"the server still runs {num_running:.0f} requests that nobody waits for"]
        gevent.sleep(0.5)
