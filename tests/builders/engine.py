"""Whole tiny engines from whole tiny checkpoints, and a driver that plays a scenario step by step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from peagle.config import CacheConfig, EngineConfig, GraphConfig, ModelConfig, SchedulerConfig
from peagle.engine.engine import EngineParts, LLMEngine, Runner
from peagle.engine.loader import load_engine
from peagle.outputs import RequestInput, RequestOutput
from peagle.sampling_params import SamplingParams
from peagle.sequence import FinishReason
from peagle.spec_config import SpecConfig
from tests.builders.model import build_model
from tests.builders.scheduler import make_kv, make_scheduler
from tests.builders.tokenizer import build_tokenizer_directory

BLOCK_SIZE = 4
MAX_MODEL_LEN = 64
_SMALL: dict[str, Any] = {
    "dtype": "float64",
    "device": "cpu",
    "num_threads": 1,
    "max_model_len": MAX_MODEL_LEN,
    "block_size": BLOCK_SIZE,
    "num_kv_blocks": 96,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
}


def write_checkpoint(directory: Path, *, seed: int = 0, **overrides: Any) -> Path:
    """Write a tiny Llama with its tokenizer; returns `directory`.

    Args:
        directory: made if needed.
        seed: of the weights. Layers weigh so much that greedy answers are varied and seldom repeat themselves.
        overrides: of config.json. `vocab_size` must not fall below the tokenizer's.
    """
    model = build_model("llama", seed=seed, **overrides)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".layers." in name and parameter.dim() > 1:
                parameter.mul_(3.0)
    model.save_pretrained(str(directory))
    return build_tokenizer_directory(directory)


def engine_config(directory: Path, *, spec: SpecConfig | None = None, **values: Any) -> EngineConfig:
    """A small configuration; `values` are fields of any of its groups."""
    given = {**_SMALL, "model": str(directory), **values}
    groups = {"model": ModelConfig, "cache": CacheConfig, "scheduler": SchedulerConfig, "graph": GraphConfig}
    built: dict[str, Any] = {}
    for name, group in groups.items():
        names = {f.name for f in fields(group)}
        built[name] = group(**{key: given.pop(key) for key in list(given) if key in names})
    assert not given, f"no group has {given}"
    return EngineConfig(spec=spec or SpecConfig(), **built)


def make_engine(directory: Path, *, spec: SpecConfig | None = None, **config: Any) -> LLMEngine:
    """The engine that `load_engine` makes of a checkpoint, in a small configuration."""
    return load_engine(engine_config(directory, spec=spec, **config)).engine


def remake_engine(
    engine: LLMEngine,
    *,
    num_blocks: int = 96,
    wrap_runner: Callable[[Runner], Runner] = lambda runner: runner,
    parts: dict[str, Any] | None = None,
    **scheduler: Any,
) -> LLMEngine:
    """A new engine over the loaded weights of another one, which must not be used any more. Takes no time.

    Args:
        engine: with blocks of `BLOCK_SIZE`, at least `num_blocks` of them.
        num_blocks: of each pool.
        wrap_runner: puts something around the real runner.
        parts: fields of `EngineParts`.
        scheduler: arguments of `make_scheduler`.
    """
    old: EngineParts = engine._parts
    depth = old.num_speculative_tokens
    kv = make_kv(num_blocks=num_blocks, block_size=BLOCK_SIZE, has_drafter=depth > 0)
    scheduler = {"max_model_len": MAX_MODEL_LEN, "num_speculative_tokens": depth} | scheduler
    new: dict[str, Any] = {"runner": wrap_runner(old.runner), "kv": kv, "scheduler": make_scheduler(kv=kv, **scheduler)}
    return LLMEngine(replace(old, **new, **(parts or {})))


def make_request(name: str, prompt: SequenceOf[int] = (1, 2, 3), **params: Any) -> RequestInput:
    """A request of 8 greedy tokens that no end-of-sequence id ends; `params` are fields of `SamplingParams`."""
    values = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True} | params
    return RequestInput(request_id=name, prompt_token_ids=list(prompt), params=SamplingParams(**values))


@dataclass(slots=True, kw_only=True)
class Answer:
    """What one request got."""

    outputs: list[RequestOutput] = field(default_factory=list)

    @property
    def token_ids(self) -> list[int]:
        return [token_id for output in self.outputs for token_id in output.token_ids]

    @property
    def text(self) -> str:
        return "".join(output.text for output in self.outputs)

    @property
    def last(self) -> RequestOutput:
        return self.outputs[-1]

    @property
    def finish_reason(self) -> FinishReason | None:
        return self.last.finish_reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """A request of a scenario: when it comes, and when its client goes (None: it stays)."""

    request: RequestInput
    step: int = 0
    abort_step: int | None = None


def play(engine: LLMEngine, arrivals: Iterable[Arrival]) -> dict[str, Answer]:
    """Step an engine through a scenario, checking its books after every step and that it ends with none in use."""
    coming = sorted(arrivals, key=lambda arrival: arrival.step)
    leaving = {arrival.request.request_id: arrival.abort_step for arrival in coming}
    answers = {arrival.request.request_id: Answer() for arrival in coming}
    step = 0
    while coming or engine.has_work:
        while coming and coming[0].step <= step:
            engine.add_request(coming.pop(0).request)
        aborted = [engine.abort(name) for name, abort_step in leaving.items() if abort_step == step]
        for output in [*aborted, *engine.step()]:
            if output is not None:
                answer = answers[output.request_id]
                assert not answer.outputs or answer.finish_reason is None, "nothing follows the last output"
                answer.outputs.append(output)
        engine.check_integrity()
        step += 1
        assert step < 10_000, "the engine makes no progress"
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.kv_cache_usage) == (0, 0, 0.0)
    return answers


def ask(engine: LLMEngine, *requests: RequestInput) -> dict[str, Answer]:
    """Answers of requests that all come at once."""
    return play(engine, [Arrival(request=request) for request in requests])


def greedy_reference(directory: Path, prompts: Iterable[SequenceOf[int]], *, num_tokens: int) -> list[list[int]]:
    """Greedy answers of the unmodified `transformers` model in float64, one prompt at a time and without a cache."""
    model = AutoModelForCausalLM.from_pretrained(str(directory), dtype=torch.float64, attn_implementation="eager")
    answers = []
    with torch.inference_mode():
        for prompt in prompts:
            token_ids = list(prompt)
            for _ in range(num_tokens):
                token_ids.append(int(model(torch.tensor([token_ids])).logits[0, -1].argmax()))
            answers.append(token_ids[len(prompt) :])
    return answers
