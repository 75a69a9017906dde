"""Evaluation: generated answers, their scores, and the validation loss."""
