"""Sets up training from the run file, as `training.build_training` reads: data, model, loader, strategy."""
