"""AdamW in fp32 and with 8-bit moments, and the learning-rate schedule."""
