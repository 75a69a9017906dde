"""Parts of `benchmarks.bench_data` on what grows with the number of samples."""
