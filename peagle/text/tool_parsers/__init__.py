"""Parsers of tool calls, by the family of models that writes them.

Each reads the text of an answer in pieces of any size, because a step of speculative decoding yields several tokens and
a parser that counts on one loses calls. Owns the registry. Refuses to know tokens, requests and HTTP.
"""

from collections.abc import Mapping

from peagle.text.tool_parsers.harmony import HarmonyFormat
from peagle.text.tool_parsers.hermes import HermesFormat
from peagle.text.tool_parsers.llama3_json import Llama3JsonFormat
from peagle.text.tool_parsers.mistral import MistralFormat
from peagle.text.tool_parsers.pythonic import PythonicFormat
from peagle.text.tool_parsers.tool_format import CallGrammar, ToolFormat, ToolFunction

TOOL_FORMATS: Mapping[str, ToolFormat] = {
    one.name: one for one in (HermesFormat(), Llama3JsonFormat(), MistralFormat(), PythonicFormat(), HarmonyFormat())
}

__all__ = ["TOOL_FORMATS", "CallGrammar", "ToolFormat", "ToolFunction"]
