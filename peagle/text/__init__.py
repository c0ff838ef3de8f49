"""Text in, text out: tokenizer, chat template, incremental detokenizer, stop strings, and what an answer says.

Owns everything between strings and token ids. Refuses to know torch, requests and HTTP.
`gguf_tokenizer` is imported by name only, by whoever converts a GGUF file.
"""

from peagle.text.answer_events import (
    AnswerEvent,
    AnswerParser,
    ContentDelta,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallStart,
)
from peagle.text.answer_format import AnswerFormat
from peagle.text.chat_template import ChatTemplate
from peagle.text.detokenizer import IncrementalDetokenizer
from peagle.text.stop import StopMatcher, StopResult
from peagle.text.tokenizer import Tokenizer
from peagle.text.tool_parsers import ToolFunction
from peagle.text.tool_prompt import with_tools_in_text

__all__ = [
    "AnswerEvent",
    "AnswerFormat",
    "AnswerParser",
    "ChatTemplate",
    "ContentDelta",
    "IncrementalDetokenizer",
    "ReasoningDelta",
    "StopMatcher",
    "StopResult",
    "Tokenizer",
    "ToolCallArguments",
    "ToolCallStart",
    "ToolFunction",
    "with_tools_in_text",
]
