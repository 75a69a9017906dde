"""Whether a model can be laid out over processes: layout.py RUN_FILE, before anything is submitted or started.

Megatron-core's own configuration classes judge what they know; what only shows in a running job is judged here.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from typing import Any

import torch
import yaml
from megatron.core.transformer import TransformerConfig
from transformers import AutoConfig

USAGE = 64  # exit code of a run file that has to be changed
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Layout:
    """How many processes there are, and what each is given."""

    processes: int
    tensor_parallel: int
    batch: int  # samples of all processes in a step
    micro_batch: int  # samples of a group of tensor-parallel processes at once
    precision: str = "fp32"

    @property
    def data_parallel(self) -> int:
        return self.processes // self.tensor_parallel

    @property
    def micro_batches(self) -> int:
        """Of a step, for each group of tensor-parallel processes."""
        return self.batch // (self.data_parallel * self.micro_batch)


def transformer_config(text: Any, layout: Layout) -> TransformerConfig:
    """Megatron-core's configuration of a Qwen2.5 language model. Raises ValueError or AssertionError for a bad one."""
    return TransformerConfig(
        tensor_model_parallel_size=layout.tensor_parallel,
        num_layers=text.num_hidden_layers,
        hidden_size=text.hidden_size,
        ffn_hidden_size=text.intermediate_size,
        num_attention_heads=text.num_attention_heads,
        num_query_groups=text.num_key_value_heads,
        normalization="RMSNorm",
        layernorm_epsilon=text.rms_norm_eps,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        add_qkv_bias=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        mrope_section=text.rope_parameters["mrope_section"],
        params_dtype=DTYPES[layout.precision],
        bf16=layout.precision == "bf16",
        calculate_per_token_loss=True,  # gradients are sums, divided by the label tokens of the whole step
        use_cpu_initialization=True,
        perform_initialization=False,
        apply_rope_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
    )


def problems(model: Any, layout: Layout) -> list[str]:
    """Sentences about what does not fit; empty for a layout that can be trained. `model` is a Hugging Face config."""
    found, text, split = [], model.text_config, layout.tensor_parallel
    if layout.precision not in DTYPES:
        return [f"train.precision is {layout.precision}: this recipe trains in fp32 or bf16"]
    try:
        transformer_config(text, layout)
    except (ValueError, AssertionError) as error:
        found.append(f"Megatron-core refuses the model at --tensor-parallel {split}: {error}")
    for what, size in (("vocab_size", text.vocab_size), ("intermediate_size", text.intermediate_size)):
        if size % split:
            found.append(f"{what} {size} cannot be split over {split} tensor-parallel processes")
    if layout.processes % split:
        found.append(f"{layout.processes} processes cannot be grouped into {split} tensor-parallel ones each")
    elif layout.batch % (layout.data_parallel * layout.micro_batch):
        found.append(
            f"a global batch of {layout.batch} samples cannot be split into micro-batches of {layout.micro_batch} "
            f"for each of {layout.data_parallel} groups"
        )
    return found


def of_run_file(run: dict[str, Any]) -> Layout:
    train, cluster = run["train"], run["cluster"]
    each = cluster.get("accelerator_count") or cluster.get("processes_per_replica", 1)
    command = train["trainer"]["command"]
    split = int(command[command.index("--tensor-parallel") + 1]) if "--tensor-parallel" in command else 1
    return Layout(
        cluster.get("replica_count", 1) * each, split, train["global_batch_size"], train["micro_batch_size"],
        train.get("precision", "bf16"),
    )  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run_file")
    parser.add_argument(
        "--model", help="folder with the model's config.json, or hub id; default: the run file's weights"
    )
    given = parser.parse_args()
    with open(given.run_file, encoding="utf-8") as file:
        run = yaml.safe_load(file)
    source, layout = given.model or run["model"]["pretrained"]["weights"], of_run_file(run)
    try:
        model = AutoConfig.from_pretrained(source, trust_remote_code=False)
    except OSError as error:
        print(f"layout.py: the model's config.json cannot be read: {error}", file=sys.stderr)
        return USAGE
    found = problems(model, layout)
    for problem in found:
        print(f"layout.py: {problem}", file=sys.stderr)
    if not found:
        split = layout.tensor_parallel
        print(
            f"{layout.processes} processes: {layout.data_parallel} data-parallel x {split} tensor-parallel, "
            f"{layout.micro_batches} micro-batches of {layout.micro_batch}"
        )
    return USAGE if found else 0


if __name__ == "__main__":
    sys.exit(main())
