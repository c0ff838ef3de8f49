"""Attention over paged keys and values: what a step attends to (`metadata`), and how (`backend`, `sdpa`)."""
