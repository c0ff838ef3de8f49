"""Which drafts stand, and what a step emits: rule R1, sample the target and compare."""
