"""Files of the Hugging Face hub."""
