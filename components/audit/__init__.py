"""Step of the run's data audit."""
