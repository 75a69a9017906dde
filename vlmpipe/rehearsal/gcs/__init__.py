"""A strict Cloud Storage: preconditions, checksums, pages, and faults on request."""
