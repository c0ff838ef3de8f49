"""Text in, text out: tokenizer, chat template, incremental detokenizer, stop strings.

Owns everything between strings and token ids. Refuses to know torch, requests and HTTP.
`gguf_tokenizer` is imported by name only, by whoever converts a GGUF file.
"""

from peagle.text.chat_template import ChatTemplate
from peagle.text.detokenizer import IncrementalDetokenizer
from peagle.text.stop import StopMatcher, StopResult
from peagle.text.tokenizer import Tokenizer

__all__ = ["ChatTemplate", "IncrementalDetokenizer", "StopMatcher", "StopResult", "Tokenizer"]
