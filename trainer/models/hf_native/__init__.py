"""Models taken whole from transformers, with pretrained weights."""
