"""The docs' table of model types, found out on tiny models:

    python -m tests.support.hf.table

writes it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from PIL import Image

from tests.support.hf.kinds import INSTALLED, KINDS
from tests.support.hf.publish import model_section, publish
from tests.support.hf.refused import LACKED, REFUSED, refusal
from tests.support.paths import ROOT
from vlmpipe.trainer.config.model import ModelConfig
from vlmpipe.trainer.errors import ConfigError
from vlmpipe.trainer.models.hf.encoder import encoder_of, has_merger
from vlmpipe.trainer.models.hf.family import HfFamily
from vlmpipe.trainer.models.hf.trainability import examine, require_trainable
from vlmpipe.trainer.models.image_tokens import image_form_of
from vlmpipe.trainer.strategies.tensor_parallel.plan import require_shardable

PAGE = ROOT / "docs/reference/model-types.md"
SIZES = ((16, 16), (64, 64), (64, 16), (16, 80))  # of images, in pixels
HEADER = """# Model types of family hf

What was found on a tiny random model of each type. `model.family: hf` takes other types of transformers too and
examines them in the same way
([Train any image-text model](../how-to/models.md#train-any-image-text-model-of-transformers)).

- **packed samples**: whether samples in one sequence give the loss and gradients of each alone in plain transformers.
- **attention by sample**: whether attention computes no scores between samples, in layers with sliding windows none
  outside of these. Where it does, under a mask, time and memory grow with the square of `data.sequence_length`,
  and pipeline stages and `train.context_parallel` are refused.
- **image tokens**: whether their number depends on the size of an image.
- **tensor parallel**: whether `train.strategy: tp` can split each matrix of the language model.
- **projector**: where it lies; inside of the vision encoder it is trained or frozen with `projector` all the same.
- **cached**: whether the encoder's output is stored by image, and the loss and gradients of training on it are
  those of training on images. A projector inside of the encoder is trained on its stored inputs.
- **torchvision**: whether its processor needs it; it must be installed, here and in the trainer image.
- **inputs**: what the model takes of an image.

This page is generated: `python -m tests.support.hf.table`. A test compares it with the code.

"""
COLUMNS = (
    "type", "class", "packed samples", "attention by sample", "tensor parallel", "image tokens", "projector", "cached",
    "torchvision", "inputs",
)  # fmt: skip
HEADER += f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|\n"


REFUSED_HEADER = """
## Types that are refused

Types that people tune, and what `vlmpipe check` says of a model of each. Where a package is lacking, a machine that has
it examines the type as any other.

| type | why |
|---|---|
"""


def row(model_type: str, folder: Path) -> str:
    """Of a type that is published in `folder`."""
    config = ModelConfig.model_validate(model_section(folder))
    images, family = image_form_of(config).published, HfFamily()
    assert images is not None
    model = family.build(config, images.processor.tokenizer)
    counts = {sum(images.texts((size,))[0].runs) for size in SIZES}
    cells = (
        f"`{model_type}`",
        type(model).__name__,
        packing(config),
        by_sample(config),
        yes_if(require_shardable, config, 2, cached=False),
        "by size" if len(counts) > 1 else "all the same",
        "in the encoder" if has_merger(encoder_of(model)) else "after the encoder",
        yes_if(family.stored_output, config),
        "needed" if KINDS[model_type].needs_torchvision else "",
        ", ".join(sorted(images.tensors([Image.new("RGB", SIZES[0])]))),
    )
    return f"| {' | '.join(cells)} |"


def yes_if(require: Callable[..., Any], *arguments: Any, **named: Any) -> str:
    try:
        require(*arguments, **named)
    except ConfigError:
        return "no"
    return "yes"


def packing(config: ModelConfig) -> str:
    for pack, verdict in ((True, "yes"), (False, "needs `data.pack: false`")):
        try:
            require_trainable(config, pack=pack, cached=False)
        except ConfigError as error:
            if not pack and "answers would be visible" not in error.found:
                raise  # no type of the table is refused for another reason
            continue
        return verdict
    return "refused: its texts are not causal"


def by_sample(config: ModelConfig) -> str:
    why = examine(config).masked
    return f"no: {why}" if why else "yes"


def page() -> str:
    """Rows of types whose processor needs what is not installed stay as they are."""
    rows = {line.split("`")[1]: line for line in PAGE.read_text().splitlines() if line.startswith("| `")}
    for model_type in INSTALLED:
        with tempfile.TemporaryDirectory() as folder:
            rows[model_type] = row(model_type, publish(model_type, Path(folder)))
    for model_type in REFUSED:
        if not find_spec(LACKED.get(model_type, "no package")):
            with tempfile.TemporaryDirectory() as folder:
                rows[model_type] = refused_row(model_type, Path(folder))
    trained, refused = (
        "".join(f"{line}\n" for name, line in sorted(rows.items()) if (name in REFUSED) == is_refused)
        for is_refused in (False, True)
    )
    return HEADER + trained + REFUSED_HEADER + refused


def refused_row(model_type: str, folder: Path) -> str:
    return f"| `{model_type}` | {refusal(model_type, folder).found.replace(str(folder), 'the model')} |"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
