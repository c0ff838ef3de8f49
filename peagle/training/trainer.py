"""The run of a training: step after step until the tokens are used up.

Owns the order of things, what is logged and when. Refuses to know how a method makes gradients (`step`), and the files'
contents (`checkpoint`, `metrics_log`).
"""

from __future__ import annotations

import importlib.util
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from peagle.errors import ConfigError
from peagle.training.checkpoint import Progress
from peagle.training.config import TrainConfig
from peagle.training.dataset import Example
from peagle.training.distributed import join_process_group
from peagle.training.held_out import measure_acceptance
from peagle.training.metrics_log import MetricsLog, read_metrics
from peagle.training.plot import plot_training
from peagle.training.schedule import learning_rate
from peagle.training.step import StepReport
from peagle.training.workshop import Workshop, prepare


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainResult:
    """How a run ended."""

    progress: Progress
    checkpoint: Path | None
    acceptance_length: float | None  # on held-out conversations, None if there are none


def run(config: TrainConfig, argv: Sequence[str] = ()) -> TrainResult:
    """Train, or go on with a run that was stopped. See `TrainConfig`.

    Raises:
        ConfigError: something about data, target, settings or disk is wrong, or the loss is not a number any more; the
            last checkpoint is there.
    """
    if config.run.num_threads is not None:
        torch.set_num_threads(config.run.num_threads)
    group = join_process_group()
    try:
        workshop = prepare(config, group, argv)
        group.wait()
        progress = workshop.store.restore(workshop.head, workshop.optimiser)
        return Trainer(config, workshop, progress).train()
    except OSError as error:
        raise ConfigError(
            f"cannot write to {config.output}: {error}; free some space and start again, the run goes on from its last "
            "checkpoint"
        ) from error
    finally:
        group.leave()


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
                self._pause()
        self._measure()
        self._save()
        return TrainResult(
            progress=self._progress, checkpoint=self._checkpoint, acceptance_length=self._acceptance_length
        )

    def _pause(self) -> None:
        """What is done between two steps, which does not count as training in `tokens_per_s`."""
        options, begin = self._config.run, time.monotonic()
        if self._progress.step % options.eval_interval == 0:
            self._measure()
        if self._progress.step % options.checkpoint_interval == 0:
            self._save()
        self._report_start += time.monotonic() - begin

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
        counts = measure_acceptance(
            workshop.head,
            examples,
            workshop.cache,
            draft_answer=workshop.method.draft_answer,
            depth=self._config.head.depth,
        )
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
        self._draw()

    def _draw(self) -> None:
        if importlib.util.find_spec("matplotlib") is None:
            return
        entries = read_metrics(self._config.output / "metrics.jsonl")
        plot_training(entries, self._config.output / "training.png")

    def _save(self) -> None:
        if not all(bool(parameter.isfinite().all()) for parameter in self._workshop.trained):
            raise ConfigError(
                f"the weights are not numbers any more (step {self._progress.step}); the last checkpoint is kept: go "
                "on from it with a lower learning_rate or compute_dtype float32"
            )
        if self._workshop.group.is_first:
            self._checkpoint = self._workshop.store.save(self._workshop.head, self._workshop.optimiser, self._progress)
        self._workshop.group.wait()


def example_at(examples: Sequence[Example], place: int, *, seed: int) -> Example:
    """The conversation at a place in the endless order: each epoch is a permutation of its own."""
    epoch, index = divmod(place, len(examples))
    return examples[int(np.random.default_rng((seed, 7, epoch)).permutation(len(examples))[index])]
