"""Parts of `benchmarks.bench_planner`: predictions beside measurements, and what the commands cost."""
