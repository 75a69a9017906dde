"""Expected losses, computed by plain transformers: its processor, its chat template, its model, no batches.

Shares no code with the trainer's data and models but the removal of a processor's video half, so that the same
error in both is unlikely.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING
from transformers.utils import PROCESSOR_NAME
from transformers.utils import logging as transformers_logging

from vlmpipe.prove.losses import LABELLINGS, SPANS, SampleLoss
from vlmpipe.prove.sample_set import Sample
from vlmpipe.trainer.models.hf.processor import without_video

transformers_logging.disable_progress_bar()


class Reference:
    """A model in a folder, and its losses on samples."""

    def __init__(self, folder: Path) -> None:
        self.model, loading = AutoModelForImageTextToText.from_pretrained(
            folder, dtype=torch.float32, output_loading_info=True, trust_remote_code=False
        )
        self.missing = sorted(loading["missing_keys"])
        self.model.eval()
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        kind = without_video(PROCESSOR_MAPPING[type(config)])
        image_processor = AutoImageProcessor.from_pretrained(folder, backend="pil", trust_remote_code=False)
        parts = {"image_processor": image_processor, "tokenizer": tokenizer}
        settings = folder / PROCESSOR_NAME
        self._processor = kind.from_args_and_dict(
            [parts.get(name) for name in kind.get_attributes()],
            json.loads(settings.read_text(encoding="utf-8")) if settings.exists() else {},
        )
        self._processor.chat_template = tokenizer.chat_template
        self._tokenizer, self._image_token_id = tokenizer, config.image_token_id

    def losses(self, samples: Sequence[Sample]) -> dict[str, list[SampleLoss]]:
        """By labelling, the loss of each sample."""
        results: dict[str, list[SampleLoss]] = {labelling: [] for labelling in LABELLINGS}
        for sample in samples:
            inputs, labelled = self._encoded(sample)
            with torch.no_grad():
                logits = self.model(**inputs).logits[0, :-1].double()
            token_losses = cross_entropy(logits, inputs["input_ids"][0, 1:], reduction="none")
            for labelling, positions in labelled.items():
                taken = token_losses[[position - 1 for position in positions if position]]
                results[labelling].append(SampleLoss(float(taken.sum()), len(taken)))
        return results

    def _encoded(self, sample: Sample) -> tuple[Any, dict[str, list[int]]]:
        """The model's inputs, and by labelling the positions of labelled tokens."""
        messages: list[dict[str, object]] = []
        spans, lengths = [], []
        images = [Image.open(sample.image).convert("RGB")] if sample.image else None
        for number, (question, answer) in enumerate(sample.turns):
            image = [{"type": "image"}] if images and not number else []
            messages.append({"role": "user", "content": [*image, {"type": "text", "text": question}]})
            prompt = self._inputs(messages, images, prompt=True)
            messages.append({"role": "assistant", "content": [{"type": "text", "text": answer}]})
            inputs = self._inputs(messages, images)
            start, length = prompt["input_ids"].shape[1], inputs["input_ids"].shape[1]
            assert inputs["input_ids"][0, :start].equal(prompt["input_ids"][0]), "the prompt is cut otherwise"
            spans.append(list(range(start, length)))
            lengths.append(length)
        assert all(inputs["input_ids"][0, span[-2]] == self._tokenizer.eos_token_id for span in spans)
        is_text = inputs["input_ids"][0] != self._image_token_id
        labelled = {
            SPANS: [place for span in spans for place in span[:-1]],
            LABELLINGS[1]: [place for span in spans for place in span],
            LABELLINGS[2]: [place for span in spans for place in span[:-2]],
            LABELLINGS[3]: spans[-1][:-1],
            LABELLINGS[4]: [place for place in range(lengths[-1]) if is_text[place]],
        }
        return inputs, labelled

    def _inputs(self, messages: list[dict[str, object]], images: object, *, prompt: bool = False) -> Any:
        text = self._processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
        return self._processor(text=[text], images=images, return_tensors="pt")
