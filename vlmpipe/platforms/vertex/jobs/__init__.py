"""Custom jobs on Vertex AI, with capacity fallback."""
