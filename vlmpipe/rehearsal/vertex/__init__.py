"""A strict Vertex AI: pipelines, jobs, models, metadata, schedules and searches, over gRPC and REST."""
