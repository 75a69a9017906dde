"""Training data: sources, preparation, shards, packing and the order in which a run reads them."""
