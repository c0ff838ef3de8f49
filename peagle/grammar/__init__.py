"""Languages that answers are held to: JSON schemas, regular expressions, choices and context-free grammars.

`compiler` turns what a client wrote into a `matcher`, which follows one answer. Built on llguidance, whose grammars
work on bytes and whose masks take microseconds. Torch-free.
"""
