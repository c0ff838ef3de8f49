"""Holds the answers of some sequences to their grammars.

Before a step, drafts are cut at the first one that the grammar forbids, so that they cost nothing, and each row to be
verified gets the mask of what may come there. After the step the grammar advances by what was committed. So a grammar
acts on every row as on plain decoding's one row, whatever drafts. Owns this, and one matcher a sequence. Refuses to
know how masks act on logits (`sampling.adjustments`).
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import replace

from peagle.grammar.compiler import GrammarCompiler
from peagle.grammar.matcher import GrammarMatcher
from peagle.grammar_spec import GrammarSpec
from peagle.outputs import ModelRunnerOutput, ScheduledSequence, SchedulerOutput, SequenceCommit, SequenceOutput


class GrammarGuide:
    """See the module.

    Args:
        compiler: of the target's tokenizer.
        cuts_drafts: leave out drafts that are forbidden. Right for rule R1 alone: drafts that were drawn at random are
            judged by how likely they were, and whether they are verified must not depend on what they are.
    """

    def __init__(self, compiler: GrammarCompiler, *, cuts_drafts: bool) -> None:
        self.compiler = compiler
        self._cuts_drafts = cuts_drafts
        self._matchers: dict[int, GrammarMatcher] = {}

    def add(self, seq_id: int, spec: GrammarSpec) -> None:
        """A new sequence.

        Raises:
            InvalidParameterError: see `GrammarCompiler.compile`.
        """
        self._matchers[seq_id] = self.compiler.compile(spec)

    def forget(self, seq_id: int) -> None:
        """It has ended. Unknown ids are ignored."""
        self._matchers.pop(seq_id, None)

    def constrain(self, plan: SchedulerOutput) -> SchedulerOutput:
        """The step with masks, and without forbidden drafts; the very same if no sequence has a grammar."""
        if not any(scheduled.seq_id in self._matchers for scheduled in plan.scheduled):
            return plan
        constrained = tuple(self._constrained(scheduled) for scheduled in plan.scheduled)
        return replace(
            plan, scheduled=constrained, num_scheduled_tokens=sum(len(scheduled.token_ids) for scheduled in constrained)
        )

    def advance(self, commits: Iterable[SequenceCommit]) -> None:
        """Go on by what was committed."""
        for commit in commits:
            matcher = self._matchers.get(commit.seq_id)
            if matcher is not None and commit.new_token_ids:
                matcher.advance(commit.new_token_ids)

    def without_lost(self, outputs: ModelRunnerOutput) -> ModelRunnerOutput:
        """The outputs, with an error for each sequence that can't be followed any further."""
        if not self._matchers:
            return outputs
        return replace(outputs, outputs=tuple(self._checked(output) for output in outputs.outputs))

    def _checked(self, output: SequenceOutput) -> SequenceOutput:
        matcher = self._matchers.get(output.seq_id)
        if matcher is None or matcher.error is None:
            return output
        error = "following the grammar of this request takes too much work"
        return SequenceOutput(seq_id=output.seq_id, token_ids=(), num_accepted_tokens=0, error=error)

    def _constrained(self, scheduled: ScheduledSequence) -> ScheduledSequence:
        matcher = self._matchers.get(scheduled.seq_id)
        if matcher is None or not scheduled.is_sampling:
            return scheduled
        drafts = list(scheduled.token_ids[scheduled.num_known_tokens :])
        parents = list(scheduled.draft_parents or range(-1, len(drafts) - 1))
        if self._cuts_drafts and drafts:
            kept = matcher.allowed_nodes(drafts, parents)
            if len(kept) < len(drafts):
                scheduled = _with_drafts(scheduled, kept, parents)
                drafts, parents = [drafts[node] for node in kept], _renumbered(kept, parents)
        return replace(scheduled, row_masks=matcher.masks(drafts, parents))


def _with_drafts(scheduled: ScheduledSequence, kept: SequenceOf[int], parents: SequenceOf[int]) -> ScheduledSequence:
    num_known = scheduled.num_known_tokens
    known = list(scheduled.token_ids[:num_known])
    confidences = scheduled.draft_confidences
    return replace(
        scheduled,
        token_ids=[*known, *(scheduled.token_ids[num_known + node] for node in kept)],
        num_draft_tokens=len(kept),
        draft_parents=None if scheduled.draft_parents is None else _renumbered(kept, parents),
        draft_confidences=[confidences[node] for node in kept] if confidences else confidences,
    )


def _renumbered(kept: SequenceOf[int], parents: SequenceOf[int]) -> list[int]:
    places = {node: place for place, node in enumerate(kept)} | {-1: -1}
    return [places[parents[node]] for node in kept]
