"""Code of the training container: launcher, data, models, strategies, loop, checkpoints, evaluation."""

__version__ = "0.1.0"
