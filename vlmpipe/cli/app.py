"""The command line. Everything heavy is imported by the command that needs it, so that --help answers at once."""

from __future__ import annotations

import gc
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vlmpipe import api
from vlmpipe.cli import answers, init
from vlmpipe.cli import compile as compile_commands
from vlmpipe.cli import data as data_commands
from vlmpipe.cli import gate as gate_command
from vlmpipe.cli import importing as import_command
from vlmpipe.cli import prove as prove_command
from vlmpipe.cli import schedule as schedule_commands
from vlmpipe.cli import start as start_commands
from vlmpipe.cli import tune as tune_command
from vlmpipe.cli.arguments import AsJson, Overrides, RunFile, Stage, any_target, load, load_training, run_files
from vlmpipe.cli.examples import add_examples
from vlmpipe.cli.mcp import command as mcp_command
from vlmpipe.cli.output import begin, doing, errors_as_json, print_error, print_json, print_lines, to_stderr
from vlmpipe.cli.runs import compare, curve, folder, logs, status
from vlmpipe.cli.skill import command as skill_command
from vlmpipe.google_cloud.client import ENDPOINT_VARIABLE
from vlmpipe.platforms.table import DEFAULT, platform_of
from vlmpipe.trainer import __version__
from vlmpipe.trainer.errors import (
    DEBUG_VARIABLE,
    ConfigError,
    ExitCode,
    UserError,
    from_os_error,
    from_unicode_error,
    missing_packages,
)
from vlmpipe.trainer.redaction import hiding_secrets

if TYPE_CHECKING:
    from vlmpipe.config.run_config import RunConfig

app = typer.Typer(
    name="vlmpipe",
    help="Fine-tune vision-language models as one pipeline: the same graph here, on Vertex AI and on Kubeflow.",
    epilog="Start with: vlmpipe run configs/digits.yaml. Guides: vlmpipe docs",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode=None,  # with rich, --help takes half as long again
    pretty_exceptions_enable=False,
)

cache = typer.Typer(help="The cache of vision features.", no_args_is_help=True)
app.add_typer(cache, name="cache")
app.add_typer(data_commands.app, name="data")
app.add_typer(schedule_commands.app, name="schedule")
app.add_typer(folder.app, name="runs")
app.command()(init.init)
app.command()(init.docs)
app.command()(skill_command.skill)
app.command()(mcp_command.mcp)
app.command(name="compile")(compile_commands.compile_)
app.command(name="import")(import_command.import_)
for command in (
    compile_commands.publish,
    *start_commands.ALL,
    status.status,
    status.cancel,
    logs.logs,
    status.diagnose,
    compare.compare,
    *answers.ALL,
    curve.curve,
    tune_command.tune,
    prove_command.prove,
    gate_command.gate,
):
    app.command()(command)


def _version(is_requested: bool) -> None:
    if is_requested:
        print(f"vlmpipe {__version__}")
        raise typer.Exit


@app.callback()
def _global_options(
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors. May be typed anywhere.")] = False,
    api_endpoint: Annotated[
        str,
        typer.Option(
            metavar="ADDRESS",
            help="Vertex AI's API, if not the region's own; see vlmpipe rehearse.",
            show_default=False,
        ),
    ] = "",
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    begin()
    if debug:
        os.environ[DEBUG_VARIABLE] = "1"  # the pipeline's processes read it too
    if api_endpoint:
        os.environ[ENDPOINT_VARIABLE] = api_endpoint


@app.command()
def doctor(config: RunFile, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Ask Google Cloud and the hub what a run lacks.

    APIs, quotas, images, machines, accounts, permissions, addresses and models: the online half of check. Each question
    is ok, missing with the command that mends it, or cannot be seen and why. Nothing is changed; what the answers show
    of vlmpipe docs unproved is noted beside the runs. Ends with exit code 79 where something is missing, and 69
    where nothing could be seen.
    """
    from vlmpipe.doctor.rows import as_json as rows_as_json
    from vlmpipe.doctor.rows import exit_code
    from vlmpipe.doctor.sightings import note_rows, sightings_of

    settings = load(config, overrides)
    with doing(f"asking about {config}: project, quotas, images, permissions, addresses and models"):
        rows = api.doctor(settings)
        notes = note_rows(settings, rows)
    if as_json:
        seen = [{"id": sighting.id, "holds": sighting.holds, "said": sighting.said} for sighting in sightings_of(rows)]
        print_json({**rows_as_json(rows), "assumptions": seen, "notes": notes})
    else:
        from vlmpipe.cli.views.doctor import print_rows

        print_rows(rows)
        if notes:
            print_lines(["", *notes])
    raise typer.Exit(exit_code(rows))


@app.command()
def check(
    config: Annotated[
        Path | None,
        typer.Argument(
            metavar="[CONFIG]",
            help="The run file, for example configs/digits.yaml.",
            show_default=False,
            autocompletion=run_files,
        ),
    ] = None,
    overrides: Overrides = None,
    job_spec: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Check a CustomJob's spec (YAML or JSON) instead.", show_default=False),
    ] = None,
    region: Annotated[str, typer.Option(help="With --job-spec: region of the job.", show_default=False)] = "",
    as_json: AsJson = False,
) -> None:
    """Check a run file or a job spec. Fields, model, data, batch, output and job specs, in seconds and offline.

    vlmpipe doctor asks for what only the network knows.
    """
    if (config is None) == (job_spec is None):
        problem = (
            "neither a run file nor a job spec given" if config is None else "both a run file and a job spec given"
        )
        raise ConfigError(problem, expected="vlmpipe check CONFIG [a.b=c]..., or vlmpipe check --job-spec FILE")
    if job_spec is not None:
        raise typer.Exit(_check_job_spec(job_spec, region, as_json))
    assert config is not None
    if region:
        raise ConfigError("--region is given with a run file", fix="set gcp.location=REGION in the run file instead")
    from vlmpipe.config.validation_errors import RunFileError
    from vlmpipe.pipelines.checks.finding import exit_code

    try:
        settings = load(config, overrides)
    except RunFileError as error:
        from vlmpipe.pipelines.checks.deepspeed_values import with_values

        raise with_values(error, config, overrides or ()) from None
    with doing(f"checking {config}: model, data, batch, output and job specs"):
        findings = api.check(settings)
    code = exit_code(findings)
    if as_json:
        checks = [{"subject": finding.subject, "state": finding.state, "text": finding.text} for finding in findings]
        print_json({"ok": code == 0, "checks": checks})
    else:
        from vlmpipe.cli.views.tables import print_findings

        print_findings(findings)
    raise typer.Exit(code)


@app.command()
def plan(
    config: RunFile,
    overrides: Overrides = None,
    suggest: Annotated[
        str,
        typer.Option(
            metavar="GOAL",
            help="Compare machines and strategies instead: cheapest, fastest, under:USD (the fastest for that much) or "
            "by:HOURS (the cheapest in that time).",
            show_default=False,
        ),
    ] = "",
    strategies: Annotated[
        bool,
        typer.Option("--strategies", help="Compare strategies on 1, 2, 4 and 8 of the run file's machines instead."),
    ] = False,
    target: Annotated[str, any_target("Where the run is to go. The plan of a local run has no prices.")] = DEFAULT,
    verbose: Annotated[bool, typer.Option("--verbose", help="List what the figures assume.")] = False,
    as_json: AsJson = False,
) -> None:
    """Say whether a run fits, how long it takes, what it costs. Starts nothing; exit 64 on red."""
    settings = load(config, overrides)
    if suggest and strategies:
        raise ConfigError("--suggest and --strategies", expected="one of them")
    if option := "--suggest" if suggest else "--strategies" if strategies else "":
        if settings.stages or settings.sweep:
            raise ConfigError(
                f"{option} with a run file of several trainings, which may want different machines",
                expected="a run file of one training",
                fix=f"write one stage or variant as a run file of its own; without {option} all of them are planned",
            )
        if platform_of(target).is_here:
            expected = "a target whose machines can be chosen"
            raise ConfigError(f"{option} with --target {target}", expected=expected, fix="leave one out")
        _compare(settings, str(config), overrides or [], suggest, as_json)
        return
    from vlmpipe.cli.views.plan import print_plan_tables

    with doing(f"planning {config}: memory, time and cost"):
        result = api.plan(settings, target)
    if as_json:
        print_json(result.as_dict())
    else:
        print_plan_tables(result.as_dict(), verbose=verbose)
    raise typer.Exit(ExitCode.CONFIG if result.state == "red" else ExitCode.OK)


def _compare(settings: RunConfig, config: str, overrides: list[str], goal: str, as_json: bool) -> None:
    """Machines and strategies for the goal; without one, strategies on the run file's machines."""
    from vlmpipe.cli.views.strategies import print_strategies
    from vlmpipe.cli.views.suggestions import print_suggestions
    from vlmpipe.planner.plan import plan_basis
    from vlmpipe.planner.search.search import suggest
    from vlmpipe.planner.search.strategies import compare_strategies
    from vlmpipe.planner.search.ways import Goal
    from vlmpipe.planner.sequence_fill import length_advice
    from vlmpipe.trainer.storage.outage import answering_soon

    requested = Goal.parse(goal) if goal else None
    with doing(f"comparing {'machines and ' * bool(goal)}strategies for {config}"), answering_soon():
        model, load, prices = plan_basis(settings)
        if requested is None:
            strategies = compare_strategies(settings, model, load, prices)
        else:
            suggestions = suggest(settings, model, load, prices, requested)
    if requested is None:
        print_json(strategies.as_dict()) if as_json else print_strategies(strategies, settings, config, overrides)
    elif as_json:
        print_json({"goal": goal, **suggestions.as_dict(), "sequence_lengths": [vars(fill) for fill in load.fills]})
    else:
        print_suggestions(suggestions, requested, settings, config, overrides)
        if advice := length_advice(load.fills, settings):
            print_lines([advice])


@app.command()
def rehearse(config: RunFile, overrides: Overrides = None) -> None:
    """Serve a strict Vertex AI on this machine. What another terminal submits to it is checked, and nothing is run."""
    from vlmpipe.rehearsal.serve import serve

    serve(load(config, overrides), [str(config), *(overrides or [])])


@cache.command("explain")
def explain_cache(config: RunFile, overrides: Overrides = None, stage: Stage = "", as_json: AsJson = False) -> None:
    """Say whether a run's images have cached features. What decides that, and how other caches there differ."""
    settings = load_training(config, overrides, stage)
    with doing(f"comparing the feature caches of {config}"):
        from vlmpipe.trainer.config.job import JobConfig, RunPaths
        from vlmpipe.trainer.feature_cache.explain import explain  # loads torch

        paths = RunPaths(run_id=settings.name, root_uri=settings.output.root_uri)
        explained = explain(JobConfig.model_validate(settings.to_run_json(paths)))
    print_json(explained.as_json()) if as_json else print_lines(explained.lines())


@app.command()
def schema(
    output: Annotated[
        Path | None, typer.Option(help="Folder to write run-file.schema.json and run-file.md to.", show_default=False)
    ] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the Markdown reference.")] = False,
) -> None:
    """Print the run file's JSON Schema for editors, or its reference."""
    from vlmpipe.config import json_schema as schemas

    if output is None:
        print(schemas.markdown() if markdown else schemas.json_schema(), end="")
        return
    for path in schemas.write(output):
        print(path)


add_examples(app)


def console() -> None:
    """Run the console script and exit without interpreter teardown, which takes a second once torch is imported."""
    try:
        main()
    except SystemExit as leaving:
        if "torch" not in sys.modules or not isinstance(leaving.code, int | None):
            gc.freeze()  # the interpreter's last searches for cycles would take a tenth of a short command's time
            raise
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(leaving.code or 0)


def main() -> None:
    """Run the command line: errors for people become a sentence and their exit code. No known secret is shown."""
    with hiding_secrets():
        _main()


def _main() -> None:
    begin()
    try:
        arguments = sys.argv[1:]
        _require_no_dashed_override(arguments)
        debug = ["--debug"] if "--debug" in arguments else []  # an option of vlmpipe, wherever it is typed
        with missing_packages():
            app([*debug, *(argument for argument in arguments if argument != "--debug")], prog_name="vlmpipe")
    except SystemExit as leaving:
        if _was_interrupted(leaving):  # typer makes an exit code of Ctrl-C, and says nothing
            to_stderr("stopped by Ctrl-C")
        raise
    except KeyboardInterrupt:
        to_stderr("stopped by Ctrl-C")
        sys.exit(int(ExitCode.INTERRUPTED))
    except (UserError, OSError) as error:
        user_error = error if isinstance(error, UserError) else from_os_error(error, "running vlmpipe")
        print_error(user_error, as_json=errors_as_json())
        sys.exit(int(user_error.code))
    except UnicodeEncodeError as error:
        print_error(from_unicode_error(error, "running vlmpipe"), as_json=errors_as_json())
        sys.exit(ExitCode.CONFIG)
    except Exception as error:
        fix = "report it with the output of the same command with --debug, which adds the traceback"
        unexpected = UserError(f"unexpected {type(error).__name__}: {error}", fix=fix, code=ExitCode.UNEXPECTED)
        print_error(unexpected, as_json=errors_as_json())
        sys.exit(ExitCode.UNEXPECTED)


def _was_interrupted(error: BaseException) -> bool:
    seen: BaseException | None = error
    while seen is not None and not isinstance(seen, KeyboardInterrupt):
        seen = seen.__cause__ or seen.__context__
    return seen is not None


def _require_no_dashed_override(arguments: Sequence[str]) -> None:
    for argument in arguments:
        if re.match(r"--\w+\.[\w.]+(=|$)", argument):
            raise ConfigError(
                f"{argument!r} is no option",
                expected="fields of the run file without dashes",
                fix=f"write {argument.removeprefix('--') + ('' if '=' in argument else '=VALUE')}",
            )


def _check_job_spec(path: Path, region: str, as_json: bool) -> int:
    from vlmpipe.catalog.machines import load_catalog
    from vlmpipe.job_spec.file import read_spec_file

    file = read_spec_file(path)
    violations = file.check(load_catalog(), region)
    failed = any(violation.severity == "error" for violation in violations)
    if as_json:
        violation_rows = [violation.as_dict() for violation in violations]
        what = {"job_spec": str(path), "spelling": file.spelling, "not_checked": file.not_checked}
        print_json({"ok": not failed, **what, "violations": violation_rows})
    else:
        from vlmpipe.cli.views.tables import print_violations

        print_violations(violations, region or file.region, file.not_checked)
    return ExitCode.CONFIG if failed else ExitCode.OK


if __name__ == "__main__":
    console()
