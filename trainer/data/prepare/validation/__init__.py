"""Validation of samples: id, images, turns and tokens."""
