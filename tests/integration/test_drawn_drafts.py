"""Drafts drawn at random keep the distribution: pairs of tokens that a whole engine emits, against exact ones.

Thousands of short sampled requests with seeds of their own, all to one prompt. The first token follows the prefill; the
two after it come out of drafting, verification by R2 or R3, and the way of the drafts' distributions between steps.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from peagle import LLMEngine
from peagle.sampling_params import SamplingParams
from peagle.spec_config import RejectionSampleMethod, SpecConfig
from tests.builders.engine import ask, make_engine, make_request
from tests.builders.markov import excess, probs_of
from tests.builders.trained_head import VOCAB_SIZE, TrainedPair

PROMPT = (3, 1, 4, 1, 5)
NUM_REQUESTS = 3000
MAX_EXCESS = 5.0
NUM_DRAFTS = 3
SAMPLING: dict[str, dict[str, Any]] = {
    "plain": {"temperature": 1.0},
    "truncated": {"temperature": 1.4, "top_k": 6, "top_p": 0.9},
}
RULES: tuple[RejectionSampleMethod, ...] = ("standard", "block")


def drawing_engine(pair: TrainedPair, rule: RejectionSampleMethod, **limits: Any) -> LLMEngine:
    spec = SpecConfig(
        model=str(pair.head),
        num_speculative_tokens=NUM_DRAFTS,
        draft_sample_method="probabilistic",
        rejection_sample_method=rule,
    )
    return make_engine(pair.target, spec=spec, **limits)


@torch.inference_mode()
def exact_pairs(pair: TrainedPair, params: SamplingParams) -> Tensor:
    """Probability of the second and third token after the prompt, [V, V], by the unmodified model."""
    model = AutoModelForCausalLM.from_pretrained(str(pair.target), dtype=torch.float64)

    def next_probs(prefixes: Tensor) -> Tensor:
        return probs_of(model(prefixes).logits[:, -1], params)

    tokens = torch.arange(VOCAB_SIZE)
    prompt = torch.tensor([PROMPT])
    first = next_probs(prompt)[0]  # [V]
    ones = torch.cat([prompt.expand(VOCAB_SIZE, -1), tokens[:, None]], 1)
    second = next_probs(ones)  # [V, V]
    twos = torch.cat([ones.repeat_interleave(VOCAB_SIZE, 0), tokens.repeat(VOCAB_SIZE)[:, None]], 1)
    third = next_probs(twos).view(VOCAB_SIZE, VOCAB_SIZE, VOCAB_SIZE)
    return torch.einsum("a,ab,abc->bc", first, second, third)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("sampling", SAMPLING)
def test_pairs_follow_the_target(rule: RejectionSampleMethod, sampling: str, pair: TrainedPair) -> None:
    engine = drawing_engine(pair, rule, max_num_seqs=64, num_kv_blocks=600, max_num_batched_tokens=512)
    counts = torch.zeros(VOCAB_SIZE, VOCAB_SIZE, dtype=torch.float64)
    for first in range(0, NUM_REQUESTS, 1000):  # the queue holds as many
        requests = [
            make_request(str(seed), PROMPT, seed=seed, max_tokens=NUM_DRAFTS + 2, **SAMPLING[sampling])
            for seed in range(first, first + 1000)
        ]
        for answer in ask(engine, *requests).values():
            _, second, third, *_ = answer.token_ids
            counts[second, third] += 1
    assert excess(counts, exact_pairs(pair, SamplingParams(**SAMPLING[sampling]))) < MAX_EXCESS
    stats = engine.stats().spec_decode
    assert 0.1 < stats.num_accepted_tokens / stats.num_draft_tokens < 0.95


@pytest.mark.parametrize("rule", RULES)
def test_greedy_answers_are_those_of_plain_decoding(rule: RejectionSampleMethod, pair: TrainedPair) -> None:
    """In one batch with sampled ones, and with a pool that makes them wait and start again."""
    requests = [
        make_request(str(index), (index, index + 1), temperature=float(index % 2), seed=index, max_tokens=30)
        for index in range(12)
    ]
    plain = ask(make_engine(pair.target), *requests)
    drawn = ask(drawing_engine(pair, rule, num_kv_blocks=20), *requests)
    for index in range(0, 12, 2):
        assert drawn[str(index)].token_ids == plain[str(index)].token_ids
