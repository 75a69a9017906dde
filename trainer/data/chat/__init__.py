"""Conversations in a model's chat template: rendered, tokenized and labelled."""
