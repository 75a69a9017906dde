"""`vlmpipe skill`: a folder that tells a coding agent how to use this package."""
