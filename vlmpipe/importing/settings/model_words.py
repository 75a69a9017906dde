"""Model, adapters, frozen parts, data and lengths in other programs' words, as fields of a run file."""

from __future__ import annotations

import re

from vlmpipe.importing.cluster import gpu_memory_gib, gpus
from vlmpipe.importing.findings import Outcome
from vlmpipe.importing.settings.concepts import Concepts, Entry, is_on, number
from vlmpipe.importing.settings.models import (
    LARGE_MODEL,
    MANY_GPUS,
    SMALL_MODEL,
    family_of,
    is_model_name,
    model_fields,
)
from vlmpipe.importing.translation import EXAMPLE_SOURCE

EXAMPLE_LENGTH, EXAMPLE_RANK = 2048, 16
WHOLE_MODEL_GIB = 40  # of all GPUs, for every weight of SMALL_MODEL with its optimizer state
PARTS = {"freeze_tower": "tower", "freeze_projector": "projector", "freeze_language_model": "language_model"}
STAGES = {
    "sft": "sft",
    "dpo": "dpo",
    "pt": "",
    "rm": "",
    "ppo": "",
    "kto": "",
    "grpo": "",
    "orpo": "",
    "simpo": "simpo",
}
_TARGET = re.compile(r"[A-Za-z_][\w.]*")


def translate_model(concepts: Concepts) -> None:
    """Turn the concepts of model and data into fields."""
    _model(concepts)
    _adapters(concepts)
    _frozen_parts(concepts)
    _length(concepts)
    _data(concepts)
    _objective(concepts)
    _tracking(concepts)


def _model(concepts: Concepts) -> None:
    translation, entry = concepts.translation, concepts.take("model")
    pixels = [concepts.count(name) for name in ("max_pixels", "min_pixels")]
    pixels[0] = pixels[0] or concepts.defaults.get("max_pixels")
    name = str(entry.value) if entry else ""
    family = family_of(name) if is_model_name(name) else ""
    if entry and family:
        fields = model_fields(name, max_pixels=pixels[0])
        weights = "model.tower.weights" if family == "llava" else "model.pretrained.weights"
        by_default = concepts.defaults.get("max_pixels") and not concepts.take("max_pixels")
        for field, value in fields.items():
            is_default = field == "model.max_pixels" and by_default
            translation.assume(field, value, concepts.by_default(str(value)) if is_default else "")
        translation.express(entry.path, weights, name)
    else:
        why = f"an example: {name or 'the file'} names no vision-language model that is known here"
        example = LARGE_MODEL if gpus(translation) >= MANY_GPUS else SMALL_MODEL
        for field, value in model_fields(example, max_pixels=pixels[0]).items():
            translation.assume(field, value, why if field == "model.pretrained.weights" else "")
        if gpu_memory_gib(translation) < WHOLE_MODEL_GIB and "train.trainer.name" not in translation.settings:
            reason = "an example: adapters, for a whole model does not fit on these GPUs"
            translation.assume("model.lora.rank", EXAMPLE_RANK, reason)
        if entry:
            reason = (
                "no vision-language model under this name is known: model.family hf takes any image-text model of "
                "transformers; a text model is not trained here but by train.trainer"
            )
            translation.refuse(entry.path, reason)
    takes_pixels = translation.settings["model.family"].value in ("qwen2_5_vl", "qwen3_vl")
    for concept, field, value in zip(("max_pixels", "min_pixels"), ("model.max_pixels", "model.min_pixels"), pixels,
                                     strict=True):  # fmt: skip
        bound = concepts.take(concept)
        if bound and value and takes_pixels:
            translation.express(bound.path, field, value)
        elif bound and value:
            translation.refuse(bound.path, "pixels bound the images of Qwen-VL models; see model.image_processor")
    if side := concepts.take("image_side"):
        translation.refuse(side.path, "images keep their shape; model.max_pixels or image_size bounds them")
    if (revision := concepts.take("revision")) and str(revision.value) == "main":
        translation.drop(revision.path, "the newest commit, as an empty revision; pin one")
    elif revision:
        translation.express(revision.path, "model.pretrained.revision", str(revision.value))
    if dtype := concepts.take("weights_dtype"):
        translation.drop(dtype.path, "train.precision decides the number type of weights")


def _uses_adapters(concepts: Concepts) -> bool:
    """Return whether adapters are trained: said by a method, a switch, or their rank alone."""
    translation = concepts.translation
    method = concepts.take("method")
    default = str(concepts.defaults.get("method") or "")
    if method:
        name = str(method.value).lower()
        known = {"lora": True, "qlora": True, "full": False, "none": False}
        if name in known:
            field = "model.lora" if known[name] else ""
            translation.drop(method.path, "the weights themselves are trained") if not known[name] else None
            if known[name]:
                translation.ledger.note(method.path, Outcome.CHANGED, field, "the section model.lora is set")
            if name == "qlora":
                translation.assume("model.lora.quantize_base", "nf4", "qlora there")
            return known[name]
        translation.refuse(method.path, "adapters are LoRA, with rslora, DoRA or a 4-bit base")
        return False
    if switch := concepts.take("use_lora"):
        translation.ledger.note(switch.path, Outcome.CHANGED, "model.lora" if is_on(switch.value) else "",
                                "whether there are adapters")  # fmt: skip
        return is_on(switch.value)
    return default == "lora" or bool(concepts.take("lora_rank") and "lora_rank" not in concepts.defaults)


def _adapters(concepts: Concepts) -> None:
    translation = concepts.translation
    names = ("lora_rank", "lora_alpha", "lora_dropout", "lora_targets", "lora_all", "use_rslora", "use_dora",
             "quantize", "quantize_type", "quantize_method")  # fmt: skip
    if not _uses_adapters(concepts):
        for name in names:
            if entry := concepts.take(name):
                translation.drop(entry.path, "no adapters are trained there")
        return
    rank = concepts.count("lora_rank")
    if rank and (entry := concepts.take("lora_rank")):
        translation.express(entry.path, "model.lora.rank", rank)
    rank = rank or int(concepts.defaults.get("lora_rank") or 8)
    translation.assume("model.lora.rank", rank, concepts.by_default(str(rank)))
    alpha, entry = concepts.number("lora_alpha"), concepts.take("lora_alpha")
    if alpha and entry:
        translation.express(entry.path, "model.lora.alpha", alpha)
    else:
        alpha = concepts.defaults.get("lora_alpha") or 2 * rank
        translation.assume("model.lora.alpha", alpha, concepts.by_default(f"{alpha:g}"))
    dropout, entry = concepts.number("lora_dropout"), concepts.take("lora_dropout")
    if dropout is not None and entry:
        translation.express(entry.path, "model.lora.dropout", dropout)
    elif default := concepts.defaults.get("lora_dropout"):
        translation.assume("model.lora.dropout", default, concepts.by_default(str(default)))
    for name in ("use_rslora", "use_dora"):
        if entry := concepts.take(name):
            translation.express(entry.path, f"model.lora.{name}", is_on(entry.value))
    _targets(concepts)
    _quantized(concepts)


def _targets(concepts: Concepts) -> None:
    translation = concepts.translation
    if every := concepts.take("lora_all"):
        translation.drop(every.path, "no targets are all linear layers" if is_on(every.value) else "off")
    entry = concepts.take("lora_targets")
    if entry is None:
        return
    words = entry.value if isinstance(entry.value, list) else re.split(r"[,\s]+", str(entry.value).strip())
    if words in (["all"], ["all-linear"]):
        translation.change([entry.path], "model.lora.targets", [], "all linear layers of the parts in model.lora.parts")
    elif words and all(isinstance(word, str) and _TARGET.fullmatch(word) for word in words):
        translation.express(entry.path, "model.lora.targets", list(words))
    else:
        reason = "a pattern; model.lora.targets takes names such as q_proj, and parts name the parts of the model"
        translation.refuse(entry.path, f"{reason}: all linear layers of the language model get adapters")


def _quantized(concepts: Concepts) -> None:
    translation = concepts.translation
    entry, kind = concepts.take("quantize"), concepts.take("quantize_type")
    if method := concepts.take("quantize_method"):
        translation.drop(method.path, "the base is stored as nf4 by this package")
    if entry and str(entry.value).lower() in ("4", "true"):
        translation.change([entry.path], "model.lora.quantize_base", "nf4", "4 bits a weight")
        if "train.strategy" not in translation.settings:
            translation.assume("train.strategy", "fsdp", "a quantized base works with ddp, fsdp and hsdp")
    elif entry and is_on(entry.value):
        translation.refuse(entry.path, "model.lora.quantize_base is nf4, 4 bits a weight")
    elif entry:
        translation.drop(entry.path, "off, as here")
    if kind:
        is_nf4 = str(kind.value).lower() == "nf4"
        translation.drop(kind.path, "nf4, as here") if is_nf4 else translation.refuse(kind.path, "it is nf4 here")


def _frozen_parts(concepts: Concepts) -> None:
    translation = concepts.translation
    entries = {part: concepts.take(name) for name, part in PARTS.items()}
    only = concepts.take("train_projector_only")
    if only and is_on(only.value):
        translation.change([only.path], "model.freeze", ["tower", "language_model"], "the projector alone is trained")
        for entry in filter(None, entries.values()):
            translation.drop(entry.path, f"{only.name} decides it")
        return
    if only:
        translation.drop(only.path, "off")
    is_llama_factory = concepts.defaults.get("method") == "lora"
    frozen = {
        "tower": not concepts.defaults.get("trains_tower"),
        "projector": is_llama_factory,
        "language_model": False,
    }
    frozen |= {part: is_on(entry.value) for part, entry in entries.items() if entry}
    has_adapters = any(field.startswith("model.lora.") for field in translation.settings)
    if has_adapters:  # adapters are in the language model alone; other parts would be trained whole
        frozen |= {"tower": True, "projector": True}
    parts = [
        part for part, is_frozen in frozen.items() if is_frozen and not (has_adapters and part == "language_model")
    ]
    paths = [entry.path for entry in entries.values() if entry]
    reason = "adapters alone are trained, in the language model" if has_adapters else ""
    if paths:
        translation.change(paths, "model.freeze", parts, reason or "the frozen parts in one list")
    elif has_adapters or concepts.defaults.get("micro_batch"):
        translation.assume("model.freeze", parts, reason or concepts.by_default("which parts are frozen"))
    if "tower" not in parts:
        translation.assume("features.cache", "off", "the tower is trained, so its output changes")


def _length(concepts: Concepts) -> None:
    translation = concepts.translation
    length, entry = concepts.count("length"), concepts.take("length")
    if length and entry:
        translation.express(entry.path, "data.sequence_length", length)
    elif default := concepts.defaults.get("length"):
        translation.assume("data.sequence_length", default, concepts.by_default(str(default)))
    else:
        translation.assume("data.sequence_length", EXAMPLE_LENGTH, "not in the file: an example")
    for name in ("truncation", "excess"):
        if entry := concepts.take(name):
            policy = {"keep_start": "truncate", "truncate": "truncate", "drop": "reject"}.get(str(entry.value))
            if policy:
                translation.change([entry.path], "data.overlong_policy", policy, f"{entry.value} there")
            else:
                translation.refuse(entry.path, "data.overlong_policy is reject, truncate or split")
    if concepts.defaults.get("length"):
        translation.assume("data.overlong_policy", "truncate", concepts.by_default("longer samples are cut"))


def _data(concepts: Concepts) -> None:
    translation = concepts.translation
    entry = concepts.take("data")
    if entry and isinstance(entry.value, str) and entry.value:
        place = re.sub(r"^/gcs/", "gs://", entry.value)
        if place == entry.value:
            translation.express(entry.path, "data.source", place)
        else:
            translation.change([entry.path], "data.source", place, "the bucket itself: jobs need no mounted folder")
    for name in ("dataset", "datasets"):
        if entry := concepts.take(name):
            fetch = "vlmpipe data fetch NAME brings a data set of the hub; data.source then names its files"
            for leaf in translation.ledger.below(entry.path):
                translation.refuse(leaf, fetch)
    translation.assume("data.source", EXAMPLE_SOURCE, "not in the file: an example; put in your own")
    if samples := concepts.take("max_samples"):
        count, sets = concepts.count("max_samples"), concepts.take("dataset")
        number_of_sets = str(sets.value).count(",") + 1 if sets and concepts.defaults.get("method") else 1
        if count and number_of_sets > 1:
            reason = f"{count} of each of {number_of_sets} data sets there"
            translation.change([samples.path], "data.max_samples", count * number_of_sets, reason)
        elif count:
            translation.express(samples.path, "data.max_samples", count)
    if duplicates := concepts.take("duplicates"):
        policy = "drop" if is_on(duplicates.value) else "keep"
        translation.change([duplicates.path], "data.duplicates", policy, f"{duplicates.value} there")
    if share := concepts.take("validation"):
        value = number(share.value)
        if value is not None and 0 < value < 1:
            translation.express(share.path, "data.validation_fraction", value)
        elif value is not None and value >= 1:
            translation.refuse(share.path, "data.validation_fraction is a share of the data, not a number of samples")
        else:
            reason = "a run is evaluated on a validation split: 0.01 of the data"
            translation.change([share.path], "data.validation_fraction", 0.01, reason)


def _objective(concepts: Concepts) -> None:
    translation, entry = concepts.translation, concepts.take("stage")
    if entry:
        objective = STAGES.get(str(entry.value).lower(), "")
        if objective:
            translation.express(entry.path, "train.objective", objective)
        else:
            translation.refuse(entry.path, "the objectives are sft, dpo and simpo")
    objective = translation.settings["train.objective"].value if "train.objective" in translation.settings else "sft"
    if loss := concepts.take("loss"):
        names = {"sigmoid": "dpo", "simpo": "simpo", "nll": "sft"}
        expected = names.get(str(loss.value).lower())
        if (expected == "simpo" and objective == "dpo") or (expected and not entry):
            translation.change([loss.path], "train.objective", expected, f"the loss {loss.value} there")
            objective = expected
        elif expected == objective:
            translation.drop(loss.path, f"the loss of {objective}")
        else:
            translation.refuse(loss.path, f"the loss is that of train.objective {objective}")
    for concept, field in (("beta", f"train.{objective}_beta"), ("simpo_gamma", "train.simpo_gamma")):
        value, entry = concepts.number(concept), concepts.take(concept)
        if value is None or entry is None:
            continue
        if objective == "sft" and "train.objective" not in translation.settings:
            translation.refuse(entry.path, "no objective is said: train.objective dpo or simpo takes it")
        elif objective == "sft" or (concept == "simpo_gamma" and objective != "simpo"):
            translation.drop(entry.path, f"it belongs to another objective than {objective}")
        else:
            translation.express(entry.path, field, value)


def _tracking(concepts: Concepts) -> None:
    translation, entry = concepts.translation, concepts.take("trackers")
    if entry:
        reason = (
            "metrics.jsonl and TensorBoard files are always written; train.wandb.project and train.mlflow name others"
        )
        translation.drop(entry.path, reason)
    if name := concepts.take("name"):
        _take_name(concepts, name)
    for concept in ("compile", "compile_backend"):
        if entry := concepts.take(concept):
            if concept == "compile":
                translation.change(
                    [entry.path], "train.compile", "on" if is_on(entry.value) else "off", f"{entry.value} there"
                )
            elif str(entry.value).lower() in ("inductor", "aot_eager"):
                translation.express(entry.path, "train.compile_backend", str(entry.value).lower())
            else:
                translation.drop(entry.path, "train.compile auto decides it") if not is_on(entry.value) else (
                    translation.refuse(entry.path, "train.compile_backend is inductor or aot_eager")
                )
    if output := concepts.take("output"):
        place = str(output.value)
        if place.startswith(("gs://", "s3://")):
            reason = "runs get folders of their own below it"
            translation.change([output.path], "output.root_uri", place.rstrip("/"), reason)
        else:
            translation.drop(output.path, "each run has a folder of its own below output.root_uri")


def _take_name(concepts: Concepts, entry: Entry) -> None:
    name = run_name(str(entry.value))
    if name == entry.value:
        concepts.translation.express(entry.path, "name", name)
    else:
        concepts.translation.change([entry.path], "name", name, "lower case, digits and dashes")


def run_name(text: str) -> str:
    """A name of the form that run files need."""
    words = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:50].strip("-")
    return words if len(words) > 3 and words[0].isalpha() else f"run-{words}".strip("-") if words else "imported"
