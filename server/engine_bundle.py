"""What a loaded engine hands to the HTTP side.

Owns the bundle's shape and the type of the function that makes it. Refuses to know how a model is loaded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from peagle import Engine, PhaseListener
from peagle.text import ChatTemplate, Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineBundle:
    """A running engine, and the text side of its model. `model_id` names what was loaded."""

    engine: Engine
    tokenizer: Tokenizer
    chat_template: ChatTemplate
    model_id: str


EngineStarter = Callable[[PhaseListener], EngineBundle]
"""Loads the model and starts the engine. Blocks, so it is called in a thread of its own; raises when it can't."""
