"""The model that a run starts from, asked by the evaluation's engine."""
