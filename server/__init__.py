"""The HTTP side and the command line: a one-way client of peagle's public API. Never imports torch."""
