"""Samples that share the prefix of their images."""
