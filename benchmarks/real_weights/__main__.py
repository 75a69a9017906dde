"""Write SmolLM2-135M and a DINOv2-small as transformers reads them: `make real-weights`"""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.real_weights.dinov2 import write_tower
from benchmarks.real_weights.smollm2 import write_language_model

if __name__ == "__main__":
    for write in (write_language_model, write_tower):
        print(write(Path(sys.argv[1])), flush=True)
