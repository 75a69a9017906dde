"""Packed sequences become batches of tensors, ahead of the training step."""
