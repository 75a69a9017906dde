"""Program: `transformers serve` with images read and resized by Pillow, as in training and evaluation.

Beside torchvision, transformers would take that, which gives other pixels.
"""

from __future__ import annotations

import functools

from transformers import AutoImageProcessor
from transformers.cli.transformers import main

if __name__ == "__main__":
    AutoImageProcessor.from_pretrained = functools.partial(AutoImageProcessor.from_pretrained, backend="pil")
    main()
