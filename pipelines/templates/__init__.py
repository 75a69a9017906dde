"""Compiled pipelines as templates in Artifact Registry."""
