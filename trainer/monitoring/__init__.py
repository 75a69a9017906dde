"""Training metrics, progress, TensorBoard and Weights & Biases."""
