"""What must or should hold between the sections of a run file."""
