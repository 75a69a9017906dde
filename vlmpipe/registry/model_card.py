"""The model card (README.md) that travels with a registered model, in the form the Hugging Face hub reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

from trainer.config.job import JobConfig
from trainer.config.model import GRID_FAMILIES, ModelConfig, WeightsConfig
from trainer.models.layers.freeze import described

LOADING = """```python
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

folder = "."  # this folder
processor = AutoProcessor.from_pretrained(folder)
model = AutoModelForImageTextToText.from_pretrained(folder)

question = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is in the picture?"}]}
prompt = processor.apply_chat_template([question], add_generation_prompt=True)
inputs = processor(images=Image.open("picture.png").convert("RGB"), text=prompt, return_tensors="pt")
answer = model.generate(**inputs, max_new_tokens=16)
print(processor.decode(answer[0, inputs["input_ids"].shape[1]:], skip_special_tokens=True))
```"""

# Of these, transformers makes a processor only where torchvision is.
LOADING_WITHOUT_PROCESSOR = """```python
from PIL import Image
from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer

folder = "."  # this folder
tokenizer, image_processor = AutoTokenizer.from_pretrained(folder), AutoImageProcessor.from_pretrained(folder)
model = AutoModelForImageTextToText.from_pretrained(folder)

question = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is in the picture?"}]}
prompt = tokenizer.apply_chat_template([question], add_generation_prompt=True, tokenize=False)
image = image_processor([Image.open("picture.png").convert("RGB")], PROCESS)
image_token = tokenizer.convert_ids_to_tokens(model.config.image_token_id)
TOKENS
text = tokenizer(prompt.replace(image_token, image_text), add_special_tokens=False, return_tensors="pt")
ANSWER
print(tokenizer.decode(answer[0, text["input_ids"].shape[1]:], skip_special_tokens=True))
```"""


# How the image is processed, which tokens it has, and what the model is given.
ALONE = """return_tensors="pt\""""
OF_GRIDS = (
    ALONE,
    """image_text = image_token * (int(image["image_grid_thw"].prod()) // image_processor.merge_size**2)""",
    """is_image = (text["input_ids"] == model.config.image_token_id).int()
answer = model.generate(input_ids=text["input_ids"], mm_token_type_ids=is_image, **image, max_new_tokens=16)""",
)
OF_SQUARES = (
    ALONE,
    """patches = image["pixel_values"].shape[-1] // model.config.vision_config.patch_size
image_text = image_token * (patches // model.config.scale_factor) ** 2""",
    """answer = model.generate(input_ids=text["input_ids"], **image, max_new_tokens=16)""",
)


OF_TILES = (
    f"{ALONE}, return_row_col_info=True",
    """rows, columns = image.pop("rows")[0][0], image.pop("cols")[0][0]
patches = image["pixel_values"].shape[-1] // model.config.vision_config.patch_size
tile = image_token * (patches // model.config.scale_factor) ** 2
around, image_text = "<fake_token_around_image>", ""
for row in range(1, rows + 1):
    image_text += "".join(f"{around}<row_{row}_col_{column}>{tile}" for column in range(1, columns + 1)) + "\\n"
image_text += f"\\n{around}<global-img>{tile}{around}\"""",
    OF_SQUARES[-1],
)


def loading(model: ModelConfig) -> str:
    """Code that loads the model and asks it about picture.png, as Markdown."""
    if not model.pretrained:
        return LOADING
    process, tokens, answer = OF_GRIDS if model.family in GRID_FAMILIES else OF_SQUARES
    if model.longest_edge:
        process, tokens, answer = OF_TILES
    code = LOADING_WITHOUT_PROCESSOR.replace("PROCESS", process)
    return code.replace("TOKENS", tokens).replace("ANSWER", answer)


def model_card(config: JobConfig, evaluation: Mapping[str, Any], summary: Mapping[str, Any], *, model: str) -> str:
    """The card's text.

    Args:
        config: the effective run file.
        evaluation: `evaluate.json`.
        summary: `summary.json` of training.
        model: name of the model in the registry.
    """
    header = yaml.safe_dump(_metadata(config, evaluation, model), sort_keys=False, allow_unicode=True)
    sections = [
        f"# {model}",
        f"A vision-language model of the family `{config.model.family}`, trained by the vlmpipe run "
        f"`{config.run.run_id}`. It answers questions about pictures of the kind it was trained on.",
        "## Training",
        _training(config, summary),
        "## Evaluation",
        _evaluation(evaluation),
        "## Limits",
        _limits(config, evaluation),
        "## Loading",
        loading(config.model),
    ]
    return f"---\n{header}---\n\n" + "\n\n".join(sections) + "\n"


def _metadata(config: JobConfig, evaluation: Mapping[str, Any], model: str) -> dict[str, Any]:
    parts = [config.model.pretrained] if config.model.pretrained else [config.model.tower, config.model.language_model]
    metadata: dict[str, Any] = {
        "library_name": "transformers",
        "pipeline_tag": "image-text-to-text",
        "tags": ["vision-language", config.model.family, "vlmpipe"],
    }
    base_models = [part.weights for part in parts if part.weights and not part.weights.startswith(("/", ".", "gs://"))]
    if base_models:
        metadata["base_model"] = base_models
    result = {
        "task": {"type": "image-text-to-text"},
        "dataset": {"type": config.data.source, "name": config.data.source, "split": "held-out"},
        "metrics": [
            {"type": kind, "name": name, "value": evaluation[kind]}
            for kind, name in (("exact_match", "exact match"), ("loss", "loss"))
            if evaluation.get(kind) is not None
        ],
    }
    if result["metrics"]:
        metadata["model-index"] = [{"name": model, "results": [result]}]
    return metadata


def _training(config: JobConfig, summary: Mapping[str, Any]) -> str:
    train, model = config.train, config.model
    origins = {"Vision tower": _origin(model.tower), "Language model": _origin(model.language_model)}
    if model.pretrained:
        origins = {"Model": _origin(model.pretrained)}
    facts = {
        "Data": f"`{config.data.source}`",
        **origins,
        "Not trained": described(config.model),
        "Parameters": _count(summary.get("parameters")),
        "Trained parameters": _count(summary.get("trainable_parameters")),
        "Optimizer steps": _count(summary.get("steps")),
        "Tokens": _count(summary.get("tokens")),
        "Packed sequences per step": f"{train.global_batch_size} of {config.data.sequence_length} tokens",
        "Peak learning rate": f"{train.optimizer.learning_rate:g}, {train.lr_schedule}",
        "Weights": f"exponential moving average over the steps, decay {train.ema_decay:g}" if train.ema_decay else "",
        "Precision": train.precision,
        "Strategy": f"{train.strategy} on {summary.get('world_size', 'an unrecorded number of')} process(es)",
    }
    return _table(("", ""), [(name, value) for name, value in facts.items() if value])


def _evaluation(evaluation: Mapping[str, Any]) -> str:
    controls = evaluation.get("controls") or {}
    names = {"shuffled_image": "with another sample's image", "no_image": "without an image"}
    columns = ["chance", *(names.get(control, control) for control in controls)]

    def line(name: str, measured: Mapping[str, Any], baselines: list[Any]) -> tuple[str, ...]:
        values = [measured.get("exact_match"), measured.get("chance"), *baselines]
        return name, _count(measured.get("questions")), *(_share(value) for value in values)

    rows = [line("**all**", evaluation, [control.get("exact_match") for control in controls.values()])]
    for name, measured in (evaluation.get("slices") or {}).items():
        of_slice = [(control.get("slices") or {}).get(name) for control in controls.values()]
        baselines = [value.get("exact_match") if isinstance(value, Mapping) else value for value in of_slice]
        rows.append(line(name, measured, baselines))
    table = _table(("slice", "questions", "exact match", *columns), rows)
    loss = evaluation.get("loss")
    held_out = f" The loss is {loss:.4g} nats a label token." if isinstance(loss, int | float) else ""
    return (
        "Share of held-out questions whose generated answer is exactly the expected one. *Chance* always gives the "
        f"commonest training answer; the controls show what the text alone gives away.{held_out}\n\n{table}"
    )


def _limits(config: JobConfig, evaluation: Mapping[str, Any]) -> str:
    slices = evaluation.get("slices") or {}
    limits = [
        f"Measured only on the held-out part of `{config.data.source}`. On other pictures, questions or languages "
        "nothing is known.",
        "It gives an answer to every question, also to one that the picture does not settle.",
        f"Pictures are resized to {_size(config.model)}: smaller detail is lost.",
        f"A sample, its images included, has at most {config.data.sequence_length} tokens.",
    ]
    scored = {name: value["exact_match"] for name, value in slices.items() if value.get("exact_match") is not None}
    if len(scored) > 1:
        weakest = min(scored, key=lambda name: scored[name])
        limits.insert(1, f"Weakest slice: {_one_line(weakest)}, exact match {_share(scored[weakest])}.")
    return "\n".join(f"- {limit}" for limit in limits)


def _size(model: ModelConfig) -> str:
    if model.max_pixels:
        return f"at most {model.max_pixels:,} pixels"
    if model.longest_edge:
        return f"{model.longest_edge:,} pixels on their longer side, and cut into tiles"
    return f"{model.image_size} x {model.image_size} pixels"


def _origin(part: WeightsConfig) -> str:
    if part.weights:
        return f"`{part.weights}`" + (f" at `{part.revision}`" if part.revision else "")
    return f"`{part.config['model_type']}`, random initial weights"


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _share(value: Any) -> str:
    return f"{value:.3f}" if isinstance(value, int | float) else "not measured"


def _count(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else ""


def _table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """A Markdown table; `|` and line breaks in a cell (a slice may be named anything) do not break it."""
    lines = []
    for line in [header, tuple("---" for _ in header), *rows]:
        cells = (_one_line(cell).replace("|", "\\|") for cell in line)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
