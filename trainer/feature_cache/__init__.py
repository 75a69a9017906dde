"""Cached features of images: the store, its writer and its reader."""
