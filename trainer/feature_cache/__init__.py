"""Vision features computed once: where they are kept, how they are made and read."""
