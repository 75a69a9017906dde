"""Records of a run that only the tool and the pipeline's steps use: the gate's decision and the registration."""
