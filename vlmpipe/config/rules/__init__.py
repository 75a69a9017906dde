"""Rules across the sections of a run file: errors and warnings."""
