"""Strategies of distributed training in other programs' words, as `train.strategy` and its neighbours."""

from __future__ import annotations

from collections.abc import Mapping

from vlmpipe.importing.findings import path_text
from vlmpipe.importing.settings.concepts import Concepts, Entry, is_on
from vlmpipe.importing.translation import Setting, Translation

# FSDP's words, also as the numbers 1 to 5 of accelerate -> strategy.
FSDP = {
    "full_shard": "fsdp", "1": "fsdp", "shard_grad_op": "zero2", "2": "zero2", "no_shard": "ddp", "3": "ddp",
    "hybrid_shard": "hsdp", "4": "hsdp", "hybrid_shard_zero2": "hsdp", "_hybrid_shard_zero2": "hsdp", "5": "hsdp",
}  # fmt: skip
FSDP_OPTIONS = {
    "auto_wrap": "layers are FSDP's units",
    "transformer_layer_cls_to_wrap": "layers are FSDP's units",
    "auto_wrap_policy": "layers are FSDP's units",
    "min_num_params": "layers are FSDP's units, which suit every size",
    "fsdp_min_num_params": "layers are FSDP's units, which suit every size",
    "backward_prefetch": "train.prefetch_layers is the number of layers ahead",
    "forward_prefetch": "train.prefetch_layers is the number of layers ahead",
    "use_orig_params": "FSDP2 always has the original parameters",
    "sync_module_states": "weights are read shard by shard",
    "cpu_ram_efficient_loading": "weights are read shard by shard",
    "limit_all_gathers": "FSDP2 needs no limit",
    "state_dict_type": "every rank saves its shard; the export is a whole model",
    "final_state_dict_type": "every rank saves its shard; the export is a whole model",
    "fsdp_version": "it is always FSDP2",
    "version": "it is always FSDP2",
    "cpu_offload_pin_memory": "offloaded state is always in pinned memory",
    "mixed_precision_policy": "train.precision decides the number types",
    "xla": "TPUs are not supported",
}
STAGES = {0: "ddp", 1: "zero1", 2: "zero2", 3: "zero3"}


def translate_sharding(concepts: Concepts) -> None:
    """Turn the concepts of sharding, offloading and model parallelism into fields."""
    _deepspeed_file(concepts)
    _zero(concepts)
    _fsdp(concepts)
    _distributed_type(concepts)
    _degrees(concepts)


def _set_strategy(translation: Translation, entry: Entry, strategy: str, reason: str) -> None:
    """The first word that says a strategy decides it."""
    if "train.strategy" in translation.settings:
        translation.drop(entry.path, f"train.strategy is {translation.settings['train.strategy'].value} already")
    else:
        translation.change([entry.path], "train.strategy", strategy, reason)


def _deepspeed_file(concepts: Concepts) -> None:
    entry = concepts.take("deepspeed")
    if entry is None:
        return
    translation, name = concepts.translation, str(entry.value).lower()
    stage = next((n for n in (3, 2, 1) if any(word in name for word in (f"zero{n}", f"zero_{n}", f"z{n}", f"stage{n}",
                                                                       f"zero-{n}", f"stage_{n}"))), None)  # fmt: skip
    if not is_on(entry.value):
        translation.drop(entry.path, "off")
    elif stage:
        reason = f"by the name of {entry.value}; vlmpipe import of that file takes the rest of it over"
        _set_strategy(translation, entry, STAGES[stage], reason)
        if "offload" in name:
            what = "optimizer+weights" if stage == 3 else "optimizer"  # only stage 3 has weights to offload
            translation.assume("train.offload", what, f"by the name of {entry.value}")
    else:
        reason = (
            f"settings of DeepSpeed are in {entry.value}: vlmpipe import of that file says its stage; zero2 is a guess"
        )
        _set_strategy(translation, entry, "zero2", reason)


def _zero(concepts: Concepts) -> None:
    translation = concepts.translation
    entry = concepts.take("zero_stage")
    if entry is not None:
        stage = int(str(entry.value)) if str(entry.value) in ("0", "1", "2", "3") else None
        if stage is None:
            translation.refuse(entry.path, "a stage is 0, 1, 2 or 3")
        else:
            _set_strategy(translation, entry, STAGES[stage], f"ZeRO stage {stage}" if stage else "no sharding")
    optimizer, weights = concepts.take("offload_optimizer"), concepts.take("offload_weights")
    devices = {name: str(entry.value).lower() for name, entry in (("o", optimizer), ("w", weights)) if entry}
    moved = [name for name, device in devices.items() if device in ("cpu", "nvme", "true")]
    value = "optimizer+weights" if "w" in moved else "optimizer"
    for name, entry in (("o", optimizer), ("w", weights)):
        if entry is None:
            continue
        if name not in moved:
            translation.drop(entry.path, "nothing is offloaded, as here")
        elif devices[name] == "nvme":
            reason = "state is kept in host memory: no state lies on a disk"
            translation.change([entry.path], "train.offload", value, reason)
        elif value == "optimizer+weights" and len(moved) < 2:
            translation.change([entry.path], "train.offload", value, "weights are offloaded together with their state")
        else:
            translation.change([entry.path], "train.offload", value, f"{path_text(entry.path)} {entry.value}")


def _fsdp(concepts: Concepts) -> None:
    translation = concepts.translation
    sharding = concepts.take("sharding")
    if sharding:
        _fsdp_word(translation, sharding)
    if entry := concepts.take("fsdp"):
        words = entry.value if isinstance(entry.value, list) else str(entry.value).split()
        strategy = next((FSDP[str(word).lower()] for word in words if str(word).lower() in FSDP), "")
        if not is_on(entry.value):
            translation.drop(entry.path, "off")
        else:
            _set_strategy(translation, entry, strategy or "fsdp", f"{entry.value} there")
            if "offload" in [str(word).lower() for word in words]:
                translation.assume("train.offload", "optimizer+weights", "offload there")
    if options := concepts.take("fsdp_options"):
        for leaf in translation.ledger.below(options.path):
            _fsdp_option(translation, Entry(leaf, translation.value(leaf)))
    if offload := concepts.take("fsdp_offload"):
        _fsdp_offload(translation, offload)
    if reshard := concepts.take("reshard"):
        _reshard(translation, reshard)
    if replicate := concepts.take("replicate"):
        if str(replicate.value) == "1":
            translation.drop(replicate.path, "one copy of the weights, as fsdp has")
        else:
            _set_strategy(translation, replicate, "hsdp", "shards within a node, copies between nodes")


def _fsdp_word(translation: Translation, entry: Entry) -> None:
    strategy = FSDP.get(str(entry.value).lower())
    if strategy is None:
        translation.refuse(entry.path, "FSDP shards as fsdp, or within nodes as hsdp")
        return
    reasons = {
        "zero2": "optimizer state and gradients are sharded, weights are not",
        "hsdp": "shards within a node, copies between nodes",
        "fsdp": "weights, gradients and optimizer state are sharded",
        "ddp": "nothing is sharded",
    }
    _set_strategy(translation, entry, strategy, f"{entry.value} there: {reasons[strategy]}")


def _fsdp_option(translation: Translation, entry: Entry) -> None:
    name = entry.name.removeprefix("fsdp_")
    if name == "sharding_strategy":
        _fsdp_word(translation, entry)
    elif name in ("offload_params", "cpu_offload"):
        _fsdp_offload(translation, entry)
    elif name == "activation_checkpointing":
        value = "full" if is_on(entry.value) else "none"
        translation.change([entry.path], "train.activation_checkpointing", value, f"{entry.value} there")
    elif name == "reshard_after_forward":
        _reshard(translation, entry)
    elif name in FSDP_OPTIONS or entry.name in FSDP_OPTIONS:
        translation.drop(entry.path, FSDP_OPTIONS.get(name) or FSDP_OPTIONS[entry.name])


def _fsdp_offload(translation: Translation, entry: Entry) -> None:
    if is_on(entry.value):
        translation.change([entry.path], "train.offload", "optimizer+weights", "weights and state in host memory")
    else:
        translation.drop(entry.path, "nothing is offloaded, as here")


def _reshard(translation: Translation, entry: Entry) -> None:
    if str(entry.value).lower() in FSDP:  # of FSDP1's words in FSDP2's key
        _fsdp_word(translation, entry)
    elif is_on(entry.value):
        translation.drop(entry.path, "train.reshard_after_forward auto frees the weights of layers")
    else:
        translation.change([entry.path], "train.reshard_after_forward", "never", "gathered weights are kept there")


def _distributed_type(concepts: Concepts) -> None:
    translation, entry = concepts.translation, concepts.take("distributed")
    if entry is None:
        return
    name = str(entry.value).upper()
    if name == "DEEPSPEED":
        _set_strategy(translation, entry, "zero2", "DeepSpeed without a stage: its default there is 2")
    elif name == "FSDP":
        _set_strategy(translation, entry, "fsdp", "FSDP there")
    elif name in ("MULTI_GPU", "NO", "MULTI_CPU"):
        _set_strategy(translation, entry, "ddp", f"{entry.value} there")
    else:
        translation.refuse(entry.path, "the strategies are those of train.strategy")


def _degrees(concepts: Concepts) -> None:
    translation = concepts.translation
    degrees: dict[str, int] = {}
    for name in ("tensor_parallel", "pipeline_parallel", "context_parallel"):
        degree, entry = concepts.count(name), concepts.take(name)
        if degree is None or entry is None:
            continue
        if degree == 1:
            translation.drop(entry.path, "1 splits nothing")
        else:
            degrees[name] = degree
            translation.express(entry.path, f"train.{name}", degree)
    if "context_parallel" in degrees and len(degrees) > 1:
        del degrees["context_parallel"], translation.settings["train.context_parallel"]
        reason = "context_parallel works with ddp, fsdp and hsdp, not with layers that are split"
        translation.ledger.refuse_field("train.context_parallel", reason)
    strategy, chosen = _model_parallel(degrees), translation.settings.get("train.strategy")
    if strategy and chosen and chosen.value != "fsdp":
        for name in degrees.keys() - {"context_parallel"}:
            translation.settings.pop(f"train.{name}")
            translation.ledger.refuse_field(
                f"train.{name}", f"strategy {chosen.value} splits no layers; tp, pp and tp+pp+dp do"
            )
    elif strategy:
        translation.settings["train.strategy"] = Setting(strategy, "what the degrees of parallelism say", is_given=True)


def _model_parallel(degrees: Mapping[str, int]) -> str:
    if "pipeline_parallel" in degrees:
        return "tp+pp+dp" if "tensor_parallel" in degrees else "pp"
    return "tp" if "tensor_parallel" in degrees else ""
