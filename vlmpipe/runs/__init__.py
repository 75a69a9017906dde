"""What is known of runs: state, status, logs, diagnosis."""
