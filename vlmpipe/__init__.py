"""Fine-tune vision-language models as one pipeline: the tool, its command line and its Python API."""
