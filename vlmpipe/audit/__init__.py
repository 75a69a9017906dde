"""The screen and the page of a data audit; the work itself is in `vlmpipe.trainer.audit`."""
