"""Everything a run works with, put together: data, target, head, optimiser, checkpoints.

Owns the order of loading, and finds what is wrong before an hour is lost. Refuses to take a step.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from peagle.config import ModelConfig, parse_bytes
from peagle.drafter.head import DraftHead
from peagle.drafter.head_config import HeadConfig
from peagle.errors import ConfigError
from peagle.models.loader import choose_device
from peagle.text.tokenizer import Tokenizer
from peagle.training.checkpoint import CheckpointStore, RunIdentity
from peagle.training.config import ComputeDtype, OptimiserOptions, TrainConfig
from peagle.training.dataset import Dataset, load_dataset
from peagle.training.distributed import ProcessGroup
from peagle.training.features import FeatureCache, FeatureExtractor, target_fingerprint
from peagle.training.initialise import build_head, head_config, start_mask
from peagle.training.methods import TrainingMethod, training_method
from peagle.training.provenance import describe, write_provenance
from peagle.training.start_from import Beginning, read_beginning
from peagle.training.step import TrainingStep
from peagle.training.target_answers import load_transformers_model
from peagle.training.vocabulary import DraftVocabulary, build_draft_vocabulary, count_tokens

logger = logging.getLogger(__name__)

_COMPUTE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_CPU_BFLOAT16 = ("avx512_bf16", "amx_bf16", "bf16")  # capabilities of x86 and of ARM


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Workshop:
    """Everything that a run works with."""

    dataset: Dataset
    cache: FeatureCache
    head: DraftHead
    step: TrainingStep
    method: TrainingMethod
    optimiser: torch.optim.Optimizer
    store: CheckpointStore
    group: ProcessGroup

    @property
    def trained(self) -> list[torch.nn.Parameter]:
        """What the optimiser changes."""
        return [parameter for parameter in self.head.parameters() if parameter.requires_grad]


def prepare(config: TrainConfig, group: ProcessGroup, argv: Sequence[str] = ()) -> Workshop:
    """Load everything.

    Args:
        config: of the run.
        group: this process and its siblings.
        argv: for the provenance.

    Raises:
        ConfigError: something does not fit; the message says what to change.
    """
    config.output.mkdir(parents=True, exist_ok=True)
    method = training_method(config.head.method)
    begin = None if config.head.start_from is None else read_beginning(config.head.start_from)
    tokenizer = Tokenizer.from_directory(config.target)
    options = config.data_options
    dataset = load_dataset(config.data, tokenizer, max_length=options.max_length, held_out=options.held_out)
    fingerprint = target_fingerprint(config.target)
    device = choose_device(ModelConfig(model=str(config.target)))
    compute_dtype = choose_compute_dtype(config.run.compute_dtype, device)
    target = load_transformers_model(config.target, dtype=compute_dtype, device=device)
    wanted = (
        config.head.mask_token_id if config.head.mask_token_id is not None or begin is None else begin.mask_token_id
    )
    mask_token_id = choose_mask_token(wanted, tokenizer, dataset) if method.has_mask else None
    geometry = head_config(target, config.head, mask_token_id=mask_token_id)
    _check_lengths(dataset, geometry)
    if begin is not None:
        begin.check_fits(geometry, target=fingerprint, method=config.head.method)
    vocabulary = _draft_vocabulary(dataset, tokenizer, geometry, begin)
    if group.is_first:
        logger.info("%s", dataset.summary())
        logger.info("%s", vocabulary.summary())
        logger.info("computing in %s", str(compute_dtype).removeprefix("torch."))
    cache = _feature_cache(config, target, geometry, fingerprint)
    head = build_head(target, geometry, vocabulary, options=config.head, seed=config.run.seed)
    if begin is None:
        start_mask(head, [cache.get(example).features for example in dataset.train[:4]])
    else:
        begin.copy_to(head)
    identity = RunIdentity(
        target=fingerprint, method=config.head.method, data=_data_fingerprint(dataset), head=str(asdict(geometry))
    )
    return Workshop(
        dataset=dataset,
        cache=cache,
        head=head,
        step=method.make_step(
            head,
            _target_to_draft(vocabulary).to(head.device),
            depth=config.head.depth,
            options=config.loss,
            compute_dtype=compute_dtype,
        ),
        method=method,
        optimiser=_make_optimiser(head, config.optimiser),
        store=_checkpoint_store(config, identity, head, group, argv),
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


def choose_compute_dtype(name: ComputeDtype, device: torch.device) -> torch.dtype:
    """The type of matrix products.

    A processor without bfloat16 arithmetic emulates it, ten times as slowly as it computes in float32.
    """
    if name != "auto":
        return _COMPUTE_DTYPES[name]
    if device.type == "cpu" and not any(torch.cpu.get_capabilities().get(one) for one in _CPU_BFLOAT16):
        return torch.float32
    return torch.bfloat16


def _check_lengths(dataset: Dataset, geometry: HeadConfig) -> None:
    longest = max(len(one.token_ids) for one in (*dataset.train, *dataset.held_out))
    if longest > geometry.max_position_embeddings:
        raise ConfigError(
            f"a conversation has {longest:,} tokens, but the target reads {geometry.max_position_embeddings:,}: what "
            "it makes of the rest is of no use; set max_length to no more than it reads"
        )


def _feature_cache(config: TrainConfig, target: Any, geometry: HeadConfig, fingerprint: str) -> FeatureCache:
    options = config.data_options
    extractor = FeatureExtractor(
        target, aux_layer_ids=geometry.aux_layer_ids, num_soft_targets=options.num_soft_targets
    )
    name = f"{fingerprint}-{'-'.join(map(str, geometry.aux_layer_ids))}-{options.num_soft_targets}"
    if target.dtype == torch.float32:  # the target computes other features then
        name += "-float32"
    return FeatureCache(
        extractor,
        directory=None if options.cache_dir is None else options.cache_dir / name,
        limit=parse_bytes(options.cache_limit),
    )


def _checkpoint_store(
    config: TrainConfig, identity: RunIdentity, head: DraftHead, group: ProcessGroup, argv: Sequence[str]
) -> CheckpointStore:
    provenance = describe(argv, data_files=config.data) if group.is_first else None
    store = CheckpointStore(config.output, identity, keep=config.run.keep_checkpoints, provenance=provenance)
    store.require_space(head)
    if provenance is not None:
        write_provenance(config.output, provenance)
    return store


def _make_optimiser(head: DraftHead, options: OptimiserOptions) -> torch.optim.Optimizer:
    matrices = [p for p in head.parameters() if p.requires_grad and p.ndim > 1]
    vectors = [p for p in head.parameters() if p.requires_grad and p.ndim <= 1]
    groups: list[dict[str, Any]] = [
        {"params": matrices, "weight_decay": options.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=options.learning_rate, betas=(0.9, 0.95), fused=True)


def _draft_vocabulary(
    dataset: Dataset, tokenizer: Tokenizer, geometry: HeadConfig, begin: Beginning | None
) -> DraftVocabulary:
    answers = [example.token_ids[example.is_supervised].tolist() for example in dataset.train]
    counts = count_tokens(answers, vocab_size=geometry.vocab_size)
    if begin is not None:
        return begin.vocabulary(counts)
    return build_draft_vocabulary(counts, geometry.draft_vocab_size, always=tokenizer.eos_token_ids)


def _target_to_draft(vocabulary: DraftVocabulary) -> Tensor:
    table = torch.full((len(vocabulary.is_drafted),), -1, dtype=torch.int64)
    table[vocabulary.target_ids] = torch.arange(len(vocabulary.offsets))
    return table


def _data_fingerprint(dataset: Dataset) -> str:
    return hashlib.sha256("".join(example.key for example in dataset.train).encode()).hexdigest()[:16]
