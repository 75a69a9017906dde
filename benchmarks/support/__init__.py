"""What all benchmarks share: the command line, time and rounds, progress, the report, processes, ready models."""
