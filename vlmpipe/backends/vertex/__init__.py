"""Jobs and pipelines on Vertex AI: the client, capacity fallback, bucket checks."""
