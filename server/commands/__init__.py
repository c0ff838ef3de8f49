"""One module per command of `peagle`. Each has `add_parser`, which describes it, and `run`, which does it."""
