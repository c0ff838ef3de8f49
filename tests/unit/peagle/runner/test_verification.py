"""Verdicts on batches of trees and chains, against one sequence at a time."""

from __future__ import annotations

from dataclasses import replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from peagle.outputs import ScheduledSequence
from peagle.runner.tree_rows import draft_depths, draft_parents
from peagle.runner.verification import MatchVerification, drafts_of
from peagle.sampling.batch import SamplingMetadata, SamplingRow
from peagle.sampling.sampler import sample
from peagle.sampling_params import SamplingParams
from peagle.verifier.tree_reference import reference_verify_tree

VOCAB_SIZE = 3


@st.composite
def sequences(draw: st.DrawFn, seq_id: int) -> ScheduledSequence:
    """Known tokens, then a tree or a chain over a vocabulary that is small enough to guess."""
    num_known = draw(st.integers(1, 3))
    drafts: list[int] = []
    parents: list[int] = []
    for _ in range(draw(st.integers(0, 6))):
        token_id, parent = draw(st.integers(0, VOCAB_SIZE - 1)), draw(st.integers(-1, len(drafts) - 1))
        if (token_id, parent) not in zip(drafts, parents, strict=True):
            drafts.append(token_id)
            parents.append(parent)
    return ScheduledSequence(
        seq_id=seq_id,
        start=draw(st.integers(0, 9)),
        token_ids=[0] * num_known + drafts,
        num_draft_tokens=len(drafts),
        is_sampling=True,
        next_token_id=None,
        max_next_drafts=0,
        block_table=(),
        drafter_block_table=(),
        params=SamplingParams(temperature=draw(st.sampled_from([0.0, 1.0]))),
        seed=draw(st.integers(0, 99)),
        draft_parents=parents if draw(st.booleans()) else None,
    )


@settings(deadline=None, max_examples=200)
@given(batch=st.tuples(*(sequences(seq_id) for seq_id in range(3))), seed=st.integers(0, 10**6))
def test_each_sequence_gets_what_it_would_get_alone(batch: tuple[ScheduledSequence, ...], seed: int) -> None:
    num_rows = [one.num_draft_tokens + 1 for one in batch]
    logits = torch.randn(sum(num_rows), VOCAB_SIZE, generator=torch.Generator().manual_seed(seed))
    verdicts = MatchVerification().verify(batch, logits)
    for one, rows in zip(batch, torch.split(logits, num_rows), strict=True):
        first = one.start + one.num_known_tokens
        metadata = SamplingMetadata.build(
            [SamplingRow(params=one.params, seed=one.seed, position=first + d) for d in (0, *draft_depths(one))]
        )
        wanted = reference_verify_tree(
            sample(rows, metadata).token_ids.tolist(), drafts_of(one), list(draft_parents(one))
        )
        verdict = verdicts[one.seq_id]
        assert verdict.output.token_ids == wanted.token_ids
        assert verdict.output.num_accepted_tokens == len(wanted.nodes)
        assert verdict.accepted_nodes in (wanted.nodes, None)
        if verdict.accepted_nodes is None:
            assert wanted.nodes == list(range(len(wanted.nodes))), "only chains may leave it out"


def test_a_row_without_a_distribution_fails_only_those_who_reach_it() -> None:
    base = ScheduledSequence(
        seq_id=0,
        start=0,
        token_ids=[0, 1, 2],
        num_draft_tokens=2,
        is_sampling=True,
        next_token_id=None,
        max_next_drafts=0,
        block_table=(),
        drafter_block_table=(),
        params=SamplingParams(temperature=0.0),
        seed=0,
        draft_parents=[-1, -1],
    )
    logits = torch.eye(VOCAB_SIZE)[[1, 0, 0]]  # the first node is accepted
    for broken, is_reached in ((0, True), (1, True), (2, False)):
        rows = logits.clone()
        rows[broken] = float("nan")
        verdicts = MatchVerification().verify([base, replace(base, seq_id=1)], torch.cat([rows, logits]))
        assert (verdicts[0].output.error is not None) == is_reached
        assert verdicts[0].output.token_ids == (() if is_reached else [1, 0])
        assert verdicts[1].output.token_ids == [1, 0]
