"""The model card (README.md) of a registered model, in the form that the Hugging Face hub reads."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Iterator, Mapping

import jinja2
import yaml

from vlmpipe.trainer.checkpoint.attempts import step_of
from vlmpipe.trainer.config.benchmarks import TITLES
from vlmpipe.trainer.config.data import DataConfig
from vlmpipe.trainer.config.external_trainer import ExternalTrainerConfig
from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.config.model import PUBLISHED_FAMILIES, ModelConfig
from vlmpipe.trainer.config.weights.lora import LoraConfig
from vlmpipe.trainer.config.weights.origin import WeightsConfig
from vlmpipe.trainer.errors import ExitCode, UserError
from vlmpipe.trainer.models.layers.freeze import described
from vlmpipe.trainer.printable import one_line
from vlmpipe.trainer.records.evaluation import Control, Evaluation, Scores
from vlmpipe.trainer.records.evaluation_notes import evaluation_notes
from vlmpipe.trainer.records.summary import Summary
from vlmpipe.trainer.storage.base import BUCKET_SCHEMES

PART_NAMES = {
    "pretrained": "Model", "tower": "Vision tower", "projector": "Projector", "language_model": "Language model",
}  # fmt: skip
# Facts that a training program of the user's own decides itself.
OF_OUR_TRAINER = (
    "Not trained", "Adapters", "Packed sequences per step", "Peak learning rate", "Weights", "Precision", "Strategy",
)  # fmt: skip
_HEADER = re.compile(r"---\n(.*?)\n---\n", re.DOTALL)
MARKDOWN = frozenset("\\`*_[]{}()#~!")  # a bar ends a cell (`_cell`)
CONTROL_NAMES = {"shuffled_image": "with another sample's image", "no_image": "without an image"}


def _template(name: str) -> jinja2.Template:
    loader = jinja2.PackageLoader("vlmpipe.registry.model_card", ".")
    environment = jinja2.Environment(loader=loader, trim_blocks=True, lstrip_blocks=True)
    environment.filters["cell"] = _cell
    return environment.get_template(name)


def loading(model: ModelConfig) -> str:
    """Code that loads the model and asks it about image.png, as Markdown."""
    return _template("loading.md.j2").render(form=_form(model), load=_load(model))


def _load(model: ModelConfig) -> str:
    """Python statements that load it from `folder`."""
    if not model.exports_adapter:
        return "model = AutoModelForImageTextToText.from_pretrained(folder)"
    assert model.pretrained
    revision = f", revision={model.pretrained.revision!r}" if model.pretrained.revision else ""
    return (
        f"base = AutoModelForImageTextToText.from_pretrained({model.pretrained.weights!r}{revision})\n"
        "model = PeftModel.from_pretrained(base, folder)"
    )


def _form(model: ModelConfig) -> str:
    if model.image_kind == "grids":
        return "grids"
    if model.family in ("llava", "hf"):
        return "processor"
    return "tiles" if model.longest_edge else "squares"


def model_card(config: JobConfig, evaluation: Evaluation, summary: Summary, *, model: str, checkpoint: str = "") -> str:
    """The card's text.

    Args:
        config: the effective run file.
        evaluation: `evaluate.json`.
        summary: `summary.json` of training.
        model: name of the model in the registry.
        checkpoint: that was exported; "" for the newest one.
    """
    controls = evaluation.controls
    scored = {name: scores.exact_match for name, scores in evaluation.slices.items() if scores.exact_match is not None}
    weakest = min(scored, key=lambda name: scored[name]) if len(scored) > 1 else None
    loss, metadata = evaluation.loss, _metadata(config, evaluation, model)
    card = _template("model_card.md.j2").render(
        header=yaml.safe_dump(metadata, sort_keys=False, allow_unicode=True),
        model=model,
        config=config,
        facts=_training(config, summary, checkpoint),
        loss="" if loss is None else f"{loss:.4g}",
        controls=[_control_title(name, control) for name, control in controls.items()],
        rows=list(_rows(evaluation)),
        notes=[_escaped(f"{note[0].upper()}{note[1:]}.") for note in evaluation_notes(evaluation)],
        benchmarks=list(_benchmarks(evaluation)),
        quantized=list(_quantized(evaluation)),
        weakest=f"{_escaped(weakest)}, exact match {_share(scored[weakest])}" if weakest is not None else "",
        size=_size(config.model),
        form=_form(config.model),
        load=_load(config.model),
    )
    _require_header(card, metadata)
    return f"{card}\n"


def _quantized(evaluation: Evaluation) -> Iterator[tuple[str, ...]]:
    """A row of the table for each quantized export that is registered."""
    for form, scores in evaluation.quantized.items():
        if scores.accepted:
            scale = f"{scores.group_size} inputs of an output" if scores.group_size else "an output; a token's input"
            left = ", ".join([*scores.left, "embeddings"])
            answers = f"{scores.same:,} of {scores.questions:,}"
            yield form, f"{scores.layers} layers of the language model", scale, left, answers


def _control_title(name: str, control: Control) -> str:
    """Return the control's title, with its number of questions if some had no other image to be asked with."""
    title, questions = CONTROL_NAMES.get(name, name), control.questions
    return f"{title} ({questions:,} questions)" if control.left_out and questions is not None else title


def _require_header(card: str, metadata: Mapping[str, object]) -> None:
    """Read the header as the hub does. Raises UserError (exit 1) where that is not what was meant."""
    match = _HEADER.match(card)
    if match is None or yaml.safe_dump(yaml.safe_load(match[1])) != yaml.safe_dump(dict(metadata)):
        raise UserError(
            "the model card's header reads as something else than was meant",
            expected="the metadata of the run",
            fix="nothing was registered; please report it with the run file",
            code=ExitCode.UNEXPECTED,
        )


def _metadata(config: JobConfig, evaluation: Evaluation, model: str) -> dict[str, object]:
    parts = [part for part in config.model.sources.values() if part]
    metadata: dict[str, object] = {
        "library_name": "transformers",
        "pipeline_tag": "image-text-to-text",
        "tags": ["vision-language", config.model.family, "vlmpipe"],
    }
    named = [part.weights for part in parts if part.weights]
    hub_ids = [weights for weights in named if not weights.startswith(("/", ".", *BUCKET_SCHEMES))]
    base_models = list(dict.fromkeys(hub_ids))
    if base_models:
        metadata["base_model"] = base_models
    if config.model.exports_adapter:
        metadata |= {"library_name": "peft", "base_model_relation": "adapter"}
    result = {
        "task": {"type": "image-text-to-text"},
        "dataset": {
            "type": config.data.source or "mixture",
            "name": config.data.source or ", ".join(source.name for source in config.data.sources),
            "split": "validation",
        },
        "metrics": [
            {"type": kind, "name": name, "value": value}
            for kind, name, value in (
                ("exact_match", "exact match", evaluation.exact_match),
                ("loss", "loss", evaluation.loss),
            )
            if value is not None
        ],
    }
    if result["metrics"]:
        metadata["model-index"] = [{"name": model, "results": [result]}]
    return metadata


def _data(data: DataConfig) -> str:
    """The sources, with the shares and licences that the run file gives."""
    if not data.sources:
        return _code(data.source)
    weights = data.weights(0)
    shares = (
        [f", {weight / sum(weights):.1%} of samples" for weight in weights] if weights else [""] * len(data.sources)
    )
    later = " in the first phase" if len(data.phases) > 1 else ""
    return "; ".join(
        f"{_escaped(str(source.name))} ({_code(source.address)}{share + later if share else ''}, "
        f"{_escaped(source.license or 'licence not given')})"
        for source, share in zip(data.sources, shares, strict=True)
    )


def _training(config: JobConfig, summary: Summary, checkpoint: str) -> list[tuple[str, str]]:
    train, model = config.train, config.model
    origins = {PART_NAMES[name]: _origin(part) for name, part in model.sources.items()}
    facts = {
        "Data": _data(config.data),
        **origins,
        "Not trained": described(config.model),
        "Adapters": _adapters(model.lora) if model.lora else "",
        "Parameters": _count(summary.parameters),
        "Trained parameters": _count(summary.trainable_parameters),
        "Optimizer steps": "" if train.trainer else _steps(summary, checkpoint),
        "Tokens": _count(summary.tokens) + _starts(summary),
        "Packed sequences per step": f"{train.global_batch_size} of {config.data.sequence_length} tokens",
        "Peak learning rate": f"{train.optimizer.learning_rate:g}, {train.lr_schedule}",
        "Weights": f"exponential moving average over the steps, decay {train.ema_decay:g}" if train.ema_decay else "",
        "Precision": train.precision,
        "Strategy": f"{train.strategy} on {summary.world_size or 'an unrecorded number of'} process(es)",
        "Trainer": "",
    }
    if train.trainer:
        facts |= dict.fromkeys(OF_OUR_TRAINER, "") | {"Trainer": _trainer(train.trainer, summary)}
    return [(name, value) for name, value in facts.items() if value]


def _steps(summary: Summary, checkpoint: str) -> str:
    """Steps that the exported weights were trained for, and those of the training where it went on."""
    if checkpoint in ("", summary.checkpoint):
        return _count(summary.steps)
    steps = f"{_count(step_of(checkpoint))}, "
    if checkpoint != summary.best_checkpoint:
        return f"{steps}of {_count(summary.steps)}"
    return f"{steps}the best of {_count(summary.steps)} by {summary.best_metric.replace('_', ' ')}"


def _starts(summary: Summary) -> str:
    """Note on the tokens of a training that was interrupted."""
    starts, repeated = summary.repeated_starts(), summary.steps_repeated
    again = f", at least {_count(repeated)} steps made twice" if repeated else ""
    return f" (in {starts} starts{again})" if starts and summary.tokens else ""


def _trainer(trainer: ExternalTrainerConfig, summary: Summary) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in summary.versions.items())
    where = f"{trainer.launch}, {summary.world_size or 'an unrecorded number of'} process(es)"
    return f"{_escaped(trainer.name)} ({where}): {_code(' '.join(trainer.command))}" + (
        f"; {versions}" if versions else ""
    )


def _adapters(lora: LoraConfig) -> str:
    kind = " ".join(["DoRA" if lora.use_dora else "LoRA", *(["with rank-stabilised scale"] if lora.use_rslora else [])])
    return f"{kind}, rank {lora.rank}, alpha {lora.alpha:g}, in {' and '.join(lora.parts)}; {lora.export}"


def _rows(evaluation: Evaluation) -> Iterator[tuple[str, ...]]:
    """Cells of the evaluation's table: all questions, then each slice."""
    controls = evaluation.controls.values()

    def row(name: str, measured: Scores, baselines: Iterable[Scores | Control | None]) -> tuple[str, ...]:
        values = [
            measured.exact_match,
            measured.chance,
            *(baseline.exact_match if baseline else None for baseline in baselines),
        ]
        return name, _count(measured.questions), *(_share(value) for value in values)

    yield row("**all**", evaluation, controls)
    for name, measured in evaluation.slices.items():
        yield row(_escaped(name), measured, [control.slices.get(name) for control in controls])


def _benchmarks(evaluation: Evaluation) -> Iterator[tuple[str, ...]]:
    """Cells of the benchmarks' table: each score with its interval."""
    for name, result in evaluation.benchmarks.items():
        for metric, value in result.scores.items():
            low, high = result.intervals.get(metric) or (None, None)
            between = "" if low is None else f" ({_share(low)} to {_share(high)})"
            yield (
                _escaped(name),
                result.format,
                _count(result.questions),
                TITLES.get(metric, metric),
                _share(value) + between,
            )


def _size(model: ModelConfig) -> str:
    if model.max_pixels:
        return f"at most {model.max_pixels:,} pixels"
    if model.longest_edge:
        return f"{model.longest_edge:,} pixels on their longer side, and cut into tiles"
    if model.family in PUBLISHED_FAMILIES:
        return "as the model's image processor makes them"
    return f"{model.image_size} x {model.image_size} pixels"


def _origin(part: WeightsConfig | None) -> str:
    if part is None:
        return "random initial weights"
    if part.weights:
        return _code(part.weights) + (f" at {_code(part.revision)}" if part.revision else "")
    return f"{_code(str(part.config['model_type']))}, random initial weights"


def _one_line(text: str) -> str:
    return " ".join(one_line(text).split())


def _escaped(text: str) -> str:
    """Text of data as Markdown that shows it and nothing else: no link, no image, no HTML."""
    escaped = "".join(f"\\{character}" if character in MARKDOWN else character for character in _one_line(text))
    return html.escape(escaped, quote=False).replace("://", ":\u200b//")  # an address alone would be a link


def _code(text: str) -> str:
    """Return the text as Markdown code, in which only a backtick has a meaning."""
    return f"`{_one_line(text).replace('`', chr(39))}`"


def _share(value: float | None) -> str:
    return f"{value:.3f}" if value is not None else "not measured"


def _count(value: int | None) -> str:
    return "" if value is None else f"{value:,}"


def _cell(text: str) -> str:
    """Text for a cell of a Markdown table; a slice's name may hold `|` and line breaks."""
    return _one_line(text).replace("|", "\\|")
