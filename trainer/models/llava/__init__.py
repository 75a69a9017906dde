"""LLaVA: a vision tower, a projector and a language model."""
