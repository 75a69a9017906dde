"""Files of published models other than weights and tokenizers, and their image tokens. Imports no torch."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING

from vlmpipe.trainer.config.model import IMAGE_TOKEN
from vlmpipe.trainer.config.weights.origin import WeightsConfig
from vlmpipe.trainer.storage.export_manifest import MARKER
from vlmpipe.trainer.storage.hub.client import readable_hub_errors, whole_snapshot
from vlmpipe.trainer.storage.model_folders import CONFIG, bucket_address, local_folder, revision_of
from vlmpipe.trainer.storage.regular_files import read_regular

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

SETTINGS = ["*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken"]
MAX_JSON_BYTES = 16 << 20


def image_token_in(tokenizer: PreTrainedTokenizerFast, published: str) -> str:
    """The tokenizer's image token, found as transformers' processors find it. published: that of the family."""
    named = getattr(tokenizer, "image_token", None)
    is_known = tokenizer.backend_tokenizer.token_to_id(published) is not None
    return str(named) if named else published if is_known else IMAGE_TOKEN


def model_file(part: WeightsConfig, name: str, *, weights: bool = True) -> Path | None:
    """A file of a published model on this machine, downloaded first if needed. None where there is no such file.

    Where the hub is not to be asked, what this machine does not have counts as absent. A hub that should answer and
    does not is a UserError, unless it said before that this commit has no such file. weights: whether the model's
    weights are needed too (`local_folder`).
    """
    from huggingface_hub import _CACHED_NO_EXIST, constants, hf_hub_download, try_to_load_from_cache
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    if folder := local_folder(part.weights, part.revision, weights=weights):
        return folder / name if (folder / name).is_file() else None
    revision = part.revision or None
    with readable_hub_errors(part.weights, part.revision, name):
        try:
            return Path(hf_hub_download(part.weights, name, revision=revision))
        except LocalEntryNotFoundError:
            is_absent = try_to_load_from_cache(part.weights, name, revision=revision) is _CACHED_NO_EXIST
            if not (constants.HF_HUB_OFFLINE or is_absent):
                raise
        except EntryNotFoundError:
            pass
    return None


def settings_folder(part: WeightsConfig) -> Path:
    """The folder with all settings and tokenizer files of a hub model at one commit, downloaded first if needed.

    For loaders of transformers: given a name, they take a failure of the hub as the absence of a file. Raises as
    `whole_snapshot`.
    """
    return whole_snapshot(part.weights, part.revision, SETTINGS, left_out=["*/*"])


def files_identity(part: WeightsConfig, name: str = CONFIG) -> str:
    """Revision or digest of a published model's files, whose address stays.

    The checksums of an export, the revision of a bucket's folder, the commit of a hub repository, or the times of a
    folder's files. name: a file that the model has.
    """
    if folder := local_folder(part.weights, part.revision):
        if (folder / MARKER).is_file():
            return hashlib.sha256(read_regular(folder / MARKER, MAX_JSON_BYTES)).hexdigest()
        return folder.name if bucket_address(part.weights) else revision_of(str(folder))
    path = model_file(part, name)
    return path.parent.name if path else ""


def published_json(part: WeightsConfig, name: str) -> dict[str, object]:
    """A JSON file of a published model or tokenizer; {} where there is none."""
    path = model_file(part, name, weights=False) if part.weights else None
    content = json.loads(read_regular(path, MAX_JSON_BYTES)) if path else {}
    return content if isinstance(content, dict) else {}


def stop_token_ids(part: WeightsConfig) -> list[int]:
    """The tokens at which a published model stops, beside its tokenizer's end token."""
    stops = published_json(part, "generation_config.json").get("eos_token_id")
    return stops if isinstance(stops, list) else [stops] if isinstance(stops, int) else []
