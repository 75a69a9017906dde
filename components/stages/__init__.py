"""Steps that only a pipeline with several stages has."""
