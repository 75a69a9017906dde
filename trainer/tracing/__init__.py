"""Training steps traced on fake tensors, for the planner."""
