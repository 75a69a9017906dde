"""`vlmpipe data`: look at a run's data as training reads it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vlmpipe.cli.arguments import AsJson, Overrides, RunFile, Stage, load_training, run_ids
from vlmpipe.cli.output import doing, print_json, print_lines
from vlmpipe.trainer.errors import ExitCode, UserError, os_errors

if TYPE_CHECKING:
    from vlmpipe.trainer.config.job import JobConfig
    from vlmpipe.trainer.data.prepare.inspect import InspectedSample

app = typer.Typer(help="A run's data.", no_args_is_help=True)


@app.callback()
def _data() -> None:
    """A run's data."""


@app.command()
def inspect(
    config: RunFile,
    overrides: Overrides = None,
    first: Annotated[int, typer.Option(min=0, metavar="N", help="Number of the first sample shown, from 0.")] = 0,
    count: Annotated[int, typer.Option(min=1, metavar="N", help="How many samples of each source are shown.")] = 3,
    html: Annotated[
        Path | None,
        typer.Option(
            "--html", metavar="FILE", help="Write a page: samples with images, and statistics.", show_default=False
        ),
    ] = None,
    prepare: Annotated[
        bool, typer.Option("--prepare", help="Prepare the data first, as the run would, if that was not done yet.")
    ] = False,
    stage: Stage = "",
    as_json: AsJson = False,
) -> None:
    """Show samples in the chat template, as tokens. Labels, which the loss counts, are in colour."""
    job = _job(config, overrides, stage)
    if prepare:
        from vlmpipe.trainer.data.accounting.coverage import images_sentence
        from vlmpipe.trainer.data.prepare.chunks.merge import IMAGES, WITHOUT_IMAGES
        from vlmpipe.trainer.data.prepare.pipeline import prepare as prepare_data
        from vlmpipe.trainer.progress import Progress

        made = prepare_data(job, Progress(job.run.run_uri, "data-inspect"))
        if not as_json:
            counts = made.counts
            print_lines(
                [
                    f"{counts['read']:,} samples read, {counts['rejected']:,} rejected; "
                    + images_sentence(counts[IMAGES], counts[WITHOUT_IMAGES])
                    + made.notes
                ]
            )
    with doing(f"reading samples of {config}"):
        from vlmpipe.trainer.data.prepare.inspect import inspect as inspected

        chat, inspected_samples = inspected(job, first=first, count=count)
        samples = list(inspected_samples)
    if html:
        with doing(f"writing {html}"), os_errors(f"writing {html}"):
            html.write_text(_page(job, samples), encoding="utf-8")
        if not as_json:
            print_lines([f"page         {html}"])
            return
    if as_json:
        print_json(
            {
                "chat_template": chat.template.source,
                "end_tokens": chat.end_tokens,
                "samples": [
                    {
                        "id": sample.id,
                        "where": sample.where,
                        "rejected": sample.rejected,
                        "input_ids": sample.encoded.input_ids,
                        "labels": sample.encoded.labels,
                        "pieces": [vars(piece) for piece in sample.pieces],
                    }
                    for sample in samples
                ],
            }
        )
        return
    from vlmpipe.cli.views.tokens import print_samples

    print_samples(samples)


@app.command()
def export(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN_OR_CONFIG",
            help="A run's id, @last, folder or gs:// address; or a run file whose data is prepared.",
            autocompletion=run_ids,
        ),
    ],
    data_format: Annotated[
        str,
        typer.Option(
            "--format",
            metavar="FORMAT",
            help="messages, llava, trl, llama-factory, nemo, webdataset or tfrecord.",
            show_default=False,
        ),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="New or empty folder.", show_default=False)],
    overrides: Overrides = None,
    root: Annotated[str, typer.Option(help="The local runs' output.root_uri.")] = "runs",
    stage: Stage = "",
    as_json: AsJson = False,
) -> None:
    """Write prepared data as files of another trainer: same samples, same splits, images as they are stored."""
    with doing(f"exporting the data of {run}"):
        from vlmpipe.trainer.data.export.export import export_data

        exported = export_data(_prepared_uri(run, overrides, root, stage), data_format, output)
    if as_json:
        print_json(
            {
                "folder": str(output),
                "format": data_format,
                "samples": exported.samples,
                "images": exported.images,
                "files": exported.files,
            }
        )
        return
    counts = ", ".join(f"{count:,} of {split}" for split, count in exported.samples.items())
    print_lines([f"{output}: samples {counts}; {exported.images:,} images", *_first_files(exported.files)])


@app.command()
def audit(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN_OR_CONFIG",
            help="A run's id, @last, folder, gs:// or s3:// address; or a run file whose data is prepared.",
            autocompletion=run_ids,
        ),
    ],
    overrides: Overrides = None,
    output: Annotated[
        str,
        typer.Option(
            "--output", "-o", metavar="FOLDER", help="Local or in a bucket; default audit-NAME.", show_default=False
        ),
    ] = "",
    max_samples: Annotated[
        int, typer.Option("--max-samples", min=0, metavar="N", help="Most samples whose losses are computed; 0 is all.")
    ] = 0,
    root: Annotated[str, typer.Option(help="The local runs' output.root_uri.")] = "runs",
    stage: Stage = "",
    as_json: AsJson = False,
) -> None:
    """Find copied images, wrong and contradictory labels, and write the list that data.exclude takes."""
    with doing(f"auditing the data of {run}"):
        from vlmpipe.audit.files import progress_on_stderr, write_files
        from vlmpipe.audit.screen import lines, summary_json
        from vlmpipe.trainer.audit.audit import AuditRequest
        from vlmpipe.trainer.audit.audit import audit as audit_data
        from vlmpipe.trainer.config.job import JobConfig

        has_run = not run.endswith((".yaml", ".yml"))
        uri = _prepared_uri(run, overrides, root, stage)
        job = (
            JobConfig.load(f"{_run_folder(run, root, stage)}/run.json")
            if has_run
            else _job(Path(run), overrides, stage)
        )
        audited, catalogue = audit_data(AuditRequest(job, uri, has_run, max_samples), progress_on_stderr())
        name = job.run.run_id
        files = write_files(output or f"audit-{name}", name, audited, catalogue.stored)
    if as_json:
        print_json(summary_json(audited, files))
        return
    print_lines(lines(audited, files))


@app.command()
def convert(
    uri: Annotated[str, typer.Argument(metavar="URI", help="A folder of prepared data, local or in a bucket.")],
    as_json: AsJson = False,
) -> None:
    """Make prepared data of the format before data of today's format, in place and without reading an image."""
    with doing(f"converting {uri}"):
        from vlmpipe.trainer.data.prepare.convert import convert as convert_data

        made = convert_data(uri)
    if as_json:
        print_json(vars(made))
        return
    how = f"converted, {made.samples:,} samples" if made.samples else "of today's format already"
    print_lines([f"{uri}: {how}, index of {made.index_bytes / 1e6:,.1f} MB"])


@app.command()
def fetch(
    name: Annotated[str, typer.Argument(metavar="OWNER/NAME", help="The data set's id on the Hugging Face hub.")],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="New or empty folder; default the name.", show_default=False),
    ] = None,
    subset: Annotated[str, typer.Option(help="Of a data set with several subsets this one.", show_default=False)] = "",
    revision: Annotated[str, typer.Option(help="Branch, tag or commit.", show_default=False)] = "",
    as_json: AsJson = False,
) -> None:
    """Fetch a data set of the Hugging Face hub as Parquet files. Needs the extra hub; a run reads the folder."""
    folder = output or Path(name.rstrip("/").rpartition("/")[2])
    with doing(f"fetching {name}"):
        from vlmpipe.drafting.hub_data import fetch as fetch_data

        fetched = fetch_data(name, folder, subset=subset, revision=revision)
    if as_json:
        print_json({**vars(fetched), "folder": str(fetched.folder)})
        return
    counts = ", ".join(f"{count:,} of {split}" for split, count in fetched.samples.items())
    at = f" at commit {fetched.commit[:12]}" if fetched.commit else ""
    size = f"{fetched.size_bytes / 1e6:,.1f} MB"
    print_lines(
        [f"{folder}: {counts}, {size}{at}", f"  next: vlmpipe init --data {folder} --output {folder.name}.yaml"]
    )


def _page(job: JobConfig, samples: Sequence[InspectedSample]) -> str:
    from vlmpipe.report.inspection.page import build_page, card_of
    from vlmpipe.report.inspection.seen_images import SeenImages
    from vlmpipe.trainer.data.prepare.fingerprint import find_prepared
    from vlmpipe.trainer.data.prepare.overview import overview

    seen = SeenImages(job.model)
    statistics = None
    try:
        statistics = overview(find_prepared(job), job.data)
    except UserError as error:
        if error.code != ExitCode.NOT_FOUND:  # of data that is not prepared yet
            raise
    return build_page(job.data.described(), [card_of(sample, seen) for sample in samples], statistics)


def _first_files(files: dict[str, tuple[str, ...]]) -> list[str]:
    return [
        f"  {split:<11} {names[0]}" + (f" and {len(names) - 1} more files" if names[1:] else "")
        for split, names in files.items()
    ]


def _prepared_uri(run: str, overrides: Overrides, root: str, stage: str) -> str:
    """Prepared data of a run, or of a run file. Raises UserError where there is none."""
    from vlmpipe.trainer.data.prepare.fingerprint import find_prepared
    from vlmpipe.trainer.records.prepared import DataPointers
    from vlmpipe.trainer.storage import open_storage

    if run.endswith((".yaml", ".yml")):
        return find_prepared(_job(Path(run), overrides, stage))
    return DataPointers.read(open_storage(_run_folder(run, root, stage))).prepared_uri


def _run_folder(run: str, root: str, stage: str) -> str:
    """The folder of a run, or of one of its stages."""
    from vlmpipe.comparison.sides import run_uri_named
    from vlmpipe.trainer.storage.base import join_uri

    folder = run_uri_named(run, root)
    return join_uri(folder, "stages", stage) if stage else folder


def _job(config: Path, overrides: Overrides, stage: str) -> JobConfig:
    """The settings of the run file's training, as a job on this machine reads them."""
    from vlmpipe.trainer.config.job import JobConfig, RunPaths

    settings = load_training(config, overrides, stage)
    paths = RunPaths(run_id=settings.name, root_uri=settings.output.root_uri)
    return JobConfig.model_validate(settings.to_run_json(paths))
