"""Model families: one file each, behind the `Family` protocol of `vlmpipe.trainer.models.base`."""
