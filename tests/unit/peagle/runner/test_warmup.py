"""Made-up steps before the first request: they run every batch size, and nobody notices."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from peagle.outputs import ModelRunnerOutput, SchedulerOutput
from peagle.runner.model_runner import ModelRunner
from peagle.runner.warmup import HeadSlots, measure_steps, warm_up
from tests.builders.head import tiny_head
from tests.builders.model import write_model
from tests.builders.runner import (
    PADDINGS,
    RunnerSizes,
    greedy_sequence,
    make_graphed_drafter,
    make_loop,
    make_prompts,
    make_runner,
    run_step,
)

SIZES = RunnerSizes()


def answer(runner: ModelRunner) -> list[list[int]]:
    scheduler = make_loop(SIZES, has_drafter=True)
    sequences = [greedy_sequence(i, prompt, 12) for i, prompt in enumerate(make_prompts([5, 19, 2]))]
    for seq in sequences:
        scheduler.add(seq)
    while scheduler.has_work:
        run_step(scheduler, [runner])
    return [seq.output_token_ids for seq in sequences]


@pytest.mark.parametrize("policy", PADDINGS)
def test_nothing_stays(policy: str, tmp_path: Path) -> None:
    write_model(tmp_path)
    answers = []
    for is_warmed in (False, True):
        padding = PADDINGS[policy](SIZES)
        drafter = make_graphed_drafter(tiny_head(), SIZES, padding)
        runner = make_runner(tmp_path, SIZES, padding, drafter).runner
        if is_warmed:
            warm_up(
                runner,
                batch_sizes=padding.batch_sizes.sizes,
                max_num_tokens=SIZES.max_model_len - 1,
                block_size=SIZES.block_size,
                has_drafter=True,
                has_trees=True,
                num_next_drafts=SIZES.num_speculative_tokens,
            )
        answers.append(answer(runner))
    assert answers[0] == answers[1]


@pytest.mark.parametrize("max_model_len", [2, 5, 8, 200])
def test_steps_fit_the_smallest_pool(max_model_len: int, tmp_path: Path) -> None:
    """The pool holds one sequence of the longest length and no more."""
    sizes = replace(SIZES, max_model_len=max_model_len, num_blocks=-(-max_model_len // SIZES.block_size))
    padding = PADDINGS["fixed"](sizes)
    drafter = make_graphed_drafter(tiny_head(), sizes, padding)
    tiny = make_runner(write_model(tmp_path), sizes, padding, drafter)
    steps: list[SchedulerOutput] = []

    def record(step: SchedulerOutput) -> ModelRunnerOutput:
        steps.append(step)
        return execute(step)

    execute, tiny.runner.execute = tiny.runner.execute, record  # type: ignore[method-assign]
    warm_up(
        tiny.runner,
        batch_sizes=(1, 2, 4, 6),
        max_num_tokens=max_model_len - 1,
        block_size=sizes.block_size,
        has_drafter=True,
        has_trees=True,
        num_next_drafts=SIZES.num_speculative_tokens,
    )
    assert [len(step.scheduled) for step in steps] == [1, 1, 1, 2, 2, 4, 4, 6, 6]
    assert [step.scheduled[0].draft_parents for step in steps[1:]] == [None, (-1,)] * 4
    assert [step.num_scheduled_tokens for step in steps] == [min(64, max_model_len - 1), 1, 2, 2, 3, 4, 5, 6, 7]
    assert all(block < sizes.num_blocks for step in steps for s in step.scheduled for block in s.block_table)


def test_steps_are_measured_by_their_number_of_sequences(tmp_path: Path) -> None:
    padding = PADDINGS["fixed"](SIZES)
    drafter = make_graphed_drafter(tiny_head(), SIZES, padding)
    tiny = make_runner(write_model(tmp_path), SIZES, padding, drafter)
    measured = measure_steps(
        tiny.runner,
        batch_sizes=(1, 2, 4),
        max_num_tokens=SIZES.max_model_len - 1,
        block_size=SIZES.block_size,
        head=HeadSlots(num_drafts=drafter.num_speculative_tokens, num_mask_slots=drafter.num_mask_slots),
    )
    kinds = [(step.num_seqs, step.num_rows - step.num_seqs, step.is_drafting) for step in measured]
    every = [(0, False), (0, True), (3, False)]
    assert kinds == [(size, more, drafts) for size in (1, 2, 4) for more, drafts in every for _ in range(3)]
    assert all(step.timing.verify_s > 0 and step.timing.draft_s > 0 for step in measured)


def test_without_a_head_only_plain_steps_are_measured(tmp_path: Path) -> None:
    tiny = make_runner(write_model(tmp_path), SIZES, PADDINGS["fixed"](SIZES))
    measured = measure_steps(
        tiny.runner, batch_sizes=(2,), max_num_tokens=SIZES.max_model_len - 1, block_size=SIZES.block_size, head=None
    )
    assert [(step.num_rows, step.is_drafting) for step in measured] == [(2, False)] * 3 + [(5, False)] * 3
