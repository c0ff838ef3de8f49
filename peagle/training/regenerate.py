"""Lets the target answer prompts, so that a head learns what the target says and not what somebody else wrote.

Owns the run: who is asked next, what is written where, what the terminal shows. A run can be stopped at any moment and
started again with the same command. Refuses to know models; the target is behind an HTTP API, ours or another's.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm

from peagle.errors import ConfigError
from peagle.training.chat_endpoint import (
    Answer,
    ChatEndpoint,
    EndpointError,
    Failure,
    FailureKind,
    RetryPolicy,
    open_client,
)
from peagle.training.prompts import Prompt, read_prompts
from peagle.training.response_file import ResponseFile


@dataclass(frozen=True, slots=True, kw_only=True)
class RegenerateConfig:
    """What to ask, whom, and how.

    Attributes:
        temperatures: given to the prompts in turn, by their line, so that `0, 0, 0.7` answers two thirds greedily.
        licences: only prompts under these; empty means all.
        limit: at most so many prompts.
    """

    prompts: Path
    output: Path
    base_url: str
    model: str | None = None
    api_key: str | None = field(default=None, repr=False)
    concurrency: int = 8
    max_tokens: int = 384
    temperatures: tuple[float, ...] = (0.0, 0.0, 0.7)
    licences: tuple[str, ...] = ()
    limit: int | None = None

    def __post_init__(self) -> None:
        for name in ("concurrency", "max_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.limit is not None and self.limit < 1:
            raise ConfigError(f"limit must be at least 1, got {self.limit}")
        if not self.temperatures or not all(0.0 <= value <= 2.0 for value in self.temperatures):
            raise ConfigError(f"temperatures must be between 0 and 2, got {list(self.temperatures)}")
        if not self.output.parent.is_dir():
            raise ConfigError(f"there is no directory {self.output.parent} for the output")


@dataclass(slots=True, kw_only=True)
class RegenerateReport:
    """What became of the prompts."""

    num_prompts: int
    num_already: int  # answered by an earlier run
    num_answered: int = 0
    num_too_long: int = 0
    num_failed: int = 0  # without those too long
    num_tokens: int = 0
    wall_s: float = 0.0

    @property
    def tokens_per_s(self) -> float:
        """Tokens of this run's answers a second."""
        return self.num_tokens / self.wall_s if self.wall_s else 0.0

    def summary(self) -> str:
        """One line for the terminal."""
        return (
            f"{self.num_answered:,} of {self.num_prompts:,} prompts answered ({self.num_already:,} before), "
            f"{self.num_too_long:,} too long, {self.num_failed:,} failed; "
            f"{self.num_tokens:,} tokens in {self.wall_s:.0f} s, {self.tokens_per_s:.0f} tokens/s"
        )


def regenerate(config: RegenerateConfig, *, retry: RetryPolicy | None = None) -> RegenerateReport:
    """Ask for every answer that the output does not have yet.

    Failures are listed beside the output, in `failures_path`, and asked again by the next run.

    Raises:
        ConfigError: prompts or output cannot be used.
        EndpointError: there is no server, or there is none any more.
    """
    prompts = read_prompts(config.prompts, licences=config.licences, limit=config.limit)
    listed = failures_path(config.output)
    listed.unlink(missing_ok=True)
    try:
        with ResponseFile(config.output) as output, ResponseFile(listed) as failures:
            return asyncio.run(_Run(config, prompts, output=output, failures=failures).run(retry))
    finally:
        if listed.exists() and not listed.stat().st_size:
            listed.unlink()


def failures_path(output: Path) -> Path:
    """Where a run lists the prompts that have no answer."""
    return output.with_name(output.name + ".failures.jsonl")


class _Run:
    """One run: workers take prompts, and write what comes of them."""

    def __init__(
        self, config: RegenerateConfig, prompts: Sequence[Prompt], *, output: ResponseFile, failures: ResponseFile
    ) -> None:
        waiting = [prompt for prompt in prompts if prompt.id not in output.ids]
        self._config = config
        self._output = output
        self._failures = failures
        self._waiting = iter(waiting)
        self._report = RegenerateReport(num_prompts=len(prompts), num_already=len(prompts) - len(waiting))

    async def run(self, retry: RetryPolicy | None) -> RegenerateReport:
        config, report = self._config, self._report
        if report.num_already == report.num_prompts:
            return report
        started_s = time.perf_counter()
        with tqdm(total=report.num_prompts, initial=report.num_already, unit="prompt", file=sys.stderr) as bar:
            async with open_client(config.base_url, api_key=config.api_key, concurrency=config.concurrency) as client:
                endpoint = ChatEndpoint(client, retry)
                model = await endpoint.choose_model(config.model)
                try:
                    async with asyncio.TaskGroup() as group:
                        for _ in range(config.concurrency):
                            group.create_task(self._work(endpoint, model, bar, started_s))
                except* (EndpointError, ConfigError) as errors:
                    raise errors.exceptions[0] from None
        report.wall_s = time.perf_counter() - started_s
        return report

    async def _work(self, endpoint: ChatEndpoint, model: str, bar: Any, started_s: float) -> None:
        for prompt in self._waiting:
            result = await endpoint.answer(self._body(prompt, model))
            self._record(prompt, result)
            rate = self._report.num_tokens / (time.perf_counter() - started_s)
            bar.set_postfix_str(f"{rate:.0f} tokens/s, {self._report.num_failed} failed", refresh=False)
            bar.update()

    def _temperature(self, prompt: Prompt) -> float:
        return self._config.temperatures[prompt.index % len(self._config.temperatures)]

    def _body(self, prompt: Prompt, model: str) -> dict[str, Any]:
        temperature = self._temperature(prompt)
        body = {
            "model": model,
            "messages": prompt.messages,
            "max_tokens": self._config.max_tokens,
            "temperature": temperature,
        }
        return body if temperature == 0.0 else {**body, "seed": prompt.index}

    def _record(self, prompt: Prompt, result: Answer | Failure) -> None:
        report = self._report
        if isinstance(result, Failure):
            report.num_too_long += result.kind is FailureKind.TOO_LONG
            report.num_failed += result.kind is not FailureKind.TOO_LONG
            self._failures.append({"id": prompt.id, "reason": result.kind.value, "detail": result.detail})
            return
        self._output.append(
            {
                "id": prompt.id,
                "source": prompt.source,
                "temperature": self._temperature(prompt),
                "finish_reason": result.finish_reason,
                "messages": [*prompt.messages, {"role": "assistant", "content": result.text}],
            }
        )
        report.num_answered += 1
        report.num_tokens += result.num_tokens
