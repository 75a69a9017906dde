"""Hours and memory of the jobs beside training: encoding features, evaluation and benchmarks."""
