"""The only orchestrator of the device: target pass, verification, draft pass.

Only what every step needs may enter this file. Owns the order of passes and the way back to the host. Refuses to
know the scheduler's reasons, text, and which drafter or attention kernel it drives.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import torch
from torch import Tensor

from peagle.attention.metadata import AttentionMetadata, QueryGroup
from peagle.cuda_graphs.buckets import GridShape
from peagle.cuda_graphs.buffers import BufferSpec, StaticBuffers
from peagle.cuda_graphs.graph_runner import GraphRunner
from peagle.drafter.interface import DraftBatch, Drafter, DraftProposal
from peagle.errors import DeviceLostError
from peagle.kv_cache.storage import KVStorage
from peagle.models.interface import TargetModel, TargetOutput
from peagle.outputs import ModelRunnerOutput, ScheduledSequence, SchedulerOutput, SequenceOutput, StepTiming
from peagle.runner.input_batch import InputBatch, PaddingPolicy, PagePool, Section, build_input_batch
from peagle.sampling.batch import SamplingMetadata, SamplingRow
from peagle.sampling.sampler import sample
from peagle.verifier.acceptance import VerifyResult, verify
from peagle.verifier.layout import NO_TOKEN, padded_drafts, padded_rows

_NOT_NUMBERS = "the model's hidden states or logits are not numbers for this request"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerLimits:
    """Largest step, from which the fixed buffers are sized."""

    max_num_seqs: int
    max_num_blocks: int  # of one sequence
    num_speculative_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NextDrafts:
    """What is proposed for the next step of a sequence."""

    token_ids: SequenceOf[int] = ()
    confidences: SequenceOf[float] = ()
    parents: SequenceOf[int] | None = None


class ModelRunner:
    """Executes steps.

    Args:
        target: the target model.
        storage: its KV pool.
        drafter: proposes drafts; the null drafter makes this plain decoding.
        padding: how decoding grids are padded.
        limits: the largest step.
        capture: capture CUDA graphs for decoding steps.
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
    ) -> None:
        self._target = target
        self._storage = storage
        self._drafter = drafter
        self._padding = padding
        self._max_width = limits.num_speculative_tokens + 1
        self._pool = PagePool(block_size=storage.block_size, null_block=storage.null_block)
        self._device = storage.layers[0].key.device
        self._graphs: GraphRunner[GridShape] = GraphRunner(
            self._decode, _decode_buffers(limits, padding, self._device), capture=capture
        )

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
            logits = outputs["logits"]
            if len(rows) < len(logits):  # some rows are padding
                logits = logits[rows]
            tokens = self._verify(batch.sampling, logits)
        else:
            target_output = self._run_sections(batch)
            features, is_finite = target_output.features, _finite_rows(target_output.hidden)
            tokens = {}
            if rows:
                tokens = self._verify(batch.sampling, self._target.logits(target_output.hidden[rows]))
        tokens |= _broken_prefills(batch, is_finite)
        verified = time.perf_counter()
        drafts = self._draft(batch, tokens, features)
        return ModelRunnerOutput(
            outputs=tuple(_sequence_output(scheduled, tokens, drafts) for scheduled in step.scheduled),
            timing=StepTiming(verify_s=verified - started, draft_s=time.perf_counter() - verified),
        )

    def _run_grid(self, section: Section) -> dict[str, Tensor]:
        values = {
            "input_ids": section.input_ids,
            "positions": section.positions,
            "slot_mapping": section.slot_mapping,
            "block_tables": section.block_tables,
        }
        return self._graphs.run(section.shape, values)

    def _decode(self, shape: GridShape, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A decoding step at a fixed shape; captured on CUDA, so nothing here may look at values."""
        groups = self._groups(shape, 0, inputs["positions"], inputs["block_tables"])
        metadata = AttentionMetadata(slot_mapping=inputs["slot_mapping"], groups=groups)
        output = self._target.forward(inputs["input_ids"], inputs["positions"], metadata, self._storage)
        outputs = {"logits": self._target.logits(output.hidden), "is_finite": _finite_rows(output.hidden)}
        if output.features is not None:
            outputs["features"] = output.features
        return outputs

    def _run_sections(self, batch: InputBatch) -> TargetOutput:
        groups: list[QueryGroup] = []
        for section in batch.sections:
            positions, tables = self._to_device(section.positions), self._to_device(section.block_tables)
            groups.extend(self._groups(section.shape, section.first_row, positions, tables))
        slots = torch.cat([self._to_device(section.slot_mapping) for section in batch.sections])
        return self._target.forward(
            torch.cat([self._to_device(section.input_ids) for section in batch.sections]),
            torch.cat([self._to_device(section.positions) for section in batch.sections]),
            AttentionMetadata(slot_mapping=slots, groups=tuple(groups)),
            self._storage,
        )

    def _groups(
        self, shape: GridShape, first_row: int, positions: Tensor, block_tables: Tensor
    ) -> tuple[QueryGroup, ...]:
        """One query group for each span of a grid."""
        grid = positions.view(shape.num_seqs, shape.width)
        groups, first_seq = [], 0
        for span in shape.spans:
            last_seq = first_seq + span.num_seqs
            groups.append(
                QueryGroup(
                    first_row=first_row + first_seq * shape.width,
                    positions=grid[first_seq:last_seq],
                    block_tables=block_tables[first_seq:last_seq, : span.num_blocks],
                    block_size=self._pool.block_size,
                    dtype=self._target.dtype,
                )
            )
            first_seq = last_seq
        return tuple(groups)

    def _verify(self, sampling: list[ScheduledSequence], logits: Tensor) -> dict[int, SequenceOutput]:
        """Sample every row, compare with the drafts, and bring the result to the host; by seq id.

        Args:
            sampling: in the order of their rows.
            logits: [num_rows, vocab_size], 1 + num_draft_tokens rows for each.
        """
        rows = [
            SamplingRow(params=s.params, seed=s.seed, position=s.start + s.num_known_tokens + offset)
            for s in sampling
            for offset in range(s.num_draft_tokens + 1)
        ]
        sampled = sample(logits, SamplingMetadata.build(rows, device=self._device))
        num_drafts = [s.num_draft_tokens for s in sampling]
        grid = padded_rows(num_drafts, device=self._device)  # [num_sampling, K + 1]
        drafts = padded_drafts([s.token_ids[s.num_known_tokens :] for s in sampling], device=self._device)
        return _to_host(sampling, verify(sampled.token_ids[grid], drafts, sampled.is_valid[grid]))

    def _draft(
        self, batch: InputBatch, tokens: Mapping[int, SequenceOutput], features: Tensor | None
    ) -> dict[int, NextDrafts]:
        """Proposals for the next step, by seq id. Also keeps the drafter's KV up with the target's."""
        if not self._drafter.num_speculative_tokens:
            return {}
        if features is None:  # nobody reads them
            features = torch.empty(0, 0, device=self._device)
        draft_batch = DraftBatch(
            scheduled=batch.scheduled,
            output_token_ids=tuple(tokens[s.seq_id].token_ids if s.seq_id in tokens else () for s in batch.scheduled),
            features=features,
            first_rows=batch.first_rows,
        )
        proposal = self._drafter.propose(draft_batch)
        return {batch.scheduled[index].seq_id: drafts for index, drafts in _next_drafts(proposal)}

    def _to_device(self, values: object) -> Tensor:
        return torch.as_tensor(values, device=self._device)


def _decode_buffers(limits: RunnerLimits, padding: PaddingPolicy, device: torch.device) -> StaticBuffers:
    num_seqs = padding.batch_sizes.sizes[-1]
    num_rows = num_seqs * (limits.num_speculative_tokens + 1)
    specs = {name: BufferSpec((num_rows,), torch.int64) for name in ("input_ids", "positions", "slot_mapping")}
    specs["block_tables"] = BufferSpec((num_seqs, padding.block_counts.sizes[-1]), torch.int64)
    return StaticBuffers(specs, device)


def _to_host(sampling: SequenceOf[ScheduledSequence], result: VerifyResult) -> dict[int, SequenceOutput]:
    accepted = result.num_accepted_tokens.tolist()
    emitted = result.output_token_ids.tolist()
    is_valid = result.is_valid.tolist()
    outputs = {}
    for index, scheduled in enumerate(sampling):
        is_usable = is_valid[index]
        outputs[scheduled.seq_id] = SequenceOutput(
            seq_id=scheduled.seq_id,
            token_ids=emitted[index][: accepted[index] + 1] if is_usable else (),
            num_accepted_tokens=accepted[index] if is_usable else 0,
            error=None if is_usable else _NOT_NUMBERS,
        )
    return outputs


def _next_drafts(proposal: DraftProposal) -> Iterator[tuple[int, NextDrafts]]:
    """Each index of a proposal with its drafts, on the host."""
    confidences = [()] * len(proposal.indices) if proposal.confidences is None else proposal.confidences.tolist()
    parents = [None] * len(proposal.indices) if proposal.parents is None else proposal.parents
    rows = zip(proposal.indices, proposal.draft_token_ids.tolist(), confidences, parents, strict=True)
    for index, token_ids, confidence, parent in rows:
        count = sum(token_id != NO_TOKEN for token_id in token_ids)  # what nobody asked for comes last
        yield (
            index,
            NextDrafts(
                token_ids=token_ids[:count],
                confidences=confidence[:count],
                parents=None if parent is None else parent[:count],
            ),
        )


def _finite_rows(hidden: Tensor) -> Tensor:
    """Which rows of hidden states hold numbers only, [num_rows] bool. A sum costs a fiftieth of asking each element."""
    return hidden.sum(-1, dtype=torch.float32).isfinite()


def _broken_prefills(batch: InputBatch, is_finite: Tensor) -> dict[int, SequenceOutput]:
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
        s.seq_id: SequenceOutput(seq_id=s.seq_id, token_ids=(), num_accepted_tokens=0, error=_NOT_NUMBERS)
        for s, first in prefills
        if not all(finite[first : first + s.num_known_tokens])
    }


def _sequence_output(
    scheduled: ScheduledSequence, tokens: Mapping[int, SequenceOutput], drafts: Mapping[int, NextDrafts]
) -> SequenceOutput:
    found = tokens.get(scheduled.seq_id)
    if found is None:
        return SequenceOutput(seq_id=scheduled.seq_id, token_ids=(), num_accepted_tokens=0)
    proposed = drafts.get(scheduled.seq_id, NextDrafts())
    return SequenceOutput(
        seq_id=found.seq_id,
        token_ids=found.token_ids,
        num_accepted_tokens=found.num_accepted_tokens,
        draft_token_ids=proposed.token_ids,
        draft_confidences=proposed.confidences,
        draft_parents=proposed.parents,
        error=found.error,
    )
