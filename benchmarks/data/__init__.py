"""Parts of `benchmarks.bench_data`: packing, reading, images, preparation."""
