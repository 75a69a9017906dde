"""The pipeline's steps: one thin file each, and the logic that they share."""
