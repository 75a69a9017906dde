"""Scores on published question files: readers of their formats, and scorers after their definitions."""
