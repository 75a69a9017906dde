"""Quantized exports in an evaluation: in the run's folder if they answer as the export does, and only then."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from tests.support.trainer.runs import make_run
from vlmpipe.trainer.checkpoint.export.hf_export import export_initial
from vlmpipe.trainer.config.checkpoint import QuantizeConfig, QuantizedFormat
from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.distributed.process import ProcessContext
from vlmpipe.trainer.errors import ConfigError, DataError, ExitCode, UserError
from vlmpipe.trainer.evaluation.evaluate import evaluate
from vlmpipe.trainer.evaluation.quantized.scores import QuantizedExports
from vlmpipe.trainer.evaluation.significance.paired import PairedCounts
from vlmpipe.trainer.records.evaluation import Evaluation
from vlmpipe.trainer.serving.exported_model import load_folder
from vlmpipe.trainer.storage import open_storage
from vlmpipe.trainer.storage.export_manifest import quantized_folder, require_whole_export

WORKER = ProcessContext(0, 1, 0, 1, torch.device("cpu"))
FORMATS: tuple[QuantizedFormat, ...] = ("int4", "fp8")


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def evaluated(job: JobConfig, **quantize: object) -> Evaluation:
    section = {"formats": FORMATS, **quantize} if quantize else None
    asked = job.evaluate.model_validate(job.evaluate.model_dump() | {"quantize": section})
    evaluate(job.model_copy(update={"evaluate": asked}), WORKER)
    return Evaluation.read(open_storage(job.run.run_uri))


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> JobConfig:
    job = make_run(
        tmp_path_factory.mktemp("run"),
        "one",
        {
            "features.cache": "off",
            "data.max_samples": 40,
            "data.validation_fraction": 0.5,
            "evaluate.controls": [],
            "evaluate.max_new_tokens": 3,
        },
        features="off",
    )
    export_initial(job)
    return job


def test_a_quantized_export_is_kept_if_it_answers_as_the_export(job: JobConfig) -> None:
    store = open_storage(job.run.run_uri)
    kept = evaluated(job, min_agreement=1e-9).quantized
    assert list(kept) == list(FORMATS)
    for form, scores in kept.items():
        assert (scores.accepted, scores.obstacle, scores.layers) == (True, "", 14)
        assert 0 < scores.quantized_bytes < scores.export_bytes
        assert scores.before is not None and scores.after is not None and scores.paired
        difference = PairedCounts.model_validate(scores.paired).difference
        assert scores.after - scores.before == pytest.approx(-difference)
        described = require_whole_export(store, quantized_folder(form))
        assert described["quantized"] == form and "model.safetensors" in described["files"]
        load_folder(job, Path(job.run.run_uri, quantized_folder(form)), torch.device("cpu"))
    agreements = {form: scores.agreement for form, scores in kept.items()}
    assert agreements["int4"] < 1, "an export that can be told from the model"

    bound = max(agreements.values())
    one_kept = evaluated(job, min_agreement=bound).quantized
    assert {form: scores.agreement for form, scores in one_kept.items()} == agreements, "the same on every try"
    for form, scores in one_kept.items():
        assert scores.accepted == (agreements[form] >= bound)
        if not scores.accepted:
            with pytest.raises(DataError, match=r"evaluate\.quantize"):
                require_whole_export(store, quantized_folder(form))
            assert not list(store.list(quantized_folder(form)))
    assert not all(scores.accepted for scores in one_kept.values()), "one that is refused"
    assert not evaluated(job).quantized
    assert not any(list(store.list(quantized_folder(form))) for form in FORMATS), "none that was not asked for"


@pytest.mark.parametrize(
    ("error", "is_raised"),
    [
        (UserError("gs://bucket does not answer", code=ExitCode.UNAVAILABLE), True),
        (OSError(errno.EIO, "Input/output error"), True),
        (ConfigError("the language model is a mixture of experts"), False),
    ],
    ids=str,
)
def test_storage_that_is_away_is_an_error_and_not_a_refusal(
    job: JobConfig, monkeypatch: pytest.MonkeyPatch, error: Exception, is_raised: bool
) -> None:
    def upload(*_: object) -> None:
        raise error

    monkeypatch.setattr(QuantizedExports, "_write", upload)
    asked = job.evaluate.model_copy(update={"quantize": QuantizeConfig(formats=("int4",))})
    exports = QuantizedExports(job.model_copy(update={"evaluate": asked}), Mock(), (), Mock())
    if is_raised:
        with pytest.raises(UserError, match=r"does not answer|Input/output error"):
            exports.scores((), WORKER, None)
    else:
        assert exports.scores((), WORKER, None)["int4"].obstacle == str(error)
