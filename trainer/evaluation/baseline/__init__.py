"""Gain and forgetting of a run's training, by answers of the weights that it started from."""
