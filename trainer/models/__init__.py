"""Model families: one file each, behind the `Family` protocol of `trainer.models.base`."""
