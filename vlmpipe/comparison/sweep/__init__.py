"""The comparison of a sweep's variants: what was measured, what it shows, and the page."""
