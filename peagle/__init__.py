"""peagle: an LLM serving engine whose speculation is invisible, except in speed.

The public API is the names below; everything else may change. Names are resolved on first use, because importing the
engine imports torch, which costs seconds and which the command line and the benchmark client do not need.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from peagle.config import (
        CacheConfig,
        EngineConfig,
        GraphConfig,
        ModelConfig,
        SchedulerConfig,
    )
    from peagle.engine.async_engine import AsyncLLMEngine
    from peagle.engine.engine import LLMEngine
    from peagle.engine.interface import Engine, EngineHealth, EnginePhase, PhaseListener
    from peagle.engine.loader import LoadedEngine, follow_engine, load_engine, start_engine
    from peagle.grammar_spec import GrammarSpec
    from peagle.outputs import RequestInput, RequestOutput, RequestSpecStats, TokenLogprobs, Usage
    from peagle.sampling_params import SamplingParams
    from peagle.sequence import FinishReason
    from peagle.spec_config import SpecConfig
    from peagle.stats import EngineStats

__version__ = "0.1.0"

_HOMES = {
    "AsyncLLMEngine": "peagle.engine.async_engine",
    "CacheConfig": "peagle.config",
    "Engine": "peagle.engine.interface",
    "EngineConfig": "peagle.config",
    "EngineHealth": "peagle.engine.interface",
    "EnginePhase": "peagle.engine.interface",
    "EngineStats": "peagle.stats",
    "FinishReason": "peagle.sequence",
    "GraphConfig": "peagle.config",
    "LLMEngine": "peagle.engine.engine",
    "LoadedEngine": "peagle.engine.loader",
    "ModelConfig": "peagle.config",
    "PhaseListener": "peagle.engine.interface",
    "GrammarSpec": "peagle.grammar_spec",
    "RequestInput": "peagle.outputs",
    "RequestOutput": "peagle.outputs",
    "RequestSpecStats": "peagle.outputs",
    "SamplingParams": "peagle.sampling_params",
    "SchedulerConfig": "peagle.config",
    "SpecConfig": "peagle.spec_config",
    "TokenLogprobs": "peagle.outputs",
    "Usage": "peagle.outputs",
    "follow_engine": "peagle.engine.loader",
    "load_engine": "peagle.engine.loader",
    "start_engine": "peagle.engine.loader",
}

__all__ = [
    "AsyncLLMEngine",
    "CacheConfig",
    "Engine",
    "EngineConfig",
    "EngineHealth",
    "EnginePhase",
    "EngineStats",
    "FinishReason",
    "GrammarSpec",
    "GraphConfig",
    "LLMEngine",
    "LoadedEngine",
    "ModelConfig",
    "PhaseListener",
    "RequestInput",
    "RequestOutput",
    "RequestSpecStats",
    "SamplingParams",
    "SchedulerConfig",
    "SpecConfig",
    "TokenLogprobs",
    "Usage",
    "follow_engine",
    "load_engine",
    "start_engine",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'peagle' has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
