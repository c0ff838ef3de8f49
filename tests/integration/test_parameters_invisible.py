"""Every sampling parameter acts as in plain decoding, whatever drafts: tokens, log probabilities, text, end and usage.

A tiny target in float64, and a head trained on it. There is a case for each field of `SamplingParams`, so that a new
parameter cannot be forgotten. Each case runs alone and in company, and the company has parameters of its own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

import pytest

from peagle import (
    CacheConfig,
    EngineConfig,
    FinishReason,
    LLMEngine,
    ModelConfig,
    RequestInput,
    SamplingParams,
    SchedulerConfig,
    SpecConfig,
    TokenLogprobs,
    Usage,
    load_engine,
)
from tests.builders.trained_head import VOCAB_SIZE, TrainedPair

PROMPT = tuple(index * 7 % VOCAB_SIZE for index in range(13))
COMPANY = [
    SamplingParams(temperature=0.0, max_tokens=9),
    SamplingParams(seed=3, max_tokens=17, frequency_penalty=1.0, logprobs=2),
]
# Of each field some values, with what they need beside them. Long answers, so that drafts are accepted in between.
CASES: dict[str, list[dict[str, Any]]] = {
    "temperature": [{"temperature": 0.0}, {"temperature": 0.4}, {"temperature": 1.7}],
    "top_p": [{"top_p": 0.7}],
    "top_k": [{"top_k": 3}],
    "min_p": [{"min_p": 0.2}, {"min_p": 0.05, "top_k": 9, "top_p": 0.9}],
    "presence_penalty": [{"presence_penalty": 1.5}, {"presence_penalty": -1.5, "temperature": 0.0}],
    "frequency_penalty": [{"frequency_penalty": 0.7}, {"frequency_penalty": 2.0, "temperature": 0.0}],
    "repetition_penalty": [{"repetition_penalty": 1.8}, {"repetition_penalty": 0.6, "temperature": 0.0}],
    "logit_bias": [{"logit_bias": ((3, 4.0), (5, -100.0))}, {"logit_bias": ((7, 1.5),), "temperature": 0.0}],
    "allowed_token_ids": [{"allowed_token_ids": frozenset({1, 2, 3, 11})}],
    "bad_words": [{"bad_words": ((2,), (3, 4), (5, 6, 7))}, {"bad_words": ((2, 3), (9,)), "temperature": 0.0}],
    "min_tokens": [{"min_tokens": 12, "stop_token_ids": frozenset(range(0, VOCAB_SIZE, 2))}],
    "seed": [{"seed": -5}, {"seed": 2**62}],
    "max_tokens": [{"max_tokens": 1}, {"max_tokens": 7}],
    "stop": [{"stop": ("a", "b", "e", "o")}],
    "stop_token_ids": [{"stop_token_ids": frozenset(range(0, VOCAB_SIZE, 9))}],
    "ignore_eos": [{"ignore_eos": True}],
    "include_stop_str_in_output": [
        {"include_stop_str_in_output": True, "stop": ("a", "b", "e", "o")},
        {"include_stop_str_in_output": True, "stop_token_ids": frozenset(range(0, VOCAB_SIZE, 5))},
    ],
    "skip_special_tokens": [{"skip_special_tokens": False}],
    "visible_special_tokens": [{"visible_special_tokens": frozenset({"<|im_start|>", "<|no token|>"})}],
    "logprobs": [{"logprobs": 0}, {"logprobs": 20}, {"logprobs": 3, "temperature": 0.0, "presence_penalty": 0.5}],
    "prompt_logprobs": [{"prompt_logprobs": 0}, {"prompt_logprobs": 4}],
}
COVERED_ELSEWHERE = {"grammar"}
SPECS: dict[str, dict[str, Any]] = {
    "chain": {"model": "HEAD", "num_speculative_tokens": 5, "adaptive_verification": False},
    "tree": {
        "model": "HEAD",
        "parallel_drafting_spec": {"num_branches": 2, "depth": 3},
        "adaptive_verification": False,
    },
    "lookups": {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 1},
}


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a client got."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    stop_reason: str | int | None
    usage: Usage
    logprobs: tuple[TokenLogprobs, ...]
    prompt_logprobs: tuple[TokenLogprobs | None, ...]


def make_engine(pair: TrainedPair, values: dict[str, Any], **model: Any) -> LLMEngine:
    """An engine over the tiny target; its steps are short, so that prompts are computed in chunks."""
    spec = SpecConfig.from_mapping(values | ({"model": str(pair.head)} if "model" in values else {}))
    config = EngineConfig(
        model=ModelConfig(model=str(pair.target), dtype="float64", max_model_len=64, **model),
        cache=CacheConfig(block_size=4, num_kv_blocks=256),
        scheduler=SchedulerConfig(max_num_batched_tokens=24, max_num_seqs=4),
        spec=spec,
    )
    return load_engine(config).engine


@pytest.fixture(scope="module")
def plain(pair: TrainedPair) -> LLMEngine:
    """Plain decoding."""
    return make_engine(pair, {"num_speculative_tokens": 0})


@pytest.fixture(scope="module", params=SPECS)
def speculating(pair: TrainedPair, request: pytest.FixtureRequest) -> LLMEngine:
    """A way of drafting."""
    return make_engine(pair, SPECS[request.param])


def run(engine: LLMEngine, batch: list[SamplingParams], predicted: tuple[int, ...] = ()) -> list[Answer]:
    """Answers of requests that arrive together."""
    for index, params in enumerate(batch):
        request = RequestInput(
            request_id=str(index),
            prompt_token_ids=(*PROMPT, index),
            params=params,
            predicted_token_ids=predicted if index == 0 else (),
        )
        engine.add_request(request)
    outputs: list[list[Any]] = [[] for _ in batch]
    while engine.has_work:
        for output in engine.step():
            assert output.error is None
            outputs[int(output.request_id)].append(output)
    engine.check_integrity()
    return [
        Answer(
            text="".join(output.text for output in some),
            token_ids=tuple(token_id for output in some for token_id in output.token_ids),
            finish_reason=some[-1].finish_reason,
            stop_reason=some[-1].stop_reason,
            usage=some[-1].usage,
            logprobs=tuple(one for output in some for one in output.logprobs or ()),
            prompt_logprobs=tuple(some[0].prompt_logprobs or ()),
        )
        for some in outputs
    ]


def assert_equal(found: Answer, expected: Answer) -> None:
    """The same in everything; log probabilities up to the rounding of a batch of another shape."""
    for name in ("token_ids", "text", "finish_reason", "stop_reason"):
        assert getattr(found, name) == getattr(expected, name), name
    assert found.usage.completion_tokens == expected.usage.completion_tokens
    assert found.usage.accepted_prediction_tokens == expected.usage.accepted_prediction_tokens
    assert found.usage.rejected_prediction_tokens == expected.usage.rejected_prediction_tokens
    for mine, theirs in ((found.logprobs, expected.logprobs), (found.prompt_logprobs, expected.prompt_logprobs)):
        assert len(mine) == len(theirs)
        for one, other in zip(mine, theirs, strict=True):
            assert (one is None) == (other is None)
            if one is not None and other is not None:
                assert (one.token_id, one.rank) == (other.token_id, other.rank)
                assert math.isclose(one.logprob, other.logprob, abs_tol=1e-6)
                assert [token_id for token_id, _ in one.top] == [token_id for token_id, _ in other.top]
                assert [value for _, value in one.top] == pytest.approx([value for _, value in other.top], abs=1e-6)


def test_every_parameter_has_a_case() -> None:
    assert {field.name for field in fields(SamplingParams)} == CASES.keys() | COVERED_ELSEWHERE


@pytest.mark.parametrize("name", CASES)
def test_a_parameter_acts_as_in_plain_decoding(plain: LLMEngine, speculating: LLMEngine, name: str) -> None:
    for values in CASES[name]:
        for seed in (0, 1):
            params = SamplingParams(**({"seed": seed, "max_tokens": 40} | values))
            (alone,) = run(plain, [params])
            assert_equal(run(speculating, [params])[0], alone)
            assert_equal(run(speculating, [params, *COMPANY])[0], alone)
            assert len(alone.logprobs) == (0 if params.logprobs is None else len(alone.token_ids))


def test_all_at_once(plain: LLMEngine, speculating: LLMEngine) -> None:
    params = SamplingParams(
        temperature=0.9,
        top_k=12,
        top_p=0.95,
        min_p=0.01,
        presence_penalty=0.3,
        frequency_penalty=0.2,
        repetition_penalty=1.1,
        logit_bias=((4, 2.0),),
        bad_words=((8, 9),),
        min_tokens=10,
        stop_token_ids=frozenset({6}),
        seed=11,
        max_tokens=40,
        logprobs=5,
        prompt_logprobs=1,
    )
    (expected,) = run(plain, [params])
    assert_equal(run(speculating, [params])[0], expected)
    assert expected.prompt_logprobs[0] is None
    assert all(one is not None for one in expected.prompt_logprobs[1:])
    assert len(expected.prompt_logprobs) == len(PROMPT) + 1


def test_a_prediction_counts_the_same(plain: LLMEngine, speculating: LLMEngine) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=30)
    (answer,) = run(plain, [params])
    predicted = (*answer.token_ids[:9], (answer.token_ids[9] + 1) % VOCAB_SIZE, *answer.token_ids[12:])
    (expected,) = run(plain, [params], predicted)
    assert_equal(run(speculating, [params], predicted)[0], expected)
    assert expected.usage.accepted_prediction_tokens >= 9
    total = expected.usage.accepted_prediction_tokens + expected.usage.rejected_prediction_tokens
    assert total == len(predicted)


def test_the_speculating_engines_did_speculate(speculating: LLMEngine) -> None:
    run(speculating, [SamplingParams(temperature=0.0, max_tokens=40)])
    assert speculating.stats().spec_decode.num_accepted_tokens > 0


def test_processed_logprobs_are_those_of_what_is_drawn(pair: TrainedPair) -> None:
    params = SamplingParams(temperature=0.7, top_k=4, presence_penalty=1.0, seed=5, max_tokens=20, logprobs=6)
    plain = make_engine(pair, {"num_speculative_tokens": 0}, logprobs_mode="processed_logprobs")
    fast = make_engine(pair, SPECS["chain"], logprobs_mode="processed_logprobs")
    (expected,) = run(plain, [params])
    assert_equal(run(fast, [params])[0], expected)
    for one in expected.logprobs:
        assert len(one.top) == 4  # top_k leaves no others
        assert math.isclose(sum(math.exp(value) for _, value in one.top), 1.0)
