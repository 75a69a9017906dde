"""Where the weights of the parts of a model come from, and the adapters that are added to them."""
