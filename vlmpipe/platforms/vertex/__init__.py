"""Vertex AI: pipelines, jobs, schedules, endpoints and models of Google's service."""
