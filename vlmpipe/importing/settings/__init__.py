"""Settings of other training programs, as fields of a run file."""
