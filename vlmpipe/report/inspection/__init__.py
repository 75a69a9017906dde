"""Pages of samples as the model sees them."""
