"""Fixed-shape execution: shapes and buckets, the buffers behind them, and the runner that captures or runs eagerly."""
