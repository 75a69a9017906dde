"""Parts of `vlmpipe check`."""
