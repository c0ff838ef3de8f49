"""What a training run is told: frozen groups, checked before anything is loaded.

Owns names, defaults, ranges and help texts (`peagle train run --help` is built from them). Refuses to know torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from peagle.config_field import option
from peagle.errors import ConfigError

Method = Literal["peagle", "eagle3"]
Loss = Literal["kl", "cross_entropy", "total_variation"]
ComputeDtype = Literal["auto", "float32", "bfloat16"]


def _check(is_right: bool, message: str) -> None:
    if not is_right:
        raise ConfigError(message)


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """What is learned from."""

    max_length: int = option(2048, "tokens of a conversation; what is longer is cut, or left out if its prompt is")
    held_out: float = option(0.05, "share of the records, from the end of the file, that is only measured on")
    num_soft_targets: int = option(64, "likeliest tokens of the target that are kept for each position")
    cache_dir: Path | None = option(None, "directory that keeps the target's features between epochs and runs")
    cache_limit: str = option("20GB", "most bytes of the cache; what does not fit is computed anew each time")

    def __post_init__(self) -> None:
        _check(self.max_length >= 8, f"max_length must be at least 8, got {self.max_length}")
        _check(0.0 <= self.held_out < 1.0, f"held_out must be at least 0 and less than 1, got {self.held_out}")
        _check(self.num_soft_targets >= 1, f"num_soft_targets must be at least 1, got {self.num_soft_targets}")


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadOptions:
    """The head to be made."""

    method: Method = option("peagle", "peagle: all drafts in one pass; eagle3: one after the other")
    layers: int = option(2, "layers of the head")
    depth: int = option(6, "K: drafts that are trained")
    draft_vocab_size: int = option(12288, "tokens that can be drafted")
    taps: tuple[int, ...] | None = option(None, "target layers that are tapped, comma-separated; default: 2, N/2, N-3")
    norm_taps: tuple[int, ...] = option((0, 1), "taps that are RMS-normed, by place; the last one starts as the input")
    mask_token_id: int | None = option(None, "token of mask slots; default: a special token that no data has")
    from_target: bool = option(True, "start from the target's last layers instead of random numbers")
    train_embeddings: bool = option(
        False, "learn the embeddings too, the mask token's with them; the head's file has to hold them then"
    )
    train_lm_head: bool = option(False, "learn the lm_head too; the head's file has to hold it then")
    start_from: Path | None = option(
        None, "start from the trained weights and the draft vocabulary of this run's last checkpoint"
    )

    def __post_init__(self) -> None:
        _check(
            self.method in get_args(Method), f"method must be one of {', '.join(get_args(Method))}; got {self.method!r}"
        )
        _check(self.layers >= 1, f"layers must be at least 1, got {self.layers}")
        _check(1 <= self.depth <= 32, f"depth must be between 1 and 32, got {self.depth}")
        _check(self.draft_vocab_size >= 2, f"draft_vocab_size must be at least 2, got {self.draft_vocab_size}")
        _check(len(set(self.norm_taps)) == len(self.norm_taps), f"norm_taps {list(self.norm_taps)} names a place twice")


@dataclass(frozen=True, slots=True, kw_only=True)
class LossOptions:
    """What is asked of the head."""

    loss: Loss = option(
        "kl", "kl and total_variation: against the target's distribution; cross_entropy: its best token"
    )
    depth_decay: float = option(0.9, "weight of each further draft relative to the one before")
    retention: float = option(0.7, "COD: share of the positions that each further depth keeps")
    retention_floor: float = option(0.2, "COD: least share kept")
    segments: int = option(1, "peagle: parts that a sequence is computed in, one after the other; saves memory")

    def __post_init__(self) -> None:
        _check(self.loss in get_args(Loss), f"loss must be one of {', '.join(get_args(Loss))}; got {self.loss!r}")
        _check(0.0 < self.depth_decay <= 1.0, f"depth_decay must be in (0, 1], got {self.depth_decay}")
        _check(0.0 < self.retention <= 1.0, f"retention must be in (0, 1], got {self.retention}")
        _check(0.0 <= self.retention_floor <= 1.0, f"retention_floor must be in [0, 1], got {self.retention_floor}")
        _check(self.segments >= 1, f"segments must be at least 1, got {self.segments}")


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimiserOptions:
    """How the head learns: AdamW; the rate rises, stays, and falls over the last steps."""

    learning_rate: float = option(8e-4, "highest rate")
    warmup_steps: int = option(100, "steps over which the rate rises")
    decay_steps: int = option(
        0, "steps at the end over which it falls to a tenth; 0: it stays, so a run can be continued"
    )
    batch_size: int = option(4, "conversations a step")
    weight_decay: float = option(0.01, "of matrices")
    max_grad_norm: float = option(1.0, "gradients are scaled down to this norm")

    def __post_init__(self) -> None:
        _check(self.learning_rate > 0.0, f"learning_rate must be positive, got {self.learning_rate}")
        _check(self.batch_size >= 1, f"batch_size must be at least 1, got {self.batch_size}")
        _check(min(self.warmup_steps, self.decay_steps) >= 0, "warmup_steps and decay_steps must not be negative")
        _check(self.weight_decay >= 0.0, f"weight_decay must not be negative, got {self.weight_decay}")
        _check(self.max_grad_norm > 0.0, f"max_grad_norm must be positive, got {self.max_grad_norm}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """How long, how fast, and what is written."""

    max_tokens: int = option(4_000_000, "stop after so many response tokens, counted again in each epoch")
    checkpoint_interval: int = option(100, "steps between checkpoints")
    keep_checkpoints: int = option(2, "newest checkpoints that are kept")
    log_interval: int = option(20, "steps between entries of metrics.jsonl")
    eval_interval: int = option(200, "steps between measurements on held-out conversations")
    eval_limit: int = option(32, "held-out conversations that are measured; 0: none")
    compute_dtype: ComputeDtype = option(
        "auto", "type of matrix products; auto: bfloat16 where the device computes in it. Weights are kept in float32"
    )
    num_threads: int | None = option(None, "CPU threads; default: one for each core")
    seed: int = option(0, "of order, dropped positions and random weights")

    def __post_init__(self) -> None:
        for name in ("max_tokens", "checkpoint_interval", "keep_checkpoints", "log_interval", "eval_interval"):
            _check(getattr(self, name) >= 1, f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("eval_limit", "seed"):
            _check(getattr(self, name) >= 0, f"{name} must not be negative, got {getattr(self, name)}")
        _check(
            self.num_threads is None or self.num_threads >= 1, f"num_threads must be at least 1, got {self.num_threads}"
        )
        _check(
            self.compute_dtype in get_args(ComputeDtype),
            f"compute_dtype must be one of {', '.join(get_args(ComputeDtype))}; got {self.compute_dtype!r}",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """All of it. `target` is a checkpoint directory, `data` chat JSONL files; `output` gets everything written."""

    target: Path
    data: tuple[Path, ...]
    output: Path
    data_options: DataConfig = field(default_factory=DataConfig)
    head: HeadOptions = field(default_factory=HeadOptions)
    loss: LossOptions = field(default_factory=LossOptions)
    optimiser: OptimiserOptions = field(default_factory=OptimiserOptions)
    run: RunOptions = field(default_factory=RunOptions)

    def __post_init__(self) -> None:
        if self.head.method == "eagle3":
            _check(self.loss.segments == 1, "segments is for method peagle; eagle3 unrolls a sequence as a whole")
            _check(self.head.mask_token_id is None, "mask_token_id is for method peagle; eagle3 has no mask slots")
