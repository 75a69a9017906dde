"""From samples to rows: sources, checks, shards, the index, and the order in which a run reads them."""
