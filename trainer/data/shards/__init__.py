"""Prepared data on disk: tar shards, their index, a disk cache with prefetching."""
