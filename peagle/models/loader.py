"""From a checkpoint directory to a target model.

Owns the choice of precision and of the path (fused or `transformers`), and the errors of a checkpoint that can't be
read. Refuses to fetch anything: a directory goes in (`peagle.fetch` and `engine.loader` find it).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.utils import logging as transformers_logging

from peagle.attention.backend import AttentionBackend
from peagle.config import ModelConfig
from peagle.errors import ConfigError, ModelLoadError
from peagle.layers.linear import pack_linears
from peagle.models.fused_target import FusedTarget, is_fusable
from peagle.models.interface import TargetModel
from peagle.models.rank_group import RankGroup
from peagle.models.registry import check_family
from peagle.models.transformers_target import TransformersTarget

logger = logging.getLogger(__name__)

_ALONE = RankGroup()

_DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "fp8": torch.float8_e4m3fn,
}


def torch_dtype(name: str) -> torch.dtype:
    """The torch type of a configured name."""
    return _DTYPES[name]


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """How weights are stored and multiplied.

    With `packed`, weights are fp16 and products are float32 (CPU); `compute_dtype` is then float32.
    """

    device: torch.device
    compute_dtype: torch.dtype
    packed: bool


def choose_device(config: ModelConfig) -> torch.device:
    """The device to run on.

    Raises:
        ConfigError: CUDA is asked for and there is none.
    """
    has_cuda = torch.cuda.is_available()
    if config.device == "cuda" and not has_cuda:
        raise ConfigError("device cuda is configured, but torch finds no CUDA device; use --device cpu")
    return torch.device("cuda" if has_cuda and config.device != "cpu" else "cpu")


def choose_precision(config: ModelConfig, stored: torch.dtype | None, device: torch.device) -> Precision:
    """Resolve `dtype`. On CPU, `auto` packs weights that were stored in half precision. Of float16
    weights that loses nothing, of bfloat16 ones the last bits of those below 6e-5. Weights that are split between
    processes are not packed.

    Args:
        config: the model group.
        stored: type of the checkpoint's weights, None if it does not say.
        device: where the model runs.
    """
    if config.dtype != "auto":
        return Precision(device=device, compute_dtype=torch_dtype(config.dtype), packed=False)
    if device.type == "cuda":
        return Precision(device=device, compute_dtype=stored or torch.bfloat16, packed=False)
    is_half = stored in (torch.float16, torch.bfloat16) and config.tensor_parallel_size == 1
    can_pack = "fbgemm" in torch.backends.quantized.supported_engines
    return Precision(device=device, compute_dtype=torch.float32, packed=is_half and can_pack)


def read_model_config(directory: Path) -> Any:
    """Read and check `config.json`.

    Raises:
        ModelLoadError: no readable configuration there.
        UnsupportedModelError: a family, or a feature of it, that is not served.
    """
    try:
        config = AutoConfig.from_pretrained(str(directory))
    except (OSError, ValueError, KeyError) as error:
        raise ModelLoadError(f"cannot read a model configuration in {directory}: {error}") from error
    check_family(config)
    return config


def load_target(
    directory: Path,
    config: Any,
    precision: Precision,
    backend: AttentionBackend,
    *,
    tap_layer_ids: tuple[int, ...] = (),
    group: RankGroup = _ALONE,
) -> TargetModel:
    """Load weights and put the model behind paged attention.

    Args:
        directory: a `transformers` checkpoint in safetensors.
        config: what `read_model_config` gave.
        precision: how to store and multiply the weights.
        backend: attention over paged keys and values.
        tap_layer_ids: taps for the drafter; see `TransformersTarget`.
        group: the processes between which the weights are split.

    Raises:
        ModelLoadError: weights are missing, damaged, or do not fit the configuration.
        ConfigError: the model cannot be split between so many.
    """
    num_layers = config.num_hidden_layers
    if any(not 0 <= layer_id <= num_layers for layer_id in tap_layer_ids):
        raise ModelLoadError(f"the draft head taps layers {tap_layer_ids}, but the target has {num_layers} layers")
    _check_split(config, group.size)
    is_fused = is_fusable(config) and group.size == 1
    model = _load_transformers(directory, config, precision, is_fused=is_fused, group=group)
    _log_weights(model, packed=precision.packed)
    if is_fused:
        return FusedTarget(model, backend, tap_layer_ids, packed=precision.packed)
    if precision.packed:
        pack_linears(model)
    return TransformersTarget(model, backend, tap_layer_ids, num_ranks=group.size)


def _check_split(config: Any, num_ranks: int) -> None:
    if num_ranks == 1:
        return
    if has_experts(config):
        raise ConfigError("tensor_parallel_size above 1 is not supported for a mixture of experts")
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        if getattr(config, name) % num_ranks:
            raise ConfigError(
                f"tensor_parallel_size {num_ranks} does not divide the model's {name}, {getattr(config, name)}"
            )


def _load_transformers(
    directory: Path, config: Any, precision: Precision, *, is_fused: bool, group: RankGroup
) -> PreTrainedModel:
    # The fused path packs layer by layer, so the checkpoint stays in half precision until its layer's turn.
    dtype = config.dtype if precision.packed and is_fused else precision.compute_dtype
    # The grouped matrix products that transformers prefers take neither double nor every CPU.
    extra: dict[str, Any] = {"experts_implementation": "eager"} if has_experts(config) else {}
    if group.size > 1:
        extra["distributed_config"] = DistributedConfig(tp_plan="auto", tp_size=group.size)
    transformers_logging.disable_progress_bar()
    _check_files(directory)
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            str(directory), dtype=dtype, attn_implementation="eager", output_loading_info=True, **extra
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise ModelLoadError(f"cannot load the weights in {directory}: {error}") from error
    missing = sorted(report["missing_keys"])
    if missing:
        raise ModelLoadError(f"weights are missing in {directory}: {', '.join(missing[:5])} ({len(missing)} in all)")
    loaded: PreTrainedModel = model.eval().requires_grad_(False)
    return loaded if group.size > 1 else loaded.to(precision.device)  # a split model loads onto its device


def _check_files(directory: Path) -> None:
    """Refuse a file that is cut short, by its name. Reads the heads of the files alone."""
    for path in sorted(directory.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt"):
                pass
        except (SafetensorError, OSError) as error:
            raise ModelLoadError(f"cannot read {path}: {error}. Fetch or copy it again.") from None


def _log_weights(model: PreTrainedModel, *, packed: bool) -> None:
    """How large the model is. Packing makes matrices half precision, whatever they were."""
    num_parameters = num_bytes = 0
    for parameter in model.parameters():
        num_parameters += parameter.numel()
        num_bytes += parameter.numel() * (2 if packed and parameter.dim() > 1 else parameter.element_size())
    logger.info("Weights: %.1f million parameters, %.2f GiB", num_parameters / 1e6, num_bytes / 2**30)


def has_experts(config: Any) -> bool:
    """Whether a `transformers` configuration is a mixture of experts."""
    return config.model_type in ("qwen3_moe", "gpt_oss")
