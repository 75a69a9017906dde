"""Videos that a model takes as such (`data.video: native`): one image of a sample, with patches in time."""
