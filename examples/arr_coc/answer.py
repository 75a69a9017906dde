"""Answers a question about a picture with the visual tokens that the question is about.

An export of configs/arr-coc.yaml in plain transformers, with its relevance module before the language model:

python examples/arr_coc/answer.py EXPORT PICTURE QUESTION
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from PIL import Image
from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer

from vlmpipe.trainer.features.relevance.generation import selected_inputs
from vlmpipe.trainer.features.relevance.model import with_textures
from vlmpipe.trainer.features.relevance.module import FILE, load_relevance


@torch.inference_mode()
def answer(export: Path, picture: Path, question: str) -> tuple[str, int, int]:
    """The answer, and the visual tokens that the model got of how many."""
    model = AutoModelForImageTextToText.from_pretrained(export).eval()
    model.relevance = load_relevance(export / FILE)
    tokenizer, processor = AutoTokenizer.from_pretrained(export), AutoImageProcessor.from_pretrained(export)
    with Image.open(picture) as image:
        pixels = processor(images=[image.convert("RGB")], return_tensors="pt")
    encoded = model.model.get_image_features(pixels["pixel_values"], pixels["image_grid_thw"])
    levels = [torch.cat(list(level)) for level in (encoded.pooler_output, *(encoded.get("deepstack_features") or ()))]
    grids = [tuple(grid) for grid in pixels["image_grid_thw"].tolist()]
    features = with_textures(torch.cat(levels, dim=1), pixels["pixel_values"], grids, processor)

    content = [{"type": "image"}, {"type": "text", "text": question}]
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
    )
    mark = tokenizer.convert_ids_to_tokens(model.config.image_token_id)
    ids = tokenizer(prompt.replace(mark, mark * len(features)), return_tensors="pt", add_special_tokens=False).input_ids
    inputs = selected_inputs(model, ids, features, pixels["image_grid_thw"])
    found = model.generate(**inputs, max_new_tokens=32, do_sample=False)
    kept = int((inputs["input_ids"] == model.config.image_token_id).sum())
    said = tokenizer.decode(found[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return said.strip(), kept, len(features)


if __name__ == "__main__":
    said, kept, tokens = answer(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
    print(f"{said}\n({kept} of {tokens} visual tokens)")
