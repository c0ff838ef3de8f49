"""The only orchestrator of the device: target pass, verification, draft pass.

Only what every step needs may enter this file. Owns the order of passes and the way back to the host. Refuses to
know the scheduler's reasons, text, and which drafter or attention kernel it drives.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import torch
from torch import Tensor

from peagle.attention.metadata import AttentionMetadata, QueryGroup
from peagle.cuda_graphs.buckets import GridShape
from peagle.cuda_graphs.buffers import BufferSpec, StaticBuffers
from peagle.cuda_graphs.graph_runner import GraphRunner
from peagle.drafter.interface import DraftBatch, Drafter
from peagle.errors import DeviceLostError
from peagle.kv_cache.storage import KVStorage
from peagle.models.interface import TargetModel, TargetOutput
from peagle.outputs import (
    NOT_NUMBERS,
    ModelRunnerOutput,
    ScheduledSequence,
    SchedulerOutput,
    SequenceOutput,
    StepTiming,
    TokenLogprobs,
)
from peagle.runner.input_batch import InputBatch, PaddingPolicy, PagePool, Section, build_input_batch
from peagle.runner.next_drafts import NextDrafts, drafts_by_index
from peagle.runner.row_logprobs import prompt_logprobs
from peagle.runner.section_grid import SectionGrid
from peagle.runner.tree_rows import accepted_moves
from peagle.runner.verdict import Verdict
from peagle.runner.verification import MatchVerification, Verification
from peagle.stats import GraphStats


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerLimits:
    """Largest step, from which the fixed buffers are sized."""

    max_num_seqs: int
    max_num_blocks: int  # of one sequence
    num_speculative_tokens: int


@dataclass(frozen=True, slots=True)
class DecodeShape:
    """What a decoding step is captured for."""

    grid: GridShape
    has_trees: bool


class ModelRunner:
    """Executes steps.

    Args:
        target: the target model.
        storage: its KV pool.
        drafter: proposes drafts; the null drafter makes this plain decoding.
        padding: how decoding grids are padded.
        limits: the largest step.
        capture: capture CUDA graphs for decoding steps.
        verification: decides which drafts stand; None: rule R1.
    """

    def __init__(
        self,
        target: TargetModel,
        storage: KVStorage,
        drafter: Drafter,
        *,
        padding: PaddingPolicy,
        limits: RunnerLimits,
        capture: bool,
        verification: Verification | None = None,
    ) -> None:
        self._target = target
        self._storage = storage
        self._drafter = drafter
        self._verification: Verification = verification or MatchVerification()
        self._padding = padding
        self._max_width = limits.num_speculative_tokens + 1
        self._pool = PagePool(block_size=storage.block_size, null_block=storage.null_block)
        self._device = storage.layers[0].key.device
        self._graphs: GraphRunner[DecodeShape] = GraphRunner(
            self._decode, _decode_buffers(limits, padding, self._device), capture=capture
        )

    @property
    def graph_stats(self) -> GraphStats:
        """How steps ran: replayed, captured, or eagerly. Counts on."""
        return self._graphs.stats

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        """Run one step; one output per scheduled sequence, in order.

        Raises:
            DeviceLostError: the device failed for good. Anything else that is raised may be the fault of a sequence.
        """
        try:
            return self._execute(step)
        except torch.AcceleratorError as error:
            raise DeviceLostError(f"the device failed and needs a new process: {error}") from error

    @torch.inference_mode()
    def _execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        batch = build_input_batch(step.scheduled, self._pool, self._padding, max_width=self._max_width)
        started = time.perf_counter()
        rows = batch.logit_rows
        if batch.is_decode_only:
            outputs = self._run_grid(batch.sections[0])
            features, is_finite = outputs.get("features"), outputs["is_finite"]
            every_logit = logits = outputs["logits"]
            if len(rows) < len(logits):  # some rows are padding
                logits = logits[rows]
            verdicts = self._verification.verify(batch.sampling, logits)
            of_prompts = prompt_logprobs(batch, lambda wanted: every_logit[wanted])
        else:
            self._graphs.stats.eager += 1
            target_output = self._run_sections(batch)
            features, is_finite = target_output.features, _finite_rows(target_output.hidden)
            verdicts = {}
            if rows:
                verdicts = self._verification.verify(batch.sampling, self._target.logits(target_output.hidden[rows]))
            hidden = target_output.hidden
            of_prompts = prompt_logprobs(batch, lambda wanted: self._target.logits(hidden[wanted]))
        self._keep_accepted(batch.sampling, verdicts)
        verdicts |= _broken_prefills(batch, is_finite)
        verified = time.perf_counter()
        drafts = self._draft(batch, verdicts, features)
        return ModelRunnerOutput(
            outputs=tuple(_sequence_output(scheduled, verdicts, drafts, of_prompts) for scheduled in step.scheduled),
            timing=StepTiming(verify_s=verified - started, draft_s=time.perf_counter() - verified),
        )

    def _run_grid(self, section: Section) -> dict[str, Tensor]:
        values = {
            "input_ids": section.input_ids,
            "positions": section.positions,
            "slot_mapping": section.slot_mapping,
            "block_tables": section.block_tables,
        }
        if section.parent_rows is not None:
            values["parent_rows"] = section.parent_rows
        return self._graphs.run(DecodeShape(section.shape, has_trees=section.parent_rows is not None), values)

    def _decode(self, shape: DecodeShape, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A decoding step at a fixed shape; captured on CUDA, so nothing here may look at values."""
        grid = SectionGrid(
            shape=shape.grid,
            first_row=0,
            positions=inputs["positions"],
            block_tables=inputs["block_tables"],
            parent_rows=inputs.get("parent_rows"),
        )
        metadata = AttentionMetadata(slot_mapping=inputs["slot_mapping"], groups=tuple(self._query_groups(grid)))
        output = self._target.forward(inputs["input_ids"], inputs["positions"], metadata, self._storage)
        outputs = {"logits": self._target.logits(output.hidden), "is_finite": _finite_rows(output.hidden)}
        if output.features is not None:
            outputs["features"] = output.features
        return outputs

    def _run_sections(self, batch: InputBatch) -> TargetOutput:
        groups: list[QueryGroup] = []
        for section in batch.sections:
            grid = SectionGrid(
                shape=section.shape,
                first_row=section.first_row,
                positions=self._to_device(section.positions),
                block_tables=self._to_device(section.block_tables),
                parent_rows=None if section.parent_rows is None else self._to_device(section.parent_rows),
            )
            groups.extend(self._query_groups(grid))
        slots = torch.cat([self._to_device(section.slot_mapping) for section in batch.sections])
        return self._target.forward(
            torch.cat([self._to_device(section.input_ids) for section in batch.sections]),
            torch.cat([self._to_device(section.positions) for section in batch.sections]),
            AttentionMetadata(slot_mapping=slots, groups=tuple(groups)),
            self._storage,
        )

    def _query_groups(self, grid: SectionGrid) -> list[QueryGroup]:
        return grid.query_groups(block_size=self._pool.block_size, dtype=self._target.dtype)

    def _keep_accepted(self, sampling: SequenceOf[ScheduledSequence], verdicts: Mapping[int, Verdict]) -> None:
        """Move the keys and values of accepted paths to where a chain's are."""
        sources: list[int] = []
        destinations: list[int] = []
        for scheduled in sampling:
            moves = accepted_moves(scheduled, verdicts[scheduled.seq_id].accepted_nodes or (), self._pool.block_size)
            sources += moves.sources
            destinations += moves.destinations
        if sources:
            self._storage.move(self._to_device(sources), self._to_device(destinations))

    def _draft(
        self, batch: InputBatch, verdicts: Mapping[int, Verdict], features: Tensor | None
    ) -> dict[int, NextDrafts]:
        """Proposals for the next step, by seq id. Also keeps the drafter's KV up with the target's."""
        if not self._drafter.num_speculative_tokens:
            return {}
        if features is None:  # nobody reads them
            features = torch.empty(0, 0, device=self._device)
        draft_batch = DraftBatch(
            scheduled=batch.scheduled,
            output_token_ids=tuple(
                verdicts[s.seq_id].output.token_ids if s.seq_id in verdicts else () for s in batch.scheduled
            ),
            features=features,
            first_rows=batch.first_rows,
            accepted_rows=_accepted_rows(batch, verdicts),
        )
        proposal = self._drafter.propose(draft_batch)
        self._verification.remember(draft_batch, proposal)
        return {batch.scheduled[index].seq_id: drafts for index, drafts in drafts_by_index(proposal).items()}

    def _to_device(self, values: object) -> Tensor:
        return torch.as_tensor(values, device=self._device)


def _decode_buffers(limits: RunnerLimits, padding: PaddingPolicy, device: torch.device) -> StaticBuffers:
    num_seqs = padding.batch_sizes.sizes[-1]
    num_rows = num_seqs * (limits.num_speculative_tokens + 1)
    names = ("input_ids", "positions", "slot_mapping", "parent_rows")
    specs = {name: BufferSpec((num_rows,), torch.int64) for name in names}
    specs["block_tables"] = BufferSpec((num_seqs, padding.block_counts.sizes[-1]), torch.int64)
    return StaticBuffers(specs, device)


def _accepted_rows(batch: InputBatch, verdicts: Mapping[int, Verdict]) -> dict[int, list[int]]:
    """Rows of the accepted paths of trees, by seq id."""
    rows = {}
    for scheduled, first in zip(batch.scheduled, batch.first_rows, strict=True):
        verdict = verdicts.get(scheduled.seq_id)
        if verdict is not None and verdict.accepted_nodes is not None and verdict.output.error is None:
            first_node = first + scheduled.num_known_tokens
            rows[scheduled.seq_id] = [first_node + node for node in verdict.accepted_nodes]
    return rows


def _finite_rows(hidden: Tensor) -> Tensor:
    """Which rows of hidden states hold numbers only, [num_rows] bool. A sum costs a fiftieth of asking each element."""
    return hidden.sum(-1, dtype=torch.float32).isfinite()


def _broken_prefills(batch: InputBatch, is_finite: Tensor) -> dict[int, Verdict]:
    """Errors of sequences one of whose known rows overflowed, by seq id.

    The cache does not carry NaN on to later rows, so it has to be noticed in the step where it arises. A sequence with
    a single known row is left out: that row is sampled, and its logits tell.
    """
    prefills = [
        (s, first)
        for s, first in zip(batch.scheduled, batch.first_rows, strict=True)
        if s.num_known_tokens > 1 or not s.is_sampling
    ]
    if not prefills:
        return {}
    finite = is_finite.tolist()
    return {
        s.seq_id: Verdict(
            output=SequenceOutput(seq_id=s.seq_id, token_ids=(), num_accepted_tokens=0, error=NOT_NUMBERS)
        )
        for s, first in prefills
        if not all(finite[first : first + s.num_known_tokens])
    }


def _sequence_output(
    scheduled: ScheduledSequence,
    verdicts: Mapping[int, Verdict],
    drafts: Mapping[int, NextDrafts],
    of_prompts: Mapping[int, SequenceOf[TokenLogprobs]],
) -> SequenceOutput:
    verdict = verdicts.get(scheduled.seq_id)
    of_prompt = of_prompts.get(scheduled.seq_id, ())
    if verdict is None:
        return SequenceOutput(seq_id=scheduled.seq_id, token_ids=(), num_accepted_tokens=0, prompt_logprobs=of_prompt)
    found, proposed = verdict.output, drafts.get(scheduled.seq_id, NextDrafts())
    return SequenceOutput(
        seq_id=found.seq_id,
        token_ids=found.token_ids,
        num_accepted_tokens=found.num_accepted_tokens,
        draft_token_ids=proposed.token_ids,
        draft_confidences=proposed.confidences,
        draft_parents=proposed.parents,
        error=found.error,
        logprobs=found.logprobs,
        prompt_logprobs=of_prompt,
    )
