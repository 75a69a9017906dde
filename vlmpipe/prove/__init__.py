"""`vlmpipe prove`: laws that any trainer should keep, checked from outside on a tiny model and generated samples."""
