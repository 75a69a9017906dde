"""Generation, scores, and the validation loss."""
