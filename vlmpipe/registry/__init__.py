"""The gate, and registries of accepted models: a folder, a bucket, Vertex AI Model Registry."""
