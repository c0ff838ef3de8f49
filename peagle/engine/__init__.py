"""The engine: one step at a time in one thread, and the bridge from there to the event loop."""
