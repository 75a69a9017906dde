"""Parts of `benchmarks.bench_checkpoint`: saving, resuming, transferring, and damaged checkpoints."""
