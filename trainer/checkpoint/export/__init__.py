"""Exports of checkpoints: trained weights read by ranges, merged with frozen ones, written as safetensors."""
