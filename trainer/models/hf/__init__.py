"""The family `hf`: any image-text model of transformers, through its own forward pass."""
