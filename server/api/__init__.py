"""The routes, one resource a file. A route function says what happens in which order; the work is done elsewhere."""
