"""Parts of `benchmarks.on_gpu`."""
