"""Quantized exports in an evaluation: made, asked, and uploaded if they answer as the export does."""
