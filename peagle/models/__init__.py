"""Target models: the `transformers` implementations behind our paged attention, and a fused fast path."""
