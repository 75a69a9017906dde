"""Prompts about the same images: their common beginning is computed once, and each is continued from it."""
