"""The draft heads that ship with the package, one directory each, with the recipe that made it."""
