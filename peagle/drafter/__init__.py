"""Proposes the next K tokens of each sequence in one pass: the P-EAGLE head, its files and its input."""
