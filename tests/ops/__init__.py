"""`make ops-check`: what happens to a real server process on a bad day. See `__main__`."""
