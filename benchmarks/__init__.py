"""Claims about speed, each a ratio measured side by side in one run. See benchmarks/README.md."""

import os

# Before numpy, torch or tokenizers are imported, which read these once: a second thread would blur CPU time per step.
os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
