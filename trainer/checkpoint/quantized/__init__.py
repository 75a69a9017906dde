"""Exports whose linear layers hold 4-bit integers or 8-bit floats, in the format compressed-tensors."""
