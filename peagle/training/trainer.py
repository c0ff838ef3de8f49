"""The run of a training: data, target and head are put together, then step after step until the tokens are used up.

Owns the order of things, what is logged and when. Refuses to know how a method makes gradients (`step`), and the files'
contents (`checkpoint`, `metrics_log`).
"""

from __future__ import annotations

import hashlib
import logging
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from peagle.config import ModelConfig, parse_bytes
from peagle.drafter.head import DraftHead
from peagle.errors import ConfigError
from peagle.models.loader import choose_device
from peagle.text.tokenizer import Tokenizer
from peagle.training.checkpoint import CheckpointStore, Progress, RunIdentity
from peagle.training.config import OptimiserOptions, TrainConfig
from peagle.training.dataset import Dataset, Example, load_dataset
from peagle.training.distributed import ProcessGroup, join_process_group
from peagle.training.features import FeatureCache, FeatureExtractor, target_fingerprint
from peagle.training.held_out import measure_acceptance
from peagle.training.initialise import build_head, head_config, start_mask
from peagle.training.metrics_log import MetricsLog
from peagle.training.peagle_step import PEagleStep
from peagle.training.provenance import describe, write_provenance
from peagle.training.schedule import learning_rate
from peagle.training.step import StepReport, TrainingStep
from peagle.training.target_answers import load_transformers_model
from peagle.training.vocabulary import DraftVocabulary, build_draft_vocabulary, count_tokens

logger = logging.getLogger(__name__)

_COMPUTE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainResult:
    """How a run ended."""

    progress: Progress
    checkpoint: Path | None
    acceptance_length: float | None  # on held-out conversations, None if there are none


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Workshop:
    """Everything that a run works with."""

    dataset: Dataset
    cache: FeatureCache
    head: DraftHead
    step: TrainingStep
    optimiser: torch.optim.Optimizer
    store: CheckpointStore
    group: ProcessGroup

    @property
    def trained(self) -> list[torch.nn.Parameter]:
        """What the optimiser changes."""
        return [parameter for parameter in self.head.parameters() if parameter.requires_grad]


def run(config: TrainConfig, argv: Sequence[str] = ()) -> TrainResult:
    """Train, or go on with a run that was stopped. See `TrainConfig`.

    Raises:
        ConfigError: something about data, target, settings or disk is wrong, or the loss is not a number any more; the
            last checkpoint is there.
    """
    if config.run.num_threads is not None:
        torch.set_num_threads(config.run.num_threads)
    group = join_process_group()
    workshop = prepare(config, group)
    if group.is_first:
        write_provenance(config.output, describe(argv, data_files=config.data))
    group.wait()
    progress = workshop.store.restore(workshop.head, workshop.optimiser)
    return Trainer(config, workshop, progress).train()


def prepare(config: TrainConfig, group: ProcessGroup) -> Workshop:
    """Load everything, and find what is wrong before an hour is lost."""
    config.output.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer.from_directory(config.target)
    options = config.data_options
    dataset = load_dataset(config.data, tokenizer, max_length=options.max_length, held_out=options.held_out)
    device = choose_device(ModelConfig(model=str(config.target)))
    compute_dtype = _COMPUTE_DTYPES[config.run.compute_dtype]
    target = load_transformers_model(config.target, dtype=compute_dtype, device=device)
    mask_token_id = choose_mask_token(config.head.mask_token_id, tokenizer, dataset)
    geometry = head_config(target, config.head, mask_token_id=mask_token_id)
    vocabulary = _draft_vocabulary(dataset, tokenizer, size=geometry.draft_vocab_size, vocab_size=geometry.vocab_size)
    if group.is_first:
        logger.info("%s", dataset.summary())
        logger.info("%s", vocabulary.summary())
    head = build_head(target, geometry, vocabulary, from_target=config.head.from_target, seed=config.run.seed)
    fingerprint = target_fingerprint(config.target)
    extractor = FeatureExtractor(
        target, aux_layer_ids=geometry.aux_layer_ids, num_soft_targets=options.num_soft_targets
    )
    name = f"{fingerprint}-{'-'.join(map(str, geometry.aux_layer_ids))}-{options.num_soft_targets}"
    cache = FeatureCache(
        extractor,
        directory=None if options.cache_dir is None else options.cache_dir / name,
        limit=parse_bytes(options.cache_limit),
    )
    start_mask(head, [cache.get(example).features for example in dataset.train[:4]])
    step: TrainingStep = PEagleStep(
        head,
        _target_to_draft(vocabulary).to(device),
        depth=config.head.depth,
        options=config.loss,
        compute_dtype=compute_dtype,
    )
    identity = RunIdentity(
        target=fingerprint, method=config.head.method, data=_data_fingerprint(dataset), head=str(asdict(geometry))
    )
    return Workshop(
        dataset=dataset,
        cache=cache,
        head=head,
        step=step,
        optimiser=_make_optimiser(head, config.optimiser),
        store=CheckpointStore(config.output, identity, keep=config.run.keep_checkpoints),
        group=group,
    )


def choose_mask_token(wanted: int | None, tokenizer: Tokenizer, dataset: Dataset) -> int:
    """A token that no conversation has.

    Raises:
        ConfigError: the wanted one occurs, or every special token does.
    """
    used = np.unique(np.concatenate([one.token_ids for one in (*dataset.train, *dataset.held_out)]))
    if wanted is not None:
        if wanted in used:
            raise ConfigError(f"mask_token_id {wanted} occurs in the data, so it cannot stand for an unknown token")
        return wanted
    free = sorted(tokenizer.special_token_ids - set(used.tolist()) - tokenizer.eos_token_ids)
    if not free:
        raise ConfigError("every special token occurs in the data: set mask_token_id to a token that none has")
    return free[-1]


class Trainer:
    """The loop over steps.

    Args:
        config: of the run.
        workshop: everything loaded, the state of the last checkpoint included.
        progress: of that checkpoint.
    """

    def __init__(self, config: TrainConfig, workshop: Workshop, progress: Progress) -> None:
        self._config = config
        self._workshop = workshop
        self._progress = progress
        self._report = StepReport()
        self._report_start = time.monotonic()
        self._acceptance_length: float | None = None
        self._checkpoint: Path | None = None
        self._log: MetricsLog | None = None
        if workshop.group.is_first:
            self._log = MetricsLog(config.output / "metrics.jsonl", resume_step=progress.step)

    def train(self) -> TrainResult:
        """Until the tokens are used up."""
        options = self._config.run
        with tqdm(
            total=options.max_tokens,
            initial=self._progress.num_tokens,
            unit="tok",
            unit_scale=True,
            desc="training",
            disable=not self._workshop.group.is_first,
            file=sys.stderr,
        ) as bar:
            while self._progress.num_tokens < options.max_tokens:
                before = self._progress.num_tokens
                self._step()
                bar.update(self._progress.num_tokens - before)
                if self._progress.step % options.log_interval == 0:
                    bar.set_postfix_str(self._log_progress())
                if self._progress.step % options.eval_interval == 0:
                    self._measure()
                if self._progress.step % options.checkpoint_interval == 0:
                    self._save()
        self._measure()
        self._save()
        return TrainResult(
            progress=self._progress, checkpoint=self._checkpoint, acceptance_length=self._acceptance_length
        )

    def _step(self) -> None:
        workshop, options = self._workshop, self._config.optimiser
        for group in workshop.optimiser.param_groups:
            group["lr"] = learning_rate(options, step=self._progress.step, steps_left=self._steps_left())
        workshop.optimiser.zero_grad(set_to_none=True)
        report = StepReport()
        first = self._progress.num_conversations
        for place in range(first, first + options.batch_size):
            if place % workshop.group.num_processes != workshop.group.rank:
                continue
            example = example_at(workshop.dataset.train, place, seed=self._config.run.seed)
            rng = np.random.default_rng((self._config.run.seed, place))
            features = workshop.cache.get(example)
            report.add(workshop.step.backward(example, features, rng, scale=1.0 / options.batch_size))
        workshop.group.sum_gradients(workshop.trained)
        loss, num_tokens = workshop.group.sum_counts([report.loss, float(report.num_response_tokens)])
        norm = torch.nn.utils.clip_grad_norm_(workshop.trained, options.max_grad_norm)
        if not (math.isfinite(loss) and bool(norm.isfinite())):
            raise ConfigError(
                f"the loss is not a number any more (step {self._progress.step}, loss {loss}); the last checkpoint is "
                "kept: go on from it with a lower learning_rate or compute_dtype float32"
            )
        workshop.optimiser.step()
        self._report.add(report)
        self._progress = Progress(
            step=self._progress.step + 1,
            num_conversations=first + options.batch_size,
            num_tokens=self._progress.num_tokens + round(num_tokens),
        )

    def _steps_left(self) -> int | None:
        if self._progress.step == 0:
            return None
        tokens_a_step = self._progress.num_tokens / self._progress.step
        return math.ceil((self._config.run.max_tokens - self._progress.num_tokens) / max(tokens_a_step, 1.0))

    def _log_progress(self) -> str:
        report, seconds = self._report, time.monotonic() - self._report_start
        loss = report.loss / max(report.num_conversations, 1)
        rates = [
            matches / count if count else 0.0
            for matches, count in zip(report.num_matches, report.num_elements, strict=True)
        ]
        if self._log is not None:
            self._log.append(
                step=self._progress.step,
                num_tokens=self._progress.num_tokens,
                loss=loss,
                match_rates=rates,
                tokens_per_s=report.num_response_tokens / seconds,
                learning_rate=self._workshop.optimiser.param_groups[0]["lr"],
            )
        self._report, self._report_start = StepReport(), time.monotonic()
        return f"loss {loss:.3f} match {' '.join(f'{rate:.2f}' for rate in rates)}"

    def _measure(self) -> None:
        workshop = self._workshop
        examples = [one for one in workshop.dataset.held_out if one.is_greedy][: self._config.run.eval_limit]
        if not examples or self._log is None:
            return
        counts = measure_acceptance(workshop.head, examples, workshop.cache, depth=self._config.head.depth)
        self._acceptance_length = counts.acceptance_length
        self._log.append(
            step=self._progress.step,
            num_tokens=self._progress.num_tokens,
            acceptance_length=counts.acceptance_length,
            acceptance=list(counts.conditional_rates),
        )
        rates = " ".join(f"{rate:.2f}" for rate in counts.conditional_rates)
        tqdm.write(
            f"step {self._progress.step}, {self._progress.num_tokens:,} tokens: "
            f"held-out acceptance length {counts.acceptance_length:.3f} ({rates})",
            file=sys.stderr,
        )

    def _save(self) -> None:
        if self._workshop.group.is_first:
            self._checkpoint = self._workshop.store.save(self._workshop.head, self._workshop.optimiser, self._progress)
        self._workshop.group.wait()


def example_at(examples: Sequence[Example], place: int, *, seed: int) -> Example:
    """The conversation at a place in the endless order: each epoch is a permutation of its own."""
    epoch, index = divmod(place, len(examples))
    return examples[int(np.random.default_rng((seed, 7, epoch)).permutation(len(examples))[index])]


def _make_optimiser(head: DraftHead, options: OptimiserOptions) -> torch.optim.Optimizer:
    matrices = [p for p in head.parameters() if p.requires_grad and p.ndim > 1]
    vectors = [p for p in head.parameters() if p.requires_grad and p.ndim <= 1]
    groups: list[dict[str, Any]] = [
        {"params": matrices, "weight_decay": options.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=options.learning_rate, betas=(0.9, 0.95), fused=True)


def _draft_vocabulary(dataset: Dataset, tokenizer: Tokenizer, *, size: int, vocab_size: int) -> DraftVocabulary:
    answers = [example.token_ids[example.is_supervised].tolist() for example in dataset.train]
    counts = count_tokens(answers, vocab_size=vocab_size)
    return build_draft_vocabulary(counts, size, always=tokenizer.eos_token_ids)


def _target_to_draft(vocabulary: DraftVocabulary) -> Tensor:
    table = torch.full((len(vocabulary.is_drafted),), -1, dtype=torch.int64)
    table[vocabulary.target_ids] = torch.arange(len(vocabulary.offsets))
    return table


def _data_fingerprint(dataset: Dataset) -> str:
    return hashlib.sha256("".join(example.key for example in dataset.train).encode()).hexdigest()[:16]
