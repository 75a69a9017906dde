"""Names and shapes of tensors as published models of each type have them, in `tests/fixtures/published_names.json`.

`python -m tests.support.hf.published_names FOLDER` writes that file; FOLDER holds transformers 4.57, whose own models
save the names of first releases. It does not know every type: for the rest the names were compared with what other
programs look for in published files.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedConfig

from tests.support.hf.kinds import KINDS
from tests.support.hf.publish import config_of, tokenizer_of
from tests.support.paths import ROOT
from tests.support.trainer.tiny_native import CONFIGS
from vlmpipe.trainer.checkpoint.export.published_form import published_form, stored_tensors
from vlmpipe.trainer.checkpoint.export.settings_files import serve_older_readers

TABLE = ROOT / "tests/fixtures/published_names.json"
DRIVER = ROOT / "tests/support/drivers/older_transformers.py"
Names = dict[str, list[list[int]]]
# Native families with sizes of their own, or with another tower than the type of family hf.
SIGLIP = {"model_type": "siglip_vision_model"} | CONFIGS["smolvlm"]["vision_config"]
NATIVE: dict[str, dict[str, Any]] = {
    "smolvlm": CONFIGS["smolvlm"],
    "llava_siglip": CONFIGS["smolvlm"] | {"model_type": "llava", "vision_config": SIGLIP, "scale_factor": None},
}
MODELS = tuple(dict.fromkeys((*KINDS, *NATIVE)))


def config_named(name: str) -> PreTrainedConfig:
    if name in NATIVE:
        return AutoConfig.for_model(**NATIVE[name])
    found: PreTrainedConfig = config_of(KINDS[name], name, tokenizer_of(name), own_text={}, own_vision={})
    return found


def blueprint(name: str) -> nn.Module:
    """A tiny model without values."""
    with torch.device("meta"):
        model: nn.Module = AutoModelForImageTextToText.from_config(config_named(name))
    return model


def names_of(tensors: dict[str, Any]) -> Names:
    """Names with `#` for the numbers of layers and experts -> the shapes that occur. tensors: name -> shape."""
    found: dict[str, set[tuple[int, ...]]] = {}
    for name, shape in tensors.items():
        found.setdefault(re.sub(r"\.\d+(?=\.)", ".#", name), set()).add(tuple(shape))
    return {name: [list(shape) for shape in sorted(shapes)] for name, shapes in sorted(found.items())}


def shapes(tensors: dict[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def exported_names(name: str) -> Names:
    return names_of(shapes(stored_tensors(published_form(blueprint(name)))))


def in_other_transformers(folder: Path, work: str, models: list[Path]) -> dict[str, Any]:
    """Results by the names of `models`. folder: holds the packages of another release."""
    done = subprocess.run(
        [sys.executable, "-P", str(DRIVER), work, *map(str, models)],
        env={**os.environ, "PYTHONPATH": str(folder), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert found["version"].startswith("4."), "another release must come first"
    results: dict[str, Any] = found["results"]
    return results


def saved_by(folder: Path) -> dict[str, Names]:
    """By another release, for the types that it knows."""
    with tempfile.TemporaryDirectory() as scratch:
        places = []
        for name in MODELS:
            place = Path(scratch, name)
            config_named(name).save_pretrained(place)
            serve_older_readers(place)
            places.append(place)
        results = in_other_transformers(folder, "names", places)
    return {name: names_of(found) for name, found in results.items() if "refused" not in found}


def main() -> None:
    saved = saved_by(Path(sys.argv[1]))
    table = {
        name: {"saved_by": "transformers 4.57" if name in saved else "", "tensors": saved.get(name) or names}
        for name, names in ((name, exported_names(name)) for name in MODELS)
    }
    rows = [
        f'  {json.dumps(name)}: {{\n    "saved_by": {json.dumps(entry["saved_by"])},\n    "tensors": {{\n'
        + ",\n".join(f"      {json.dumps(tensor)}: {json.dumps(found)}" for tensor, found in entry["tensors"].items())
        + "\n    }\n  }"
        for name, entry in sorted(table.items())
    ]
    TABLE.write_text("{\n" + ",\n".join(rows) + "\n}\n")


if __name__ == "__main__":
    main()
