"""Prefixes that samples about the same images share in packed sequences."""
