"""Several drafters for one sequence: the proposal that promises the most accepted tokens wins.

Rule R1 needs no draft probabilities, so it does not matter who proposed (peagle.md 7, item 3). The head takes in every
committed token whoever wins, or it could not draft in the next step; a sequence that the scheduler serves without the
head is kept from it. Owns the choice and the record of how far each source can be trusted. Refuses to know how drafts
are made.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from peagle.drafter.interface import NO_TOKEN, DraftBatch, Drafter, DraftProposal
from peagle.drafter.lookup import Lookup, TokenHistory, TokenLookup
from peagle.outputs import ScheduledSequence

HEAD = "head"
_DECAY = 0.98


@dataclass(slots=True)
class Trust:
    """How a source's confidences turn out: accepted drafts over expected ones, recently."""

    accepted: float = 4.0
    expected: float = 4.0

    @property
    def factor(self) -> float:
        """What a promise is worth."""
        return min(self.accepted / self.expected, 1.25)

    def observe(self, *, expected: float, accepted: int) -> None:
        """Count one verified proposal."""
        self.accepted = self.accepted * _DECAY + accepted
        self.expected = self.expected * _DECAY + max(expected, 1e-3)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Choice:
    """What was proposed for the next step of a sequence."""

    source: str
    confidences: tuple[float, ...]
    parents: tuple[int, ...] | None  # as in `DraftProposal`; None: a chain


class MixedDrafter:
    """See `Drafter`.

    Args:
        head: the drafter with a model; the null drafter without one.
        lookups: drafters that look drafts up.
        num_speculative_tokens: most drafts of a lookup.
        max_remembered: sequences whose tokens are kept in indexes; those not heard of for longest are forgotten.
    """

    def __init__(
        self, head: Drafter, lookups: Sequence[TokenLookup], *, num_speculative_tokens: int, max_remembered: int
    ) -> None:
        self._head = head
        self._lookups = tuple(lookups)
        self._num_lookup_drafts = num_speculative_tokens
        self.num_speculative_tokens = max(num_speculative_tokens, head.num_speculative_tokens)
        self.num_mask_slots = head.num_mask_slots
        self.num_layers = head.num_layers
        self.aux_layer_ids = head.aux_layer_ids
        self._max_remembered = max_remembered
        self._choices: OrderedDict[int, _Choice | None] = OrderedDict()  # by seq id, last heard of last
        self._trust = {name: Trust() for name in (HEAD, *(lookup.name for lookup in lookups))}

    def propose(self, batch: DraftBatch) -> DraftProposal:
        """Take in every committed token of the step, and draft for the sequences with `max_next_drafts` > 0."""
        found = self._propose_by_head(batch)
        parents = dict(zip(found.indices, found.parents, strict=True)) if found.parents is not None else {}
        proposals = {
            index: _to_lookup(row, confidences)
            for index, row, confidences in zip(
                found.indices, found.draft_token_ids.tolist(), _confidences(found), strict=True
            )
        }
        sources = dict.fromkeys(proposals, HEAD)
        for index, scheduled in enumerate(batch.scheduled):
            new = batch.output_token_ids[index]
            if not new or scheduled.max_next_drafts == 0:
                continue
            self._observe(scheduled, num_accepted=len(new) - 1)
            self._choices[scheduled.seq_id] = None
            self._choices.move_to_end(scheduled.seq_id)
            looked_up = self._look_up(scheduled, new)
            if looked_up is None:
                continue
            source, lookup = looked_up
            by_head = proposals.get(index, Lookup())
            worth_of_head = self._worth(HEAD, by_head.confidences, parents.get(index))
            if self._worth(source, lookup.confidences) > worth_of_head:
                proposals[index], sources[index] = lookup, source
                parents.pop(index, None)
        for index, lookup in proposals.items():
            choice = _Choice(source=sources[index], confidences=lookup.confidences, parents=parents.get(index))
            self._choices[batch.scheduled[index].seq_id] = choice
        self._forget_old()
        return _to_proposal(proposals, parents if found.parents is not None else None)

    def _propose_by_head(self, batch: DraftBatch) -> DraftProposal:
        """The head's proposal, of the sequences that are served with it."""
        with_head = [index for index, scheduled in enumerate(batch.scheduled) if scheduled.uses_head]
        if len(with_head) == len(batch.scheduled):
            return self._head.propose(batch)
        if not with_head:
            return DraftProposal(indices=(), draft_token_ids=torch.empty(0, 0, dtype=torch.int64))
        part = self._head.propose(
            replace(
                batch,
                scheduled=tuple(batch.scheduled[index] for index in with_head),
                output_token_ids=tuple(batch.output_token_ids[index] for index in with_head),
                first_rows=tuple(batch.first_rows[index] for index in with_head),
            )
        )
        return replace(part, indices=tuple(with_head[index] for index in part.indices))

    def _look_up(self, scheduled: ScheduledSequence, new: Sequence[int]) -> tuple[str, Lookup] | None:
        """The most promising lookup, if any found something."""
        history = TokenHistory(
            seq_id=scheduled.seq_id,
            committed=scheduled.known_token_ids,
            new=new,
            num_prompt_tokens=scheduled.num_prompt_tokens,
            predicted=scheduled.predicted_token_ids,
        )
        max_num_drafts = min(self._num_lookup_drafts, scheduled.max_next_drafts)
        found = [(one.name, one.propose(history, max_num_drafts=max_num_drafts)) for one in self._lookups]
        found = [(name, lookup) for name, lookup in found if lookup.token_ids]
        return max(found, key=lambda pair: self._worth(pair[0], pair[1].confidences), default=None)

    def _worth(self, source: str, confidences: Sequence[float], parents: Sequence[int] | None = None) -> float:
        """Accepted drafts to be expected, by what the source's promises turned out to be worth."""
        return expected_accepted(confidences, parents) * self._trust[source].factor

    def _observe(self, scheduled: ScheduledSequence, *, num_accepted: int) -> None:
        choice = self._choices.get(scheduled.seq_id)
        if choice is not None and scheduled.num_draft_tokens:
            verified = choice.confidences[: scheduled.num_draft_tokens]
            expected = expected_accepted(verified, choice.parents)
            self._trust[choice.source].observe(expected=expected, accepted=num_accepted)

    def _forget_old(self) -> None:
        while len(self._choices) > self._max_remembered:
            seq_id, _ = self._choices.popitem(last=False)
            for lookup_drafter in self._lookups:
                lookup_drafter.forget(seq_id)


def expected_accepted(confidences: Sequence[float], parents: Sequence[int] | None = None) -> float:
    """Accepted drafts to be expected: the sum over all drafts of the probability that their whole path is right.

    Args:
        confidences: of each draft, given that its parent is accepted.
        parents: of each draft its parent among them, -1 for none; None: each follows the one before.
    """
    survivals: list[float] = []
    for index, confidence in enumerate(confidences):
        parent = index - 1 if parents is None else parents[index]
        survivals.append(confidence * (survivals[parent] if parent >= 0 else 1.0))
    return sum(survivals)


def _confidences(proposal: DraftProposal) -> list[list[float]]:
    if proposal.confidences is None:
        return [[0.5] * proposal.draft_token_ids.shape[1] for _ in proposal.indices]
    confidences: list[list[float]] = proposal.confidences.tolist()
    return confidences


def _to_lookup(row: list[int], confidences: list[float]) -> Lookup:
    count = sum(token_id != NO_TOKEN for token_id in row)
    return Lookup(token_ids=tuple(row[:count]), confidences=tuple(confidences[:count]))


def _to_proposal(proposals: dict[int, Lookup], parents: dict[int, tuple[int, ...]] | None) -> DraftProposal:
    """Rows padded to the longest, in ascending order of sequences."""
    indices = tuple(sorted(proposals))
    width = max((len(proposals[index].token_ids) for index in indices), default=0)
    token_ids = torch.full((len(indices), width), NO_TOKEN, dtype=torch.int64)
    confidences = torch.zeros(len(indices), width)
    for row, index in enumerate(indices):
        lookup = proposals[index]
        token_ids[row, : len(lookup.token_ids)] = torch.tensor(lookup.token_ids, dtype=torch.int64)
        confidences[row, : len(lookup.token_ids)] = torch.tensor(lookup.confidences)
    chains = None
    if parents is not None:
        chains = tuple(parents.get(index, tuple(range(-1, len(proposals[index].token_ids) - 1))) for index in indices)
    return DraftProposal(indices=indices, draft_token_ids=token_ids, parents=chains, confidences=confidences)
