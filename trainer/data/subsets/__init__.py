"""Parts of the training samples that a run trains on."""
