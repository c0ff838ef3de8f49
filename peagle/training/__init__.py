"""Training of draft heads, beside the layers of serving: nothing that serves imports it."""
