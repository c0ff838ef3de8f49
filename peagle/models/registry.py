"""Which model families are served, and what would make one of them inexact.

Owns the list of families and the checks at load. A family is added together with a test that compares it with the
unmodified `transformers` model; anything else is refused by name, because an almost right model is worse than none.
"""

from __future__ import annotations

from typing import Any

from peagle.errors import UnsupportedModelError

SUPPORTED_FAMILIES = ("llama", "qwen3", "qwen3_moe", "gpt_oss", "gemma3_text")

# These change the rotation with the longest sequence of the batch: one request would alter another's tokens.
_BATCH_DEPENDENT_ROPE = ("dynamic", "longrope")


def check_family(config: Any) -> None:
    """Refuse what cannot be served exactly.

    Args:
        config: a `transformers` configuration.

    Raises:
        UnsupportedModelError: names the family, or the feature, and what is served instead.
    """
    family = getattr(config, "model_type", None)
    if family not in SUPPORTED_FAMILIES:
        raise UnsupportedModelError(
            f"model family {family!r} is not served; served families: {', '.join(SUPPORTED_FAMILIES)}"
        )
    for rope_type in _rope_types(getattr(config, "rope_parameters", None)):
        if rope_type in _BATCH_DEPENDENT_ROPE:
            raise UnsupportedModelError(
                f"rope_type {rope_type!r} of this {family} model depends on the batch and cannot be served exactly"
            )
    if getattr(config, "use_bidirectional_attention", False):
        raise UnsupportedModelError(f"this {family} model attends in both directions; only causal models are served")
    quantization = getattr(config, "quantization_config", None)
    if quantization is not None:
        raise UnsupportedModelError(
            "quantised checkpoints are not served yet (quantization_config is set); use the unquantised weights"
        )


def _rope_types(parameters: Any) -> list[str]:
    """Every rope type in a configuration: one for all layers, or one per layer type (Gemma 3)."""
    if not isinstance(parameters, dict):
        return []
    if "rope_type" in parameters:
        return [str(parameters["rope_type"])]
    return [
        str(entry["rope_type"]) for entry in parameters.values() if isinstance(entry, dict) and "rope_type" in entry
    ]
