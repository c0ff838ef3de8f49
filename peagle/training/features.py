"""What the target makes of a conversation: the features a head reads, and the tokens it should have drafted.

One forward pass of the target costs more than learning from it, so its result is kept on disk and read again in every
epoch: features in bfloat16, and of each distribution only the likeliest tokens, which are nearly all of it. Owns the
pass, the files and their limit. Refuses to know heads.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from peagle.errors import ConfigError
from peagle.training.dataset import Example

logger = logging.getLogger(__name__)

_LEAST_FREE_BYTES = 2 * 10**9  # a full disk takes everything else down with it


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TargetFeatures:
    """Of one conversation of n tokens. Row r is the distribution after token r; rows are kept where it was needed."""

    features: Tensor  # [n, n_aux * H_t]
    rows: Tensor  # [m] int64, ascending: token r + 1 is supervised
    top_ids: Tensor  # [m, k] int64, likeliest first
    top_log_probs: Tensor  # [m, k] float32


class FeatureExtractor:
    """Runs the target.

    Args:
        model: a `transformers` causal model.
        aux_layer_ids: as in `HeadConfig`.
        num_soft_targets: k.
    """

    def __init__(self, model: Any, *, aux_layer_ids: Sequence[int], num_soft_targets: int) -> None:
        self._model = model
        self._aux_layer_ids = tuple(aux_layer_ids)
        self._num_soft_targets = num_soft_targets

    @torch.no_grad()
    def extract(self, example: Example) -> TargetFeatures:
        """One forward pass; logits are made for the supervised rows only."""
        token_ids = torch.from_numpy(example.token_ids).to(self._model.device)
        output = self._model.model(input_ids=token_ids[None], output_hidden_states=True, use_cache=False)
        rows = supervised_rows(example)
        logits = self._model.lm_head(output.last_hidden_state[0, rows.to(token_ids.device)]).float()  # [m, V]
        k = min(self._num_soft_targets, logits.shape[-1])
        top = logits.topk(k, -1)
        return TargetFeatures(
            features=torch.cat([output.hidden_states[layer][0] for layer in self._aux_layer_ids], -1),
            rows=rows,
            top_ids=top.indices,
            top_log_probs=top.values - logits.logsumexp(-1, keepdim=True),
        )


def supervised_rows(example: Example) -> Tensor:
    """Rows whose next token is supervised, [m] int64."""
    return torch.from_numpy(np.flatnonzero(example.is_supervised[1:]))


class FeatureCache:
    """Features on disk, one file a conversation.

    Args:
        extractor: makes what is not there yet.
        directory: of the files; None keeps nothing.
        limit: most bytes in the directory.
    """

    def __init__(self, extractor: FeatureExtractor, *, directory: Path | None, limit: int) -> None:
        self._extractor = extractor
        self._directory = directory
        self._limit = limit
        self._num_bytes = 0
        self._is_full = False
        if directory is not None:
            directory.mkdir(parents=True, exist_ok=True)
            self._num_bytes = sum(file.stat().st_size for file in directory.glob("*.safetensors"))

    def get(self, example: Example) -> TargetFeatures:
        """From disk, or from the target."""
        if self._directory is None:
            return _unpack(_pack(self._extractor.extract(example)), example)
        path = self._directory / f"{example.key}.safetensors"
        tensors = _read(path)
        if tensors is None:
            tensors = _pack(self._extractor.extract(example))
            self._write(path, tensors)
        return _unpack(tensors, example)

    def _write(self, path: Path, tensors: dict[str, Tensor]) -> None:
        size = sum(tensor.nbytes for tensor in tensors.values())
        free = shutil.disk_usage(path.parent).free
        if self._num_bytes + size > self._limit or free - size < _LEAST_FREE_BYTES:
            if not self._is_full:
                logger.warning("the feature cache is full (%.1f GB); the rest is computed anew", self._num_bytes / 1e9)
            self._is_full = True
            return
        partial = path.with_suffix(f".{os.getpid()}.partial")  # other runs may share the directory
        try:
            save_file(tensors, partial)
            partial.replace(path)
        except (OSError, SafetensorError) as error:
            partial.unlink(missing_ok=True)
            raise ConfigError(f"cannot write the feature cache in {path.parent}: {error}; free some space") from error
        self._num_bytes += size


def _pack(features: TargetFeatures) -> dict[str, Tensor]:
    """As it is kept. Nobody sees more, or a run would depend on what happened to be in the cache."""
    return {
        "features": features.features.to(torch.bfloat16).contiguous().cpu(),
        "top_ids": features.top_ids.to(torch.int32).cpu(),
        "top_log_probs": features.top_log_probs.to(torch.float16).cpu(),
    }


def _unpack(tensors: dict[str, Tensor], example: Example) -> TargetFeatures:
    return TargetFeatures(
        features=tensors["features"],
        rows=supervised_rows(example),
        top_ids=tensors["top_ids"].long(),
        top_log_probs=tensors["top_log_probs"].float(),
    )


def _read(path: Path) -> dict[str, Tensor] | None:
    try:
        tensors: dict[str, Tensor] = load_file(path)
    except (FileNotFoundError, SafetensorError):
        return None
    return tensors if tensors.keys() == {"features", "top_ids", "top_log_probs"} else None


def target_fingerprint(directory: Path) -> str:
    """Name of a target's weights and configuration; another target's features and checkpoints are of no use."""
    digest = hashlib.sha256()
    for path in sorted([*directory.glob("config.json"), *directory.glob("*.safetensors")]):
        digest.update(path.name.encode())
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()[:16]
