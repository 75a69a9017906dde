"""Opens folders with the transformers that comes first on PYTHONPATH, without any of vlmpipe.

`names`: which tensors its models of given configurations save. `read`: what it makes of exported models. `adapters`:
what PEFT makes of exported adapters on them. Prints JSON.
"""

from __future__ import annotations

import inspect
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForImageTextToText, AutoProcessor, AutoTokenizer, GenerationConfig

INPUTS, LOGITS = "inputs.pt", "logits.pt"  # beside an export, for `read`


def saved(folder: Path) -> dict[str, list[int]]:
    """Name -> shape of the tensors of a new model."""
    model = AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(folder))
    with tempfile.TemporaryDirectory() as scratch:
        model.save_pretrained(scratch)
        with safe_open(f"{scratch}/model.safetensors", "pt") as file:
            return {name: list(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118


def read(folder: Path) -> dict[str, Any]:
    """What is missing, the largest difference of logits as a share of the largest logit, and which classes open it."""
    model, info = AutoModelForImageTextToText.from_pretrained(folder, output_loading_info=True, dtype=torch.float32)
    found: dict[str, Any] = {name: sorted(map(str, info[name])) for name in info if name != "error_msgs"}
    found["difference"] = difference(model, folder)
    generation = GenerationConfig.from_pretrained(folder)
    found["generation"] = {name: getattr(generation, name) for name in ("eos_token_id", "repetition_penalty")}
    tokenizer = AutoTokenizer.from_pretrained(folder)
    asked = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is this?"}]}]
    found["prompt"] = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
    found["tokens"] = tokenizer(found["prompt"])["input_ids"]
    try:
        found["processor"] = type(AutoProcessor.from_pretrained(folder)).__name__
    except ImportError as error:  # video processors need torchvision
        found["processor"] = str(error)
    return found


def difference(model: Any, folder: Path) -> float:
    """The largest difference from the logits that are kept beside the export, as a share of the largest logit."""
    known = inspect.signature(model.forward).parameters
    inputs = {name: value for name, value in torch.load(folder / INPUTS).items() if name in known}
    expected = torch.load(folder / LOGITS)
    with torch.no_grad():
        logits = model.eval()(**inputs).logits
    return float((logits - expected).abs().max() / expected.abs().max())


def adapted(folder: Path) -> dict[str, Any]:
    """The same difference with the adapter on its base, and without."""
    from peft import PeftModel  # which takes seconds, and tests collect this module

    base = json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"]
    model = AutoModelForImageTextToText.from_pretrained(base, dtype=torch.float32)
    without = difference(model, folder)
    merged = PeftModel.from_pretrained(model, str(folder)).merge_and_unload()
    return {"without": without, "difference": difference(merged, folder)}


def main() -> None:
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    work = {"names": saved, "read": read, "adapters": adapted}[sys.argv[1]]
    results: dict[str, Any] = {}
    for folder in map(Path, sys.argv[2:]):
        try:
            results[folder.name] = work(folder)
        except (ValueError, RuntimeError, OSError) as error:
            results[folder.name] = {"refused": str(error).splitlines()[0]}
    print(json.dumps({"version": transformers.__version__, "results": results}))


if __name__ == "__main__":
    main()
