"""Encoded images: their memory when decoded, their metadata, and encoding changed ones again."""
