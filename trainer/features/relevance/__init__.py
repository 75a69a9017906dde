"""Relevance of visual tokens, and the selection of those that the language model gets (ARR-COC)."""
