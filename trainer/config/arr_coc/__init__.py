"""Settings of relevance-based selection of visual tokens (ARR-COC)."""
