"""The learning curve: scores of nested shares of the training samples, and what more samples would bring."""
