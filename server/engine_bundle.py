"""What a loaded engine hands to the HTTP side.

Owns the bundle's shape and the type of the function that makes it. Refuses to know how a model is loaded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from peagle import Engine, PhaseListener
from peagle.text import AnswerFormat, ChatTemplate, Tokenizer
from peagle.text.answer_format import AUTO


def _plain_answers() -> AnswerFormat:
    """Of a model that nothing is known of."""
    return AnswerFormat.choose(tool_call_parser=AUTO, reasoning_parser=AUTO, chat_template=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineBundle:
    """A running engine, and the text side of its model. `model_id` names what was loaded, `answers`
    says how its answers are read.

    `long_prompts` is held while a long prompt is tokenised: one at a time, so that a flood of them takes one core from
    the engine and memory for one.
    """

    engine: Engine
    tokenizer: Tokenizer
    chat_template: ChatTemplate
    model_id: str
    answers: AnswerFormat = field(default_factory=_plain_answers)
    long_prompts: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(1), compare=False)


EngineStarter = Callable[[PhaseListener], EngineBundle]
"""Loads the model and starts the engine. Blocks, so it is called in a thread of its own; raises when it can't."""
