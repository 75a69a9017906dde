"""Time of a step, of a run and of its other jobs."""
