"""Parts that model families share: freezing, LoRA, losses, activation checkpointing."""
