"""Data preparation: samples are read, validated, and written as indexed shards."""
