"""Serving by a Cloud Run service with a GPU, for runs on Vertex AI."""
