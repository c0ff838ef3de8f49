"""Run what the first request would otherwise pay for: kernel choice, scratch memory, graph capture.

Owns the made-up steps. They write into blocks that no sequence owns yet, which is harmless: a block is always written
before it is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from peagle.outputs import MeasuredStep, ScheduledSequence, SchedulerOutput
from peagle.runner.led_runner import StepRunner
from peagle.sampling_params import SamplingParams

_PROMPT_TOKENS = 64
_CONTEXT_TOKENS = 256  # that a measured step looks back on
_NUM_RUNS = 3
_NUM_UNEQUAL = 3  # drafts of the one sequence that has some


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadSlots:
    """What a draft head writes behind a sequence's rows.

    Attributes:
        num_drafts: K that is asked for.
        num_mask_slots: slots that its masks take.
    """

    num_drafts: int
    num_mask_slots: int


def warm_up(
    runner: StepRunner,
    *,
    batch_sizes: tuple[int, ...],
    max_num_tokens: int,
    block_size: int,
    has_drafter: bool,
    has_trees: bool = False,
    num_next_drafts: int = 0,
    on_step: Callable[[str], None] = lambda line: None,
) -> None:
    """Run a prefill, and one decoding step at each batch size.

    Args:
        runner: to be warmed.
        batch_sizes: decoding batches to run; on CUDA each is captured here with the smallest block tables, and the
            larger tables when a step first needs them.
        max_num_tokens: tokens that the pool and the context hold at least.
        block_size: tokens in a block.
        has_drafter: give the sequences blocks of the drafter's pool too.
        has_trees: also run each batch with a tree of drafts, which is a shape of its own.
        num_next_drafts: K that is asked for: a head that drafts in turn has passes that nothing else runs.
        on_step: told before each step how far this is.
    """
    num_tokens = min(_PROMPT_TOKENS, max_num_tokens)
    # All sequences share the first blocks: what they compute is thrown away.
    table = list(range(-(-(num_tokens + 1) // block_size)))
    shapes = [(size, num_drafts) for size in batch_sizes for num_drafts in ((0, 1) if has_trees else (0,))]
    num_steps = 1 + len(shapes)
    on_step(f"1 of {num_steps}: a prompt of {num_tokens} tokens")
    runner.execute(_step(1, num_tokens=num_tokens, table=table, has_drafter=has_drafter))
    for index, (size, num_drafts) in enumerate(shapes, start=2):
        on_step(f"{index} of {num_steps}: decoding {size} at once{' with a tree' if num_drafts else ''}")
        step = _step(
            size,
            num_tokens=1,
            table=table,
            has_drafter=has_drafter,
            max_next_drafts=num_next_drafts,
            num_draft_tokens=num_drafts,
            draft_parents=(-1,) * num_drafts or None,
        )
        runner.execute(step)


def measure_steps(
    runner: StepRunner, *, batch_sizes: Iterable[int], max_num_tokens: int, block_size: int, head: HeadSlots | None
) -> list[MeasuredStep]:
    """What a decoding step without drafts costs, by its number of sequences, and what it costs to draft for them.

    Whoever decides whether drafting pays has to know what it is compared with, and a server that always drafts would
    never find out.

    Args:
        runner: to be measured; warmed up.
        batch_sizes: numbers of sequences.
        max_num_tokens: tokens that the pool and the context hold at least.
        block_size: tokens in a block.
        head: what the draft head writes; None without one.
    """
    num_behind = 1 if head is None else 1 + head.num_mask_slots
    start = max(min(_CONTEXT_TOKENS, max_num_tokens) - num_behind, 0)
    table = list(range(-(-(start + 1 + num_behind) // block_size)))
    measured = []
    for size in batch_sizes:
        # Plain; then drafting for all; then one sequence has drafts to verify, as it is when few of them pay: a step of
        # unequal sequences costs more than its rows alone.
        kinds = [(0, 0), (0, 0 if head is None else head.num_drafts), (min(_NUM_UNEQUAL, start), 0)]
        for num_draft_tokens, max_next_drafts in dict.fromkeys(kinds):
            step = _step(
                size,
                num_tokens=1,
                table=table,
                has_drafter=head is not None,
                start=start - num_draft_tokens,
                max_next_drafts=max_next_drafts,
                num_draft_tokens=num_draft_tokens,
            )
            for _ in range(_NUM_RUNS):
                timing = runner.execute(step).timing
                if timing is not None:
                    rows = step.num_scheduled_tokens
                    is_drafting = max_next_drafts > 0
                    measured.append(MeasuredStep(num_seqs=size, num_rows=rows, is_drafting=is_drafting, timing=timing))
    return measured


def _step(
    num_seqs: int,
    *,
    num_tokens: int,
    table: list[int],
    has_drafter: bool,
    start: int = 0,
    max_next_drafts: int = 0,
    num_draft_tokens: int = 0,
    draft_parents: tuple[int, ...] | None = None,
) -> SchedulerOutput:
    """A step of equal sequences, of which the first also has drafts: a chain, or a tree."""
    scheduled = tuple(
        ScheduledSequence(
            seq_id=-1 - index,  # no sequence has such a name: what drafters remember of it is nobody's
            start=start,
            token_ids=[0] * (num_tokens + (num_draft_tokens if index == 0 else 0)),
            num_draft_tokens=num_draft_tokens if index == 0 else 0,
            is_sampling=True,
            next_token_id=None,
            max_next_drafts=max_next_drafts,
            block_table=table,
            drafter_block_table=table if has_drafter else (),
            params=SamplingParams(temperature=0.0),
            seed=0,
            draft_parents=draft_parents if index == 0 else None,
        )
        for index in range(num_seqs)
    )
    return SchedulerOutput(scheduled=scheduled, num_scheduled_tokens=num_seqs * num_tokens + num_draft_tokens)
