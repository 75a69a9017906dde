"""One source of the run file's `data` section."""
