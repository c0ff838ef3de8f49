"""Steps of a runner against the unmodified `transformers` model, and a request that breaks alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from peagle.errors import DeviceLostError
from peagle.outputs import ModelRunnerOutput, SchedulerOutput
from peagle.scheduler import Scheduler
from peagle.sequence import Sequence
from tests.builders.head import tiny_head
from tests.builders.model import build_model, write_model
from tests.builders.runner import (
    PADDINGS,
    RunnerSizes,
    ScriptedDrafter,
    TinyRunner,
    commit,
    eager_padding,
    greedy_answer,
    greedy_sequence,
    make_graphed_drafter,
    make_loop,
    make_prompts,
    make_runner,
    run_step,
)

SIZES = RunnerSizes()
BROKEN_TOKEN = 299  # its embedding is NaN in the `broken` checkpoint; no prompt of `make_prompts` has it
# Prompts shorter and longer than K + 1, than a block and than a step's budget; answers that end at different times.
LENGTHS, ANSWERS = (1, 30, 3, 11, 4, 17), (20, 12, 24, 6, 16, 18)
PROMPTS = make_prompts(LENGTHS)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model, but for one token that turns every row that sees it into NaN."""
    directory = tmp_path_factory.mktemp("broken")
    model = build_model("llama")
    with torch.no_grad():
        model.model.embed_tokens.weight[BROKEN_TOKEN] = float("nan")
    model.save_pretrained(str(directory))
    return directory


@pytest.fixture(scope="module")
def answers() -> list[list[int]]:
    """What `transformers` says."""
    model = build_model("llama")
    return [greedy_answer(model, prompt, length) for prompt, length in zip(PROMPTS, ANSWERS, strict=True)]


def scripted(answers: list[list[int]], *, wrong_token_id: int = 0) -> ScriptedDrafter:
    whole = {seq_id: [*prompt, *answers[seq_id]] for seq_id, prompt in enumerate(PROMPTS)}
    return ScriptedDrafter(whole, SIZES.num_speculative_tokens, wrong_token_id=wrong_token_id)


def add_sequences(scheduler: Scheduler, seq_ids: list[int]) -> list[Sequence]:
    sequences = [greedy_sequence(seq_id, PROMPTS[seq_id], ANSWERS[seq_id]) for seq_id in seq_ids]
    for seq in sequences:
        scheduler.add(seq)
    return sequences


def run_to_the_end(scheduler: Scheduler, runners: list[TinyRunner]) -> list[ModelRunnerOutput]:
    outputs = []
    while scheduler.has_work:
        outputs.append(run_step(scheduler, [tiny.runner for tiny in runners]))
    return outputs


def error_of(output: ModelRunnerOutput, seq_id: int) -> str | None:
    return next(found.error for found in output.outputs if found.seq_id == seq_id)


def test_plain_decoding_equals_transformers(checkpoint: Path, answers: list[list[int]]) -> None:
    """Both policies run the same steps, mixed of chunks and decodes; later arrivals join running ones."""
    sizes = RunnerSizes(num_speculative_tokens=0)
    runners = [make_runner(checkpoint, sizes, padding(sizes)) for padding in PADDINGS.values()]
    scheduler = make_loop(sizes, has_drafter=False)
    early = add_sequences(scheduler, [0, 1, 2])
    for _ in range(4):
        run_step(scheduler, [tiny.runner for tiny in runners])
    late = add_sequences(scheduler, [3, 4, 5])
    run_to_the_end(scheduler, runners)
    assert [seq.output_token_ids for seq in early + late] == answers


@pytest.mark.parametrize("cache_dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_cache_may_have_another_type(dtype: torch.dtype, cache_dtype: torch.dtype, checkpoint: Path) -> None:
    """Masks follow the queries, not the cache. A cache that is no coarser than the queries loses nothing."""
    answers = []
    for cached in (dtype, cache_dtype):
        tiny = make_runner(checkpoint, SIZES, PADDINGS["fixed"](SIZES), dtype=dtype, cache_dtype=cached)
        scheduler = make_loop(SIZES, has_drafter=False)
        sequences = add_sequences(scheduler, [1, 2, 3])
        run_to_the_end(scheduler, [tiny])
        answers.append([seq.output_token_ids for seq in sequences])
    assert [len(answer) for answer in answers[1]] == [ANSWERS[i] for i in (1, 2, 3)]
    if torch.promote_types(dtype, cache_dtype) == cache_dtype:
        assert answers[0] == answers[1]


def test_verification_equals_transformers(checkpoint: Path, answers: list[list[int]]) -> None:
    """Drafts that are wrong now and then: what comes out does not depend on them, only how many steps it takes."""
    runners = [
        make_runner(checkpoint, SIZES, padding(SIZES), scripted(answers, wrong_token_id=5))
        for padding in PADDINGS.values()
    ]
    scheduler = make_loop(SIZES, has_drafter=True)
    sequences = add_sequences(scheduler, [0, 1, 2])
    run_step(scheduler, [tiny.runner for tiny in runners])
    sequences += add_sequences(scheduler, [3, 4, 5])
    outputs = run_to_the_end(scheduler, runners)
    assert [seq.output_token_ids for seq in sequences] == answers
    accepted = {found.num_accepted_tokens for output in outputs for found in output.outputs}
    assert accepted == {0, 1, 2, 3}


def test_speculation_with_a_head_equals_transformers(checkpoint: Path, answers: list[list[int]]) -> None:
    runners = []
    for padding in PADDINGS.values():
        drafter = make_graphed_drafter(tiny_head(), SIZES, padding(SIZES))
        runners.append(make_runner(checkpoint, SIZES, padding(SIZES), drafter))
    scheduler = make_loop(SIZES, has_drafter=True)
    sequences = add_sequences(scheduler, [0, 1, 2, 3, 4, 5])
    outputs = run_to_the_end(scheduler, runners)
    assert [seq.output_token_ids for seq in sequences] == answers
    assert any(found.draft_token_ids for output in outputs for found in output.outputs)


@pytest.mark.parametrize("policy", PADDINGS)
def test_broken_cache_fails_its_own_sequence_only(policy: str, checkpoint: Path, answers: list[list[int]]) -> None:
    """Padding rows of the broken sequence see its NaN too; they must not pass it on through the null block."""
    tiny = make_runner(checkpoint, SIZES, PADDINGS[policy](SIZES), scripted(answers))
    scheduler = make_loop(SIZES, has_drafter=True)
    sequences = add_sequences(scheduler, [0, 2, 3])
    while any(seq.num_output_tokens == 0 for seq in sequences):
        run_step(scheduler, [tiny.runner])
    step = scheduler.schedule()
    first_block = next(scheduled.block_table[0] for scheduled in step.scheduled if scheduled.seq_id == 2)
    for cache in tiny.storage.layers:
        cache.key[first_block] = float("nan")
    output = tiny.runner.execute(step)
    for cache in tiny.storage.layers:
        cache.key[first_block] = 0.0  # no step leaves NaN in a block that others may get; only this test did
    commit(scheduler, step, output)
    assert error_of(output, 2) is not None
    assert [found.token_ids for found in output.outputs if found.seq_id == 2] == [()]
    assert error_of(output, 0) is None
    assert error_of(output, 3) is None
    run_to_the_end(scheduler, [tiny])
    assert [seq.output_token_ids for seq in (sequences[0], sequences[2])] == [answers[0], answers[3]]


@pytest.mark.parametrize("policy", PADDINGS)
@pytest.mark.parametrize("prompt_length", [2, 3, 40])
def test_broken_token_fails_its_request_at_once_and_leaves_no_trace(
    policy: str, prompt_length: int, broken: Path, answers: list[list[int]]
) -> None:
    """Also in a chunk that is not sampled, and in a prompt that is as short as a decoding step."""
    tiny = make_runner(broken, SIZES, PADDINGS[policy](SIZES), scripted(answers))
    scheduler = make_loop(SIZES, has_drafter=True)
    prompt = [BROKEN_TOKEN, *make_prompts([prompt_length - 1])[0]]
    scheduler.add(greedy_sequence(9, prompt, 4))
    healthy = add_sequences(scheduler, [2])
    output = run_step(scheduler, [tiny.runner])
    assert error_of(output, 9) is not None
    healthy += add_sequences(scheduler, [0, 1, 3, 4, 5])  # in the blocks of the failed one
    run_to_the_end(scheduler, [tiny])
    assert [seq.output_token_ids for seq in healthy] == [answers[i] for i in (2, 0, 1, 3, 4, 5)]
    assert all(cache.key.isfinite().all() and cache.value.isfinite().all() for cache in tiny.storage.layers)


@pytest.mark.parametrize("policy", PADDINGS)
def test_broken_draft_is_only_a_wrong_draft(policy: str, broken: Path, answers: list[list[int]]) -> None:
    tiny = make_runner(broken, SIZES, PADDINGS[policy](SIZES), scripted(answers, wrong_token_id=BROKEN_TOKEN))
    scheduler = make_loop(SIZES, has_drafter=True)
    sequences = add_sequences(scheduler, [0, 1, 2, 3, 4, 5])
    run_to_the_end(scheduler, [tiny])
    assert [seq.output_token_ids for seq in sequences] == answers


def test_a_failed_device_is_nobodys_fault(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = make_runner(checkpoint, SIZES, eager_padding(SIZES)).runner

    def fail(*_: object) -> None:
        raise torch.AcceleratorError("an illegal memory access was encountered")

    monkeypatch.setattr(runner, "_execute", fail)
    with pytest.raises(DeviceLostError, match="needs a new process"):
        runner.execute(SchedulerOutput(scheduled=(), num_scheduled_tokens=0))
