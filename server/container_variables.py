"""Environment variables of other servers' containers that mean one of our keys.

SageMaker's vLLM containers take `SM_VLLM_MAX_MODEL_LEN`, DJL's `OPTION_MAX_MODEL_LEN`, and SageMaker itself names the
port in `SAGEMAKER_BIND_TO_PORT`; with them an endpoint's definition works unchanged. Variables and keys of our own are
stronger. Owns the translation of names. Refuses to parse values.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from peagle.errors import ConfigError

SAGEMAKER_PORT = "SAGEMAKER_BIND_TO_PORT"
_SM_PREFIX, _DJL_PREFIX = "SM_VLLM_", "OPTION_"


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedText:
    """A variable and what it says."""

    variable: str
    text: str


def container_values(environment: Mapping[str, str], keys: Collection[str]) -> dict[str, NamedText]:
    """What such variables say, by our key. An empty one counts as not set.

    Raises:
        ConfigError: two of them mean the same key and differ, or one with SageMaker's prefix means none. `OPTION_` is a
            common word: what is not one of ours there is left alone.
    """
    found: dict[str, NamedText] = {}
    for variable, text in environment.items():
        key = _key_of(variable, keys)
        if key is None or not text:
            continue
        other = found.setdefault(key, NamedText(variable=variable, text=text))
        if other.text != text:
            raise ConfigError(f"{other.variable} and {variable} are both set, and differ: unset one")
    return found


def _key_of(variable: str, keys: Collection[str]) -> str | None:
    if variable == SAGEMAKER_PORT:
        return "port"
    for prefix in (_SM_PREFIX, _DJL_PREFIX):
        if variable.startswith(prefix):
            key = variable.removeprefix(prefix).lower()
            if key in keys:
                return key
            if prefix == _SM_PREFIX:
                raise ConfigError(
                    f"the environment has {variable}, but there is no setting {key}: see `peagle serve --help`"
                )
    return None
