"""`vlmpipe import`: a file of a guide, or a command, as a run file or as a corrected job spec."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from vlmpipe.importing.cluster import assume_cluster, mend_batch
from vlmpipe.importing.findings import Finding, Ledger, Outcome
from vlmpipe.importing.job_specs.search import settle_search
from vlmpipe.importing.job_specs.translate import corrected_spec, translate_job_spec
from vlmpipe.importing.launch_command import words_of_text
from vlmpipe.importing.named_files import NamedFiles
from vlmpipe.importing.named_settings import TOOLS, read_deepspeed_file
from vlmpipe.importing.program import command_content, translate_command
from vlmpipe.importing.settings.deepspeed import drop_what_is_ignored, translate_deepspeed
from vlmpipe.importing.settings.model_words import run_name, translate_model
from vlmpipe.importing.settings.sharding import translate_sharding
from vlmpipe.importing.settings.training import translate_training
from vlmpipe.importing.settings.words import translate_words
from vlmpipe.importing.sources import Kind, Source
from vlmpipe.importing.translation import Translation
from vlmpipe.importing.yaml_text import comment_lines
from vlmpipe.trainer.errors import ConfigError

EXAMPLE_DIGEST = "0" * 63
EXAMPLE_SAMPLE_TOKENS = 1600
EXAMPLE_FIELDS = {
    "output.root_uri": "gs://example-bucket/vlmpipe",
    "plan.samples": 100_000,
    "cluster.image_uri": f"us-central1-docker.pkg.dev/example-project/vlmpipe/trainer@sha256:{EXAMPLE_DIGEST}1",
    "gcp.project": "example-project",
    "gcp.location": "us-central1",
    "gcp.service_account": "vlmpipe@example-project.iam.gserviceaccount.com",
    "gcp.pipeline_root": "gs://example-bucket/vlmpipe",
    "gcp.pipeline_image": f"us-central1-docker.pkg.dev/example-project/vlmpipe/pipeline@sha256:{EXAMPLE_DIGEST}2",
}


@dataclass(frozen=True)
class Imported:
    """The text of a run file or job spec, and what became of each value of `source`."""

    source: str
    kind: Kind
    result: str  # "run file" or "job spec"
    text: str
    findings: tuple[Finding, ...]

    def counts(self) -> dict[str, int]:
        """Number of values by outcome; every outcome is named."""
        counts = Counter(finding.outcome for finding in self.findings)
        return {outcome.value: counts[outcome] for outcome in Outcome}

    def as_dict(self) -> dict[str, object]:
        return {
            "source": self.source,
            "kind": self.kind.value,
            "result": self.result,
            "counts": self.counts(),
            "findings": [finding.as_dict() for finding in self.findings],
            "text": self.text,
        }


def import_run_file(source: Source) -> Imported:
    """The run file of a source. Raises ConfigError where there can be none."""
    translation = _translate(source)
    _examples(translation, source)
    translation.settle(source.name, mend_batch)
    settle_search(translation, source.name)
    drop_what_is_ignored(translation)
    for leaf in translation.ledger.unanswered():
        translation.refuse(leaf, "nothing here takes it")
    findings = translation.ledger.findings()
    text = translation.text(_heading(source, findings, "vlmpipe import"), _not_taken(source, findings))
    return Imported(source.name, source.kind, "run file", text, tuple(findings))


def import_job_spec(source: Source) -> Imported:
    """The corrected job spec of a source. Raises ConfigError for sources that are no job specs."""
    if source.kind not in (Kind.JOB_SPEC, Kind.PYTHON):
        fix = "vlmpipe import without --job-spec writes a run file"
        raise ConfigError(f"{source.name} is {source.kind.value}", expected="a job spec", fix=fix)
    ledger = Ledger(source.content)
    _note_not_literal(ledger, source)
    lines = corrected_spec(_job_content(source), ledger)
    findings = ledger.findings()
    heading = [line for text in _heading(source, findings, "vlmpipe import --job-spec") for line in
               comment_lines(text, hanging="  ")]  # fmt: skip
    closing = [line for text in _not_taken(source, findings) for line in comment_lines(text, hanging="  ")]
    text = "\n".join([*heading, *lines, *closing, ""])
    return Imported(source.name, source.kind, "job spec", text, tuple(findings))


def _job_content(source: Source) -> Mapping[str, object] | list[object]:
    assert not isinstance(source.content, str), "only a command is text"
    return source.content


def _note_not_literal(ledger: Ledger, source: Source) -> None:
    for path, text in source.not_literal.items():
        ledger.add((path,), text)
        ledger.note((path,), Outcome.REFUSED, "", "no plain value: the listing is read, never run")


def _translate(source: Source) -> Translation:
    files = NamedFiles(source.folders)
    if source.kind is Kind.COMMAND:
        assert isinstance(source.content, str), "a command is text"
        launch, content = command_content(words_of_text(source.content), files)
        translation = Translation(content, files)
        translate_command(translation, launch)
        return translation
    translation = Translation(source.content, files)
    if source.kind is Kind.DEEPSPEED:
        concepts = translate_deepspeed(translation)
        translate_model(concepts)
        return translation
    if source.kind in (Kind.JOB_SPEC, Kind.PYTHON):
        _note_not_literal(translation.ledger, source)
        translate_job_spec(translation, _job_content(source))
        return translation
    concepts = translate_words(translation, TOOLS[source.kind])
    read_deepspeed_file(concepts)
    machines, processes = concepts.count("machines"), concepts.count("processes")
    if entry := concepts.take("processes"):
        translation.drop(entry.path, "the GPUs of all machines, which cluster names")
    if entry := concepts.take("machines"):
        translation.drop(entry.path, "the machines, which cluster names")
    assume_cluster(translation, gpus=processes, nodes=machines)
    translate_sharding(concepts)
    translate_training(concepts)
    translate_model(concepts)
    return translation


def _examples(translation: Translation, source: Source) -> None:
    """Set fields that every run file has to examples, unless the source says them."""
    translation.assume("name", run_name(source.name.rpartition(".")[0] or source.name), "")
    length = translation.settings["data.sequence_length"].value
    tokens = (
        min(EXAMPLE_SAMPLE_TOKENS, 3 * int(length) // 4) if isinstance(length, int | float) else EXAMPLE_SAMPLE_TOKENS
    )
    translation.assume("plan.sample_tokens", max(1, tokens), "an example: put in what your data has")
    for field, value in EXAMPLE_FIELDS.items():
        translation.assume(field, value, "")


def _heading(source: Source, findings: list[Finding], command: str) -> Iterator[str]:
    counts = Counter(finding.outcome for finding in findings)
    summary = ", ".join(f"{counts[outcome]} {outcome.value}" for outcome in Outcome if counts[outcome])
    yield f"Made by {command} from {source.name}, {source.kind.value}. Its values: {summary or 'none'}."
    yield "Names of example-project and example-bucket are examples: put in your own."


def _not_taken(source: Source, findings: list[Finding]) -> Iterator[str]:
    for outcome, title in (
        (Outcome.REFUSED, "cannot be expressed here"),
        (Outcome.DROPPED, "is not needed here"),
    ):
        chosen = [finding for finding in findings if finding.outcome is outcome]
        if chosen:
            yield f"What {source.name} has and {title}:"
        for finding in chosen:
            yield f"- {finding.path}: {finding.value}: {finding.reason}"
