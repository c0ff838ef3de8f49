"""A closed-loop load client for any OpenAI-compatible chat endpoint.

Owns measuring from outside: it sees HTTP and nothing else, so that a baseline is measured by the same client as our own
server. Refuses to know the engine: nothing of `peagle` outside this package is imported here, and no torch.
"""

from __future__ import annotations


class BenchmarkError(Exception):
    """Nothing can be measured: unreadable data set, unreachable model list, contradictory flags."""
