"""Frozen weights of the language model in 4 bits (`model.lora.quantize_base`)."""
