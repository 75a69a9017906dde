"""State, status, logs and diagnosis of runs."""
