"""Log probabilities of pairs' answers under the model that preference training starts from, computed once.

`references/<key>/<split>.npy` holds them in the order of the split, (samples, 2), and `<split>.json`, written last, its
checksum. The key covers model section, frozen weights, files of the others, precision and prepared data.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
from collections.abc import Iterator, Mapping
from functools import partial

import numpy as np
import torch.distributed as dist

from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.config.weights.origin import WeightsConfig
from vlmpipe.trainer.data.loader import Float32Array, PackedLoader
from vlmpipe.trainer.data.sample import SPLITS, Split
from vlmpipe.trainer.data.sampler import PackedBatchSampler
from vlmpipe.trainer.data.shards.index import Index, SplitIndex
from vlmpipe.trainer.dataloading.batches import collate
from vlmpipe.trainer.distributed.agreement import on_first
from vlmpipe.trainer.distributed.process import ProcessContext
from vlmpipe.trainer.errors import ConfigError, DataError
from vlmpipe.trainer.features.before_training import BeforeTraining
from vlmpipe.trainer.models.hf_native import peft_folder
from vlmpipe.trainer.models.published import files_identity
from vlmpipe.trainer.progress import Progress
from vlmpipe.trainer.storage import open_storage
from vlmpipe.trainer.storage.base import crc32c_of, join_uri
from vlmpipe.trainer.storage.outage import patiently, warned
from vlmpipe.trainer.storage.records import read_record, write_record

POINTER = "references.json"  # in a run: where its references are
PART, PARTS = ".part", 20  # after a split's name: those that are known so far; of a whole pass
ENDS = (".json", ".npy")  # of a split's files, in the order of deletion


class ReferenceLogProbs:
    """The references of a run, found or computed. Use it before a checkpoint is loaded: the strategy's weights are then
    those that training starts from."""

    def __init__(self, run: BeforeTraining) -> None:
        self._job, self._strategy, self._chat, self._reader = run.job, run.strategy, run.chat, run.samples
        self._image_source, self._replica = run.images, run.replica
        self._key = {
            "model": run.record.model_sha256,
            "frozen": [run.record.tower_sha256, run.record.frozen_sha256],
            "precision": run.job.train.precision,
            "prepared": run.job.pointers().prepared_uri.rstrip("/").rpartition("/")[2],
        }

    def find(self, index: Index, worker: ProcessContext) -> Float32Array:
        """References of the training split; computes those of every split that are not stored yet. Collective.

        Raises ConfigError where the run began with other references and is to continue.
        """
        uri, log_probs = on_first(worker, partial(uri_of, self._job, self._key)), dict[Split, Float32Array]()
        for split in SPLITS:
            stored = on_first(worker, partial(read_references, uri, split))
            log_probs[split] = self._compute(uri, index.split(split), worker) if stored is None else stored
            if worker.is_first and stored is None:
                limit_s = self._job.checkpoint.max_s_without_commit
                patiently("writing references", partial(_write, uri, split, log_probs[split]), limit_s=limit_s)
                print(f"train: references of {len(log_probs[split])} pairs ({split}) computed: {uri}", flush=True)
        if worker.is_first:
            write_record(open_storage(self._job.run.run_uri), POINTER, {"uri": uri})
        return log_probs["train"]

    def _compute(self, uri: str, split: SplitIndex, worker: ProcessContext) -> Float32Array:
        """Compute the log probabilities, continuing an interrupted attempt, also one with another number of ranks."""
        progress = Progress(self._job.run.run_uri, "train") if worker.is_first else None
        part = f"{split.name}{PART}"
        begun = on_first(worker, partial(_read_part, uri, part))
        references = np.full((len(split), 2), np.nan, np.float32) if begun is None else begun
        for is_last, shares in self._of_rank(split, references.copy()):
            everyone: list[dict[int, list[float]]] = [{}] * worker.world_size
            dist.all_gather_object(everyone, shares)
            for number, values in (pair for of_rank in everyone for pair in of_rank.items()):
                references[number] = values
            if progress:
                done = len(split) - int(np.isnan(references[:, 0]).sum())
                progress.update(done, len(split), unit="pairs", message=f"references ({split.name})")
                if not is_last:
                    with warned("writing a part of the references"):  # only what is computed again is lost
                        _write(uri, part, references)
        if progress:
            progress.flush()
            for end in ENDS:
                open_storage(uri).delete(f"{part}{end}")
        assert not np.isnan(references).any(), "a pair that no rank has packed"
        return references

    def _of_rank(self, split: SplitIndex, known: Float32Array) -> Iterator[tuple[bool, dict[int, list[float]]]]:
        """Log probabilities of pairs in this rank's packed sequences, by number and in parts of the whole; and whether
        a part is the last. Steps in which all ranks' pairs are known are passed over."""
        size = self._job.train.micro_batch_size
        sampler = PackedBatchSampler(
            split,
            self._job.data,
            seed=0,
            global_batch_size=size * self._replica.count,
            in_pairs=True,
            prefixes=split.prefix_groups(0) if self._job.data.share_prefix == "on" and len(split) else None,
        )
        loader = PackedLoader(split, sampler, self._chat, self._reader, images=self._replica.takes_images)
        steps, by_number = sampler.num_steps(1) if len(split) else 0, dict[int, list[float]]()
        for step in range(steps):
            if np.isnan(known[sampler.members(sampler.batch(step))]).any():
                rows = loader.sequences_for_step(step, self._replica.index, self._replica.count)
                log_probs = self._strategy.forward_loss(collate(rows, self._image_source))
                numbers = [split.ids.index(identity) for row in rows for identity in row.sample_ids]
                if numbers:  # in the last step a rank may have padding alone, of which the pass gives a loss of 0
                    by_number |= dict(zip(numbers, log_probs.view(-1, 2).tolist(), strict=True))
            if (step + 1) % max(1, steps // PARTS) == 0 or step + 1 == steps:
                yield step + 1 == steps, by_number
                by_number = {}


def uri_of(job: JobConfig, key: Mapping[str, object]) -> str:
    """The folder of a run's references. Raises ConfigError where a run that is to continue has others."""
    files = {name: files_identity(part) for name, part in job.model.sources.items() if part and part.weights}
    if job.model.lora and job.model.lora.pretrained:
        files["lora"] = files_identity(WeightsConfig(weights=job.model.lora.pretrained), peft_folder.SETTINGS)
    digest = hashlib.sha256(json.dumps({**key, "files": files}, sort_keys=True).encode()).hexdigest()[:32]
    uri, run = join_uri(job.run.root_uri, "references", digest), open_storage(job.run.run_uri)
    if job.train.resume == "auto" and run.stat(POINTER) and (before := read_record(run, POINTER)["uri"]) != uri:
        raise ConfigError(
            f"the starting model or the data have changed since this run began, whose references are {before}",
            expected="the files that it began with",
            fix="restore them, or start a new run",
        )
    return uri


def references_of_run(run_uri: str, split: Split) -> Float32Array:
    """The references that a run was trained with. Raises DataError where they are gone."""
    uri = str(read_record(open_storage(run_uri), POINTER)["uri"])
    references = read_references(uri, split)
    if references is None:
        raise DataError(f"there are no references in {uri}", fix="run the train step again, which computes them")
    return references


def read_references(uri: str, split: str) -> Float32Array | None:
    """Return a split's reference log probabilities, or None if they are not complete. Raises DataError for damage.

    split: its name; with PART appended, the part that is computed so far.
    """
    store = open_storage(uri)
    if store.stat(f"{split}.json") is None:
        return None
    content = store.read(f"{split}.npy")
    if crc32c_of(content) != read_record(store, f"{split}.json")["crc32c"]:
        raise DataError(
            f"{store.uri(f'{split}.npy')} is damaged: its checksum (CRC32C) is not the one written",
            fix=f"delete {uri}; the next new run computes it again",
        )
    references: Float32Array = np.load(io.BytesIO(content), allow_pickle=False)
    return references


def _read_part(uri: str, part: str) -> Float32Array | None:
    """Return a part's log probabilities, or None if they are missing or writing was interrupted."""
    with contextlib.suppress(DataError):
        return read_references(uri, part)
    return None


def _write(uri: str, split: str, references: Float32Array) -> None:
    buffer, store = io.BytesIO(), open_storage(uri)
    np.save(buffer, references, allow_pickle=False)
    store.write(f"{split}.npy", buffer.getvalue())
    write_record(store, f"{split}.json", {"pairs": len(references), "crc32c": crc32c_of(buffer.getvalue())})
