"""Model runners over tiny checkpoints, with both ways of padding, and the loop that drives them."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel

from peagle.attention.sdpa import SdpaAttention
from peagle.cuda_graphs.buckets import Buckets
from peagle.drafter.head import DraftHead
from peagle.drafter.interface import NO_TOKEN, DraftBatch, Drafter, DraftProposal
from peagle.drafter.null import NullDrafter
from peagle.drafter.peagle import PEagleDrafter, kv_geometry
from peagle.kv_cache.storage import KVGeometry, KVStorage
from peagle.models.interface import TargetModel
from peagle.models.loader import Precision, load_target, read_model_config
from peagle.outputs import ModelRunnerOutput, SchedulerOutput
from peagle.runner.graphed_drafter import GraphedDrafter
from peagle.runner.input_batch import PaddingPolicy
from peagle.runner.model_runner import ModelRunner, RunnerLimits
from peagle.sampling_params import SamplingParams
from peagle.scheduler import Scheduler
from peagle.sequence import FinishReason, Sequence
from tests.builders.scheduler import make_kv, make_scheduler, make_sequence

TAPS = (1, 2, 3)


@dataclass(frozen=True, kw_only=True)
class RunnerSizes:
    """Limits of a tiny engine."""

    num_speculative_tokens: int = 3
    max_num_seqs: int = 6
    max_num_batched_tokens: int = 24
    max_model_len: int = 64
    block_size: int = 4
    num_blocks: int = 64

    @property
    def max_num_blocks(self) -> int:
        return -(-self.max_model_len // self.block_size)


def eager_padding(sizes: RunnerSizes) -> PaddingPolicy:
    """As on a CPU: no padding but to the widest sequence, and several spans."""
    return PaddingPolicy(
        batch_sizes=Buckets.every(sizes.max_num_seqs),
        block_counts=Buckets.every(sizes.max_num_blocks),
        draft_block_counts=Buckets.every(sizes.max_num_blocks + 1 + sizes.num_speculative_tokens),
        fixed_width=None,
        may_split=True,
    )


def fixed_padding(sizes: RunnerSizes) -> PaddingPolicy:
    """As with captured graphs: everything is rounded up."""
    return PaddingPolicy(
        batch_sizes=Buckets.doubling(sizes.max_num_seqs),
        block_counts=Buckets.doubling(sizes.max_num_blocks),
        draft_block_counts=Buckets.doubling(sizes.max_num_blocks + 1 + sizes.num_speculative_tokens),
        fixed_width=sizes.num_speculative_tokens + 1,
        may_split=False,
    )


PADDINGS = {"eager": eager_padding, "fixed": fixed_padding}


@dataclass(frozen=True, kw_only=True, eq=False)
class TinyRunner:
    """A runner, and the memory that tests look into."""

    runner: ModelRunner
    target: TargetModel
    storage: KVStorage


def make_runner(
    directory: Path,
    sizes: RunnerSizes,
    padding: PaddingPolicy,
    drafter: Drafter | None = None,
    *,
    dtype: torch.dtype = torch.float64,
    cache_dtype: torch.dtype | None = None,
    device: str = "cpu",
    capture: bool = False,
) -> TinyRunner:
    """Load the target and give it a pool of its own, of the target's type unless given."""
    drafter = drafter or NullDrafter()
    precision = Precision(device=torch.device(device), compute_dtype=dtype, packed=False)
    taps = drafter.aux_layer_ids
    target = load_target(directory, read_model_config(directory), precision, SdpaAttention(), tap_layer_ids=taps)
    geometry = KVGeometry(
        block_size=sizes.block_size,
        num_kv_heads=target.geometry.num_kv_heads,
        head_dim=target.geometry.head_dim,
        dtype=cache_dtype or dtype,
        device=torch.device(device),
    )
    storage = KVStorage(num_layers=target.geometry.num_layers, num_blocks=sizes.num_blocks, geometry=geometry)
    limits = RunnerLimits(
        max_num_seqs=sizes.max_num_seqs,
        max_num_blocks=sizes.max_num_blocks,
        num_speculative_tokens=sizes.num_speculative_tokens,
    )
    runner = ModelRunner(target, storage, drafter, padding=padding, limits=limits, capture=capture)
    return TinyRunner(runner=runner, target=target, storage=storage)


def make_plain_drafter(head: DraftHead, sizes: RunnerSizes) -> PEagleDrafter:
    """A head with a pool of its own."""
    storage = KVStorage(
        num_layers=head.config.num_hidden_layers,
        num_blocks=sizes.num_blocks,
        geometry=kv_geometry(head, block_size=sizes.block_size),
    )
    return PEagleDrafter(
        head=head,
        attention=SdpaAttention(),
        num_speculative_tokens=sizes.num_speculative_tokens,
        storage=storage,
        max_model_len=sizes.max_model_len,
    )


def make_graphed_drafter(
    head: DraftHead, sizes: RunnerSizes, padding: PaddingPolicy, *, capture: bool = False
) -> GraphedDrafter:
    """The same at fixed shapes."""
    return GraphedDrafter(make_plain_drafter(head, sizes), padding=padding, capture=capture)


class ScriptedDrafter:
    """Drafts from a known answer, wrong at some positions, so that a step accepts none, some or all of its drafts.

    Args:
        answers: prompt and answer of each sequence, by seq id.
        num_speculative_tokens: K.
        wrong_token_id: proposed where the drafter errs.
    """

    num_mask_slots = 0
    num_layers = 0
    aux_layer_ids = TAPS

    def __init__(self, answers: dict[int, list[int]], num_speculative_tokens: int, *, wrong_token_id: int = 0) -> None:
        self._answers = answers
        self._wrong_token_id = wrong_token_id
        self.num_speculative_tokens = num_speculative_tokens

    def propose(self, batch: DraftBatch) -> DraftProposal:
        """See `Drafter`."""
        indices, rows = [], []
        for index, scheduled in enumerate(batch.scheduled):
            emitted = batch.output_token_ids[index]
            if not emitted or scheduled.max_next_drafts == 0:
                continue
            position = scheduled.start + scheduled.num_known_tokens + len(emitted)
            answer = self._answers[scheduled.seq_id][position : position + scheduled.max_next_drafts]
            drafts = [
                self._wrong_token_id if (position + depth) % 5 == 0 else token_id
                for depth, token_id in enumerate(answer)
            ]
            indices.append(index)
            rows.append(drafts + [NO_TOKEN] * (self.num_speculative_tokens - len(drafts)))
        shape = (len(rows), self.num_speculative_tokens)
        return DraftProposal(indices=tuple(indices), draft_token_ids=torch.tensor(rows, dtype=torch.int64).view(shape))


def make_prompts(lengths: SequenceOf[int], *, seed: int = 0) -> list[list[int]]:
    """Random prompts of token ids below 290."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(1, 290, (length,), generator=generator).tolist() for length in lengths]


@torch.inference_mode()
def greedy_answer(model: PreTrainedModel, prompt: list[int], num_tokens: int) -> list[int]:
    """The unmodified model's own words, without any cache."""
    token_ids = list(prompt)
    for _ in range(num_tokens):
        logits = model(torch.tensor([token_ids]), use_cache=False).logits
        token_ids.append(int(logits[0, -1].argmax()))
    return token_ids[len(prompt) :]


def greedy_sequence(seq_id: int, prompt: list[int], max_tokens: int) -> Sequence:
    """A sequence that decodes greedily."""
    return make_sequence(seq_id, prompt, max_tokens=max_tokens, params=SamplingParams(temperature=0.0))


def make_loop(sizes: RunnerSizes, *, has_drafter: bool) -> Scheduler:
    """A real scheduler for these sizes."""
    return make_scheduler(
        kv=make_kv(num_blocks=sizes.num_blocks, block_size=sizes.block_size, has_drafter=has_drafter),
        max_num_seqs=sizes.max_num_seqs,
        max_num_batched_tokens=sizes.max_num_batched_tokens,
        max_model_len=sizes.max_model_len,
        num_speculative_tokens=sizes.num_speculative_tokens if has_drafter else 0,
    )


def run_step(scheduler: Scheduler, runners: SequenceOf[ModelRunner]) -> ModelRunnerOutput:
    """One step on every runner; all must find the same."""
    step = scheduler.schedule()
    output, *others = [runner.execute(step) for runner in runners]
    assert all(other == output for other in others)
    commit(scheduler, step, output)
    return output


def commit(scheduler: Scheduler, step: SchedulerOutput, output: ModelRunnerOutput) -> None:
    """Hand a step's result to the scheduler. Sequences with an error end, as in the engine."""
    for found in output.outputs:
        if found.error is not None:
            scheduler.finish(found.seq_id, FinishReason.ERROR)
    scheduler.update_from_output(step, output)
    scheduler.check_integrity()
