"""Which drafts stand, and what a step emits, without changing what is sampled.

R1 (`acceptance`, on trees `tree`) draws from the target and compares: same seed, same tokens, for any drafts. R2
(`rejection`) and R3 (`block`) need drafts that were drawn at random, and accept more of those.
"""
