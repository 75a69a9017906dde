"""Batch, steps, learning rate, optimizer and precision of other training programs, as fields of `train`."""

from __future__ import annotations

import math

from vlmpipe.importing.cluster import gpu_takes_bf16, ranks
from vlmpipe.importing.settings.concepts import Concepts, Entry, is_on, number

# Names of schedules -> ours, and what differs.
SCHEDULES = {
    "cosine": ("cosine", ""),
    "linear": ("linear", ""),
    "constant": ("constant", ""),
    "constant_with_warmup": ("constant", "constant after the warm-up"),
    "cosine_with_min_lr": ("cosine", "cosine to the least rate"),
    "cosine_warmup_with_min_lr": ("cosine", "cosine to the least rate"),
    "cosine_with_restarts": ("cosine", "one fall of the learning rate, without restarts"),
    "polynomial": ("linear", "of power 1, which is linear"),
    "warmup_stable_decay": ("wsd", "the peak is held, and the rate falls at the end"),
    "warmuplr": ("constant", "constant after the warm-up, which is linear here and by default logarithmic there"),
    "warmupdecaylr": ("linear", "linear to 0 after the warm-up, which is linear here and by default logarithmic there"),
    "warmupcosinelr": ("cosine", "cosine after the warm-up"),
}
ADAMW = ("adamw", "adam", "adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused", "fusedadam", "fused_adam",
         "deepspeedcpuadam", "torchadamw")  # fmt: skip
ADAMW_8_BIT = ("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit", "adamw_torch_8bit", "ao_adamw_8bit")
ADAMW_PAGED = ("paged_adamw", "paged_adamw_32bit", "adamw_torch_xla", "adamw_anyprecision")
SAMPLES = (
    "samples there: data.pack false keeps a sample to a sequence; with pack true a sequence holds several, trains "
    "faster, and a smaller number gives the same batch"
)
EXAMPLE_MICRO_BATCH, EXAMPLE_PASSES, EXAMPLE_RATE = 4, 2, 1e-5


def translate_training(concepts: Concepts) -> None:
    """Turn the concepts of training into fields. The ranks must be known before."""
    _batch(concepts)
    _steps(concepts)
    _rate(concepts)
    _schedule(concepts)
    _optimizer(concepts)
    _precision(concepts)
    _checkpointing(concepts)


def _batch(concepts: Concepts) -> None:
    """per-device batch x accumulation x data-parallel ranks = samples of a step."""
    translation = concepts.translation
    total, micro, accumulation = (concepts.count(name) for name in ("global_batch", "micro_batch", "accumulation"))
    names = ("global_batch", "micro_batch", "accumulation")
    paths = {name: [concepts.entries[name].path] for name in names if concepts.take(name)}
    processes = ranks(translation)
    is_packed = concepts.is_on("packing")
    if packing := concepts.take("packing"):
        translation.express(packing.path, "data.pack", is_packed)
    has_any = total or micro or accumulation
    if not has_any and concepts.defaults.get("micro_batch") is None:
        batch = EXAMPLE_MICRO_BATCH * EXAMPLE_PASSES * processes
        translation.assume("train.global_batch_size", batch, "not in the file: an example")
        translation.assume("train.micro_batch_size", EXAMPLE_MICRO_BATCH, "not in the file: an example")
        return
    if not is_packed and not packing:
        translation.assume(
            "data.pack", False, "a sample to a sequence, as in the file; true packs several, and is faster"
        )
    is_named = micro is not None
    if not is_named and total and accumulation and not concepts.defaults.get("micro_batch"):
        micro = total // processes // accumulation or 1
    micro = micro or int(concepts.defaults.get("micro_batch") or 1)
    if of_a_rank := concepts.count("rank_batch"):
        paths["rank_batch"] = [concepts.entries["rank_batch"].path]
        accumulation = max(1, of_a_rank // micro)
    if total and total < micro * processes:
        micro = max(1, total // processes)
        is_named = False
    parts = [f"{micro} samples a rank", f"{processes} ranks"]
    if total is None:
        passes = accumulation or int(concepts.defaults.get("accumulation") or 1)
        total = micro * passes * processes
        parts.insert(1, f"{passes} passes")
        reason = f"{' x '.join(parts)}"
    else:
        passes = max(1, total // (micro * processes))
        exact = micro * passes * processes
        reason = f"{total} there, {passes} passes of {micro} on {processes} ranks"
        if exact != total:
            reason = f"{total} is no multiple of {micro} x {processes} ranks; {exact} is"
        if accumulation and accumulation != passes:
            reason = f"{reason}; gradient accumulation {accumulation} there is for another number of ranks"
        total = exact
    reason = reason if is_packed else f"{reason}; {SAMPLES}"
    translation.change(
        [path for name in ("global_batch", "accumulation", "rank_batch") for path in paths.get(name, [])],
        "train.global_batch_size", total, reason,
    )  # fmt: skip
    entry = concepts.take("micro_batch")
    if is_named and entry and micro == number(entry.value):
        translation.express(entry.path, "train.micro_batch_size", micro)
    elif entry and "micro_batch" in paths:
        translation.change([entry.path], "train.micro_batch_size", micro, f"what {total} leaves to each of the ranks")
    else:
        why = (
            concepts.by_default(str(micro))
            if concepts.defaults.get("micro_batch")
            else "not in the file: more fill the GPU better, if vlmpipe plan says that they fit"
        )
        translation.assume("train.micro_batch_size", micro, why)


def _steps(concepts: Concepts) -> None:
    translation = concepts.translation
    epochs = concepts.number("epochs")
    if epochs is not None and (entry := concepts.take("epochs")):
        whole = max(1, math.ceil(epochs))
        if whole == epochs:
            translation.express(entry.path, "train.epochs", whole)
        else:
            translation.change([entry.path], "train.epochs", whole, f"whole passes over the data; {epochs:g} there")
    elif (default := concepts.defaults.get("epochs")) and not concepts.is_on("max_steps"):
        translation.assume("train.epochs", int(default), concepts.by_default(str(default)))
    steps = concepts.number("max_steps")
    if steps is not None and (entry := concepts.take("max_steps")):
        if steps >= 1:
            translation.express(entry.path, "train.max_steps", int(steps))
            if (passes := concepts.take("epochs")) and concepts.defaults.get("epochs"):
                translation.drop(passes.path, "max_steps decides the length there, also beyond these epochs")
                translation.settings.pop("train.epochs", None)
            if epochs is None or concepts.defaults.get("epochs"):
                translation.assume("train.epochs", 1000, "train.max_steps ends training, in any epoch")
        else:
            translation.drop(entry.path, "the epochs decide the number of steps")
    for concept, field in (
        ("log_steps", "train.log_every_steps"),
        ("save_steps", "train.checkpoint_every_steps"),
        ("eval_steps", "train.validate_every_steps"),
        ("keep", "train.keep_checkpoints"),
    ):
        _interval(concepts, concept, field)
    for concept, steps_concept in (("eval_strategy", "eval_steps"), ("save_strategy", "save_steps")):
        if entry := concepts.take(concept):
            text = str(entry.value).lower()
            if text in ("steps", "no"):
                done = "checkpoints are always written" if text == "no" and concept == "save_strategy" else ""
                translation.drop(entry.path, done or f"{steps_concept.replace('_', ' ')} decide it")
            else:
                translation.refuse(entry.path, "intervals count optimizer steps, not epochs")


def _interval(concepts: Concepts, concept: str, field: str) -> None:
    value = concepts.number(concept)
    entry = concepts.take(concept)
    if value is None or entry is None:
        return
    if value >= 1 and value == int(value):
        concepts.translation.express(entry.path, field, int(value))
    elif 0 < value < 1:
        concepts.translation.refuse(entry.path, f"a share of all steps; {field} counts steps")
    else:
        concepts.translation.drop(entry.path, "0 or less sets no interval")


def _rate(concepts: Concepts) -> None:
    rate = concepts.number("learning_rate")
    entry = concepts.take("learning_rate")
    if rate and entry:
        concepts.translation.express(entry.path, "train.optimizer.learning_rate", rate)
    elif default := _default_rate(concepts):
        concepts.translation.assume(
            "train.optimizer.learning_rate", float(default), concepts.by_default(f"{default:g}")
        )
    else:
        concepts.translation.assume("train.optimizer.learning_rate", EXAMPLE_RATE, "not in the file: an example")


def _default_rate(concepts: Concepts) -> float | None:
    """The program's learning rate, of preferences where it has another one for them."""
    stage, loss = concepts.take("stage"), concepts.take("loss")
    learns_preferences = (stage and stage.value != "sft") or (loss and loss.value in ("sigmoid", "simpo"))
    rate: float | None = concepts.defaults.get("learning_rate")
    return concepts.defaults.get("preference_rate") or rate if learns_preferences else rate


def _schedule(concepts: Concepts) -> None:
    translation = concepts.translation
    entry = concepts.take("schedule")
    name = str(entry.value).lower() if entry else ""
    if entry and name in SCHEDULES:
        schedule, differs = SCHEDULES[name]
        if name == schedule:
            translation.express(entry.path, "train.lr_schedule", schedule)
        else:
            translation.change([entry.path], "train.lr_schedule", schedule, f"{entry.value} there: {differs}")
    elif entry:
        translation.refuse(entry.path, f"the schedules are {', '.join(('cosine', 'linear', 'constant', 'wsd'))}")
    elif default := concepts.defaults.get("schedule"):
        translation.assume("train.lr_schedule", default, concepts.by_default(default))
    _final_rate(concepts)
    _warmup(concepts, ignores_warmup=name == "constant" and "betas" in concepts.defaults)


def _final_rate(concepts: Concepts) -> None:
    if entry := concepts.take("final_rate"):
        share = number(entry.value)
        if share is not None:
            concepts.translation.express(entry.path, "train.final_rate_fraction", share)
    arguments = concepts.take("schedule_arguments")
    if arguments is None:
        return
    for leaf in concepts.translation.ledger.below(arguments.path):
        name, value = leaf[-1], concepts.translation.value(leaf)
        share = number(value)
        if name == "min_lr_rate" and share is not None:
            concepts.translation.express(leaf, "train.final_rate_fraction", share)
        elif name == "min_lr" and share is not None and (rate := concepts.number("learning_rate")):
            reason = f"{value} of a peak of {rate:g}"
            concepts.translation.change([leaf], "train.final_rate_fraction", round(share / rate, 6), reason)
        elif not is_on(value):
            concepts.translation.drop(leaf, "off, as here")
        else:
            concepts.translation.refuse(leaf, "a schedule has its name, a warm-up and a final rate")


def _warmup(concepts: Concepts, *, ignores_warmup: bool) -> None:
    translation = concepts.translation
    ratio, steps = concepts.number("warmup_ratio"), concepts.number("warmup_steps")
    of_ratio, of_steps = concepts.take("warmup_ratio"), concepts.take("warmup_steps")
    if ignores_warmup:
        for entry in (of_ratio, of_steps):
            if entry:
                translation.drop(entry.path, "the schedule constant has no warm-up there")
        translation.assume("train.warmup_fraction", 0.0, "the schedule constant has no warm-up there")
        return
    if steps is not None and of_steps and 0 < steps < 1:  # transformers 5 takes a share here
        translation.change([of_steps.path], "train.warmup_fraction", steps, "a share of all steps, as there below 1")
    elif steps is not None and of_steps and steps >= 1:
        translation.express(of_steps.path, "train.warmup_steps", int(steps))
        if of_ratio:
            translation.drop(of_ratio.path, "warm-up steps come before the share there")
        return
    elif of_steps and steps is not None:
        translation.express(of_steps.path, "train.warmup_fraction", 0.0)
    if ratio is not None and of_ratio:
        translation.express(of_ratio.path, "train.warmup_fraction", ratio)
    elif concepts.defaults.get("warmup_steps") == 0:
        translation.assume("train.warmup_fraction", 0.0, concepts.by_default("no warm-up"))
    elif share := concepts.defaults.get("warmup_ratio"):
        translation.assume("train.warmup_fraction", float(share), concepts.by_default(str(share)))


def _optimizer(concepts: Concepts) -> None:
    translation = concepts.translation
    if entry := concepts.take("optimizer"):
        name = str(entry.value).lower()
        if name in ADAMW:
            reason = "" if name == "adamw" else f"{entry.value} there, which is AdamW"
            if reason:
                translation.change([entry.path], "train.optimizer.name", "adamw", reason)
            else:
                translation.express(entry.path, "train.optimizer.name", "adamw")
        elif name in ADAMW_8_BIT:
            translation.change([entry.path], "train.optimizer.name", "adamw_8bit", f"{entry.value} there")
            translation.assume("train.strategy", "fsdp", "adamw_8bit works with fsdp and hsdp")
        elif name in ADAMW_PAGED:
            translation.change(
                [entry.path],
                "train.optimizer.name",
                "adamw",
                f"{entry.value} there; train.offload keeps state in host memory",
            )
        else:
            translation.refuse(entry.path, "AdamW is the only optimizer: train.optimizer.name adamw or adamw_8bit")
    _betas(concepts)


def _betas(concepts: Concepts) -> None:
    translation, default = concepts.translation, concepts.defaults.get("betas")
    both = concepts.take("betas")
    if both:
        values = [number(value) for value in both.value] if isinstance(both.value, list) else []
        if len(values) == 2 and None not in values:
            translation.express(both.path, "train.optimizer.betas", values)
        return
    first, second = concepts.number("beta1"), concepts.number("beta2")
    entries = [entry for entry in (concepts.take("beta1"), concepts.take("beta2")) if entry]
    if entries:
        base = default or (0.9, 0.999)
        values = [base[0] if first is None else first, base[1] if second is None else second]
        translation.change(
            [entry.path for entry in entries], "train.optimizer.betas", values, "both decay rates in one list"
        )
    elif default:
        translation.assume("train.optimizer.betas", list(default), concepts.by_default(str(list(default))))


def _precision(concepts: Concepts) -> None:
    translation = concepts.translation
    bf16, fp16 = concepts.take("bf16"), concepts.take("fp16")
    mixed = concepts.take("mixed_precision")
    name = str(mixed.value).lower() if mixed else ""
    if mixed and name in ("bf16", "bfloat16", "bf16-mixed"):
        bf16, mixed = mixed, None
    elif mixed and name in ("fp16", "float16", "16", "16-mixed"):
        fp16, mixed = mixed, None
    if mixed:
        if name in ("no", "fp32", "float32", "none"):
            translation.express(mixed.path, "train.precision", "fp32")
        else:
            translation.refuse(mixed.path, "train.precision is bf16, bf16-autocast, fp16 or fp32")
    if fp16 and is_on(fp16.value) and fp16.value != "auto":
        _fp16(concepts, fp16)
        if bf16:
            translation.drop(bf16.path, "fp16 decides the precision")
        return
    if bf16 and (is_on(bf16.value) or bf16.value == "auto"):
        if gpu_takes_bf16(translation):
            translation.express(bf16.path, "train.precision", "bf16")
        else:
            reason = "the GPU has no bf16 products: fp16 there is autocast on fp32 weights"
            translation.change([bf16.path], "train.precision", "fp16", reason)
        if fp16:
            translation.drop(fp16.path, "bf16 decides the precision")
        return
    off = [entry for entry in (bf16, fp16) if entry]
    if bf16:  # fp16 alone is switched off where bf16 is a program's default
        reason = "neither bf16 nor fp16 there, which is fp32; bf16 is faster and takes less memory"
        translation.change([entry.path for entry in off], "train.precision", "fp32", reason)
        return
    for entry in off:
        translation.drop(entry.path, "off; train.precision decides the number type")
    translation.assume("train.precision", "bf16", "bf16 weights with fp32 masters: nothing else is said there")


def _fp16(concepts: Concepts, entry: Entry) -> None:
    translation = concepts.translation
    if gpu_takes_bf16(translation):
        reason = "fp16 there: bf16 has the range of fp32, needs no loss scaling, and is as fast on these GPUs"
        translation.change([entry.path], "train.precision", "bf16", reason)
    else:
        reason = "autocast on fp32 weights, with loss scaling: more memory than fp16 weights"
        translation.change([entry.path], "train.precision", "fp16", reason)


def _checkpointing(concepts: Concepts) -> None:
    translation = concepts.translation
    entry, off = concepts.take("checkpointing"), concepts.take("no_checkpointing")
    field = "train.activation_checkpointing"
    if off:
        is_off = is_on(off.value)
        translation.change([off.path], field, "none" if is_off else "full", "whether layers are recomputed")
        if entry:
            translation.drop(entry.path, f"{off.name} decides it")
        return
    if entry:
        value = "full" if is_on(entry.value) else "none"
        reason = "each layer is recomputed in the backward pass" if value == "full" else "no layer is recomputed"
        translation.change([entry.path], field, value, reason)
        if str(entry.value).startswith("offload"):
            translation.change(
                [entry.path], "train.activation_offloading", True, "the inputs of layers go to host memory"
            )
            translation.assume(field, "full", "what activation_offloading needs")
    elif concepts.defaults.get("checkpointing"):
        translation.assume(field, "full", concepts.by_default("layers are recomputed"))
    else:
        why = "not in the file: layers are recomputed, for the least memory; vlmpipe plan says whether none fits"
        translation.assume(field, "full", why)
