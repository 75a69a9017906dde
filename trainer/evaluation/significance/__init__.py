"""Intervals and tests for scores of a limited number of questions."""
