"""Machine types, model architectures, NCCL settings and prices, with sources and dates."""
