"""Qwen2.5-VL on Megatron-core: its language model in tensor-parallel shards, its vision tower whole everywhere."""

from __future__ import annotations

import contextlib
from pathlib import Path

import torch
import torch.distributed as dist
from layout import Layout, transformer_config
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
from megatron.core.transformer import MegatronModule
from transformers import AutoConfig, AutoModelForImageTextToText
from weights import HEAD, LANGUAGE, Tensors, join, shard

NO_LABEL = -100
VISION = "model.visual."


def allow_cpus() -> None:
    """A test bench: Megatron-core asks for the current CUDA device and its random states, needed or not."""
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
    CudaRNGStatesTracker.fork = lambda *_, **__: contextlib.nullcontext()


class VisionLanguageModel(MegatronModule):
    """The summed loss of a micro-batch."""

    def __init__(self, source: Path, layout: Layout) -> None:
        self.hf = AutoConfig.from_pretrained(source, trust_remote_code=False)
        self.tied = bool(self.hf.tie_word_embeddings)
        config = transformer_config(self.hf.text_config, layout)
        super().__init__(config)
        whole = AutoModelForImageTextToText.from_pretrained(source, dtype=config.params_dtype, trust_remote_code=False)
        text = self.hf.text_config
        self.language = GPTModel(
            config,
            get_gpt_layer_local_spec(normalization="RMSNorm"),
            vocab_size=text.vocab_size,
            max_sequence_length=text.max_position_embeddings,
            position_embedding_type="mrope",
            rotary_base=text.rope_parameters["rope_theta"],
            share_embeddings_and_output_weights=self.tied,
        )
        self.language.load_state_dict(self.shard(whole.state_dict()), strict=False)
        self.visual = whole.model.visual
        whole.model.language_model = whole.lm_head = None  # its weights are in the shards
        self._whole = [whole.model]  # of which only methods are used; in a list, it is no module of this one

    def forward(self, batch: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
        """Loss of the label tokens, summed, and how many they are. Tensors as `Samples.batch` makes them."""
        ids, (qwen,) = batch["input_ids"], self._whole
        positions, _ = qwen.get_rope_index(
            ids, image_grid_thw=batch["image_grid_thw"], attention_mask=batch["attention_mask"],
            mm_token_type_ids=batch["mm_token_type_ids"],
        )  # fmt: skip
        embedded = self.language.embedding(input_ids=ids, position_ids=None)  # (tokens, samples, width)
        features = torch.cat(qwen.get_image_features(batch["pixel_values"], batch["image_grid_thw"]).pooler_output)
        at_image = (ids == self.hf.image_token_id).unsqueeze(-1).expand(-1, -1, embedded.shape[2])
        embedded = embedded.transpose(0, 1).masked_scatter(at_image, features.to(embedded.dtype)).transpose(0, 1)
        labels = torch.nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=NO_LABEL)
        counted = labels != NO_LABEL
        # Padding lies behind the samples: no token of theirs attends to it.
        later = torch.ones(2 * ids.shape[1:], dtype=torch.bool, device=ids.device).triu(1)[None, None]
        losses = self.language(
            None, positions, later, decoder_input=embedded.contiguous(), labels=labels.clamp(min=0)
        )  # fmt: skip
        return losses.float()[counted].sum(), counted.sum()

    def is_sharded(self, name: str) -> bool:
        """Whether a process has only a part of this parameter. (Megatron-core marks those only that it initializes.)"""
        return name.startswith("language.") and "layernorm" not in name

    def shard(self, whole: Tensors) -> Tensors:
        """This process's part of tensors with Hugging Face's names."""
        group = parallel_state.get_tensor_model_parallel_group()
        return shard(whole, self.hf.text_config, self.tied, group.size(), group.rank())

    def gather(self, mine: Tensors) -> Tensors:
        """Tensors of all parameters, named as they are here, by Hugging Face's names. Every process takes part."""
        group = parallel_state.get_tensor_model_parallel_group()
        shards: list[Tensors] = [{} for _ in range(group.size())]
        for name, tensor in mine.items():
            if name.startswith("language."):
                parts = [torch.empty_like(tensor) for _ in shards]
                dist.all_gather(parts, tensor.contiguous(), group=group)
                for one, part in zip(shards, parts, strict=True):
                    one[name.removeprefix("language.")] = part.cpu()
        whole = join(shards, self.hf.text_config, self.tied)
        seen = {name.removeprefix("visual."): one.cpu() for name, one in mine.items() if name.startswith("visual.")}
        return whole | {VISION + name: tensor for name, tensor in seen.items()}

    def scatter(self, whole: Tensors) -> Tensors:
        """What `gather` was given, for this process."""
        language = {f"language.{name}": one for name, one in self.shard(whole).items()}
        seen = {name.removeprefix(VISION): one for name, one in whole.items() if name.startswith(VISION)}
        return language | {f"visual.{name}": one for name, one in seen.items()}

    def save(self, whole: Tensors, folder: Path) -> None:
        """A Hugging Face folder of these weights."""
        with torch.device("meta"):
            model = AutoModelForImageTextToText.from_config(self.hf, dtype=self.config.params_dtype)
        weights = {name: tensor.to(self.config.params_dtype) for name, tensor in whole.items()}
        if self.tied:
            weights[HEAD] = weights[f"{LANGUAGE}embed_tokens.weight"]
        model.load_state_dict(weights, assign=True)
        model.save_pretrained(folder)
