"""Steps that only a sweep has."""
