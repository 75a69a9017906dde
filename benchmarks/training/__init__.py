"""Parts of `benchmarks.bench_train`: loops, batch layouts, attention, compiled layers, strategies, offloading."""
