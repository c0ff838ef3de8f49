"""Every rule against the exact distribution: what is emitted is what the target would have said by itself."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from peagle.sampling.race import winners
from peagle.sampling_params import SamplingParams
from peagle.verifier.acceptance import VerifyResult, verify
from peagle.verifier.block import verify_block
from peagle.verifier.chain import ChainNoise, DrawnChains
from peagle.verifier.rejection import verify_standard
from tests.builders.markov import (
    VOCAB_SIZE,
    MarkovDrafter,
    Rule,
    count_strings,
    decode,
    exact_strings,
    excess,
    probs_of,
    random_logits,
)

NUM_SEQS = 4000
NUM_DRAFTS = 3
LOGITS = random_logits(VOCAB_SIZE, VOCAB_SIZE, seed=3)
MAX_EXCESS = 5.0


def verify_match(chains: DrawnChains, noise: ChainNoise) -> VerifyResult:
    """R1, in the form of the others."""
    rows = chains.target_probs.flatten(0, 1)
    sampled = winners(rows, noise.keys.view(-1, 1), None).view(noise.keys.shape)
    return verify(sampled, chains.draft_token_ids)


RULES: dict[str, Rule] = {"R1": verify_match, "R2": verify_standard, "R3": verify_block}
TARGETS = {
    "plain": probs_of(LOGITS, SamplingParams()),
    "temperature": probs_of(LOGITS, SamplingParams(temperature=0.6)),
    "top_k": probs_of(LOGITS, SamplingParams(temperature=1.5, top_k=3)),
    "top_p": probs_of(LOGITS, SamplingParams(top_p=0.8)),
    "min_p": probs_of(LOGITS, SamplingParams(), min_p=0.2),
    "greedy": probs_of(LOGITS, SamplingParams(temperature=0.0)),
}


def near() -> Tensor:
    """A head that is right more often than not: the target's logits, disturbed more at each depth. [K, V, V]"""
    steps = [LOGITS + random_logits(VOCAB_SIZE, VOCAB_SIZE, seed=depth, scale=0.8) for depth in range(NUM_DRAFTS)]
    return torch.softmax(torch.stack(steps), -1)


def known_drafts() -> Tensor:
    """[K, V]"""
    return torch.stack([(LOGITS.argmax(-1) + depth) % VOCAB_SIZE for depth in range(NUM_DRAFTS)])


def certain() -> Tensor:
    return torch.nn.functional.one_hot(known_drafts(), VOCAB_SIZE).double()


def partly_known() -> MarkovDrafter:
    """The second draft comes from elsewhere, with a q that is 0 there."""
    probs = near()
    known = torch.full((NUM_DRAFTS, VOCAB_SIZE), -1)
    known[1] = known_drafts()[1]
    probs[1] = (probs[1] * (1 - certain()[1])) / (probs[1] * (1 - certain()[1])).sum(-1, keepdim=True)
    return MarkovDrafter(probs=probs, known=known)


DRAFTERS = {
    "near": MarkovDrafter(probs=near()),
    "far": MarkovDrafter(probs=torch.softmax(random_logits(NUM_DRAFTS, VOCAB_SIZE, VOCAB_SIZE, seed=9), -1)),
    "exact": MarkovDrafter(probs=TARGETS["plain"].expand(NUM_DRAFTS, -1, -1)),
    "sparse": MarkovDrafter(probs=probs_of(LOGITS, SamplingParams(top_k=2)).expand(NUM_DRAFTS, -1, -1)),
    "one-hot": MarkovDrafter(probs=certain()),
    "no q": MarkovDrafter(probs=torch.zeros_like(certain()), known=known_drafts()),
    "partly known": partly_known(),
    "ragged": MarkovDrafter(probs=near(), max_drafts=NUM_DRAFTS),
    "float32": MarkovDrafter(probs=near().float()),
    "none": MarkovDrafter(probs=near()[:0]),
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("target", TARGETS)
def test_triples_follow_every_target(rule: str, target: str) -> None:
    table = TARGETS[target]
    found = decode(table, DRAFTERS["near"], RULES[rule], num_seqs=NUM_SEQS, num_tokens=3)
    assert excess(count_strings(found.token_ids), exact_strings(table, 3)) < MAX_EXCESS


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_pairs_and_triples_follow_the_target_for_every_drafter(rule: str, drafter: str) -> None:
    table = TARGETS["plain"]
    found = decode(table, DRAFTERS[drafter], RULES[rule], num_seqs=NUM_SEQS, num_tokens=3)
    assert excess(count_strings(found.token_ids), exact_strings(table, 3)) < MAX_EXCESS
    exact_pairs = exact_strings(table, 3).sum(0)  # the second and third token
    assert excess(count_strings(found.token_ids[:, 1:]), exact_pairs) < MAX_EXCESS


@pytest.mark.parametrize("rule", RULES)
def test_strings_cut_at_a_stop_token_follow_the_target(rule: str) -> None:
    """Whoever cuts an accepted run at EOS keeps the distribution."""
    table, eos = TARGETS["plain"], 2
    found = decode(table, DRAFTERS["near"], RULES[rule], num_seqs=NUM_SEQS, num_tokens=4)
    is_past = (found.token_ids == eos).cumsum(1).roll(1, 1) > 0
    is_past[:, 0] = False
    counts = count_strings(torch.where(is_past, eos, found.token_ids))
    stopping = table.clone()
    stopping[eos] = torch.nn.functional.one_hot(torch.tensor(eos), VOCAB_SIZE).double()  # as if EOS went on for ever
    assert excess(counts, exact_strings(stopping, 4)) < MAX_EXCESS


@pytest.mark.parametrize("rule", RULES)
def test_a_wrong_q_would_be_noticed(rule: str) -> None:
    """The test of the tests: R2 and R3 fail it with drafts that were not drawn from q, and R1 does not care."""
    drafter = replace(DRAFTERS["near"], known=known_drafts())
    found = decode(TARGETS["plain"], drafter, RULES[rule], num_seqs=NUM_SEQS, num_tokens=3)
    distance = excess(count_strings(found.token_ids), exact_strings(TARGETS["plain"], 3))
    assert (distance < MAX_EXCESS) == (rule == "R1")


def mean_accepted(rule: str, table: Tensor, drafter: MarkovDrafter) -> float:
    found = decode(table, drafter, RULES[rule], num_seqs=2 * NUM_SEQS, num_tokens=1)
    return float(found.num_accepted.double().mean())


@pytest.mark.parametrize("drafter", ["near", "far", "sparse", "partly known", "ragged"])
def test_block_verification_accepts_no_fewer(drafter: str) -> None:
    chosen = DRAFTERS[drafter]
    error = NUM_DRAFTS / (2 * NUM_SEQS) ** 0.5
    for table in (TARGETS["plain"], TARGETS["top_p"]):
        assert mean_accepted("R3", table, chosen) > mean_accepted("R2", table, chosen) - error
        assert mean_accepted("R2", table, chosen) > mean_accepted("R1", table, chosen) - error


@pytest.mark.parametrize("drafter", ["one-hot", "no q"])
def test_no_rule_accepts_more_certain_drafts_than_another(drafter: str) -> None:
    found = [mean_accepted(rule, TARGETS["plain"], DRAFTERS[drafter]) for rule in RULES]
    assert max(found) - min(found) < 4 * NUM_DRAFTS / (2 * NUM_SEQS) ** 0.5


def test_the_example_of_the_paper() -> None:
    """Two tokens, p = (1/3, 2/3), q = (2/3, 1/3), two drafts: 10/9 accepted on average by R2, 11/9 by R3."""
    table = torch.zeros(VOCAB_SIZE, VOCAB_SIZE, dtype=torch.float64)
    table[:, :2] = torch.tensor([1 / 3, 2 / 3], dtype=torch.float64)
    drafter = MarkovDrafter(probs=torch.zeros(2, VOCAB_SIZE, VOCAB_SIZE, dtype=torch.float64))
    drafter.probs[..., :2] = torch.tensor([2 / 3, 1 / 3], dtype=torch.float64)
    assert mean_accepted("R2", table, drafter) == pytest.approx(10 / 9, abs=0.03)
    assert mean_accepted("R3", table, drafter) == pytest.approx(11 / 9, abs=0.03)


@pytest.mark.parametrize("rule", ["R2", "R3"])
def test_drafts_from_the_target_itself_are_all_accepted(rule: str) -> None:
    table = TARGETS["plain"][:1].expand(VOCAB_SIZE, -1)  # independent of the last token, so that q = p at every depth
    found = decode(
        table, MarkovDrafter(probs=table.expand(NUM_DRAFTS, -1, -1)), RULES[rule], num_seqs=500, num_tokens=1
    )
    assert (found.num_accepted == NUM_DRAFTS).all()
