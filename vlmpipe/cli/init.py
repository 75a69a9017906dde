"""Files in the package: `vlmpipe init` writes a run file to begin with, `vlmpipe docs` prints pages."""

from __future__ import annotations

import difflib
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from vlmpipe.cli.output import doing, print_lines
from vlmpipe.trainer.errors import ConfigError, os_errors

TEMPLATES = Path(__file__).parents[1] / "run_files"
PAGES = Path(__file__).parents[1] / "guides"  # docs/, without the decisions


class Template(StrEnum):
    """Templates of run files."""

    digits = "digits"
    llava = "llava"
    qwen_vl = "qwen-vl"
    vertex = "vertex"
    zero2 = "zero2"
    hsdp = "hsdp"
    tensor_parallel = "tensor-parallel"
    three_d = "3d"
    weekly = "weekly"
    tune = "tune"


# File of each template, and the command that comes next.
FILES = {
    Template.digits: ("digits.yaml", "vlmpipe run {path}"),
    Template.llava: ("llava-local.yaml", "vlmpipe run {path} data.source=FILE.json data.image_folder=FOLDER"),
    Template.qwen_vl: ("qwen2-5-vl-3b-lora.yaml", "vlmpipe plan {path}"),
    Template.vertex: ("llava-7b.yaml", "vlmpipe plan {path}"),
    Template.zero2: ("llava-7b-zero2.yaml", "vlmpipe plan {path}"),
    Template.hsdp: ("llava-7b-hsdp.yaml", "vlmpipe plan {path}"),
    Template.tensor_parallel: ("llava-34b-tp.yaml", "vlmpipe plan {path}"),
    Template.three_d: ("llava-70b-3d.yaml", "vlmpipe plan {path}"),
    Template.weekly: ("qwen2-5-vl-3b-weekly.yaml", "vlmpipe schedule plan {path}"),
    Template.tune: ("qwen2-5-vl-3b-tune.yaml", "vlmpipe plan {path}"),
}


def init(
    template: Annotated[
        Template,
        typer.Argument(
            help="digits: the quickstart. llava: your own LLaVA JSON on this machine. qwen-vl: Qwen2.5-VL with LoRA on "
            "Vertex AI. vertex: LLaVA-1.5 7B on a Spot machine with 8 x A100. zero2, hsdp: the same on four, with a "
            "Reduction Server. tensor-parallel: 34B. 3d: 70B. weekly: retraining on a schedule. tune: a search for "
            "rate and rank.",
        ),
    ] = Template.digits,
    output: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Run file to write; default <template>.yaml.", show_default=False),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            "--data",
            metavar="PLACE",
            help="Look at this folder or file of data, and write the run file that fits it.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Write a commented run file to begin with. An existing file is never overwritten."""
    if data is not None:
        from vlmpipe.drafting.place import on_this_machine

        if template is not Template.digits:
            raise ConfigError(f"--data with the template {template}", expected="one of the two")
        place = on_this_machine(data)
        _init_from_data(place, output or Path(f"{place.resolve().stem or 'data'}.yaml"))
        return
    name, following = FILES[template]
    path = output or Path(f"{template.value}.yaml")
    text = (TEMPLATES / name).read_text(encoding="utf-8")
    # An editor finds the schema in the clone only.
    text = "".join(line for line in text.splitlines(keepends=True) if not line.startswith("# yaml-language-server"))
    create(path, text)
    print_lines([f"{path} written", f"  next: {following.format(path=path)}"])


def create(path: Path, text: str) -> None:
    with os_errors(f"writing {path}"):
        try:
            with path.open("x", encoding="utf-8") as file:
                file.write(text)
        except FileExistsError:
            raise ConfigError(f"{path} exists already", fix="remove it, or give another name: --output FILE") from None


def _init_from_data(data: Path, path: Path) -> None:
    if path.exists():
        raise ConfigError(f"{path} exists already", fix="remove it, or give another name: --output FILE")
    with doing(f"looking at {data}"):
        from vlmpipe.drafting.run_file import draft_run_file, facts_lines

        draft = draft_run_file(data, path)
    create(path, draft.text)
    from rich.text import Text

    from vlmpipe.cli.views.tables import Grid, show, standard_output

    table = Grid(columns=2)
    for label, text in facts_lines(draft):
        table.add_row(label, Text(text))
    show(standard_output(), table)
    if draft.questions:
        print_lines(["", "not seen in the data, as comments in the run file:"])
        table = Grid(columns=2)
        for number, question in enumerate(draft.questions, 1):
            table.add_row(f" {number}", Text(question))
        show(standard_output(), table)
    made = [f"{draft.table[0]} written, {len(draft.layout.table):,} rows"] if draft.table else []
    print_lines(["", *made, f"{path} written", f"  next: vlmpipe check {path}", f"        vlmpipe run {path}"])


def docs(
    name: Annotated[
        str, typer.Argument(metavar="[NAME]", help="The page, for example tutorial or tune.", show_default=False)
    ] = "",
) -> None:
    """Print a page of the documentation. Without a name, the list of pages."""
    pages = {
        str(path.relative_to(PAGES).with_suffix("")): path
        for folder in ("", "tutorials/", "how-to/", "reference/")
        for path in sorted(PAGES.glob(f"{folder}*.md"))
    }
    if not name:
        titles = {
            page: path.read_text(encoding="utf-8").partition("\n")[0].lstrip("# ") for page, path in pages.items()
        }
        width = max(map(len, titles))
        print_lines([f"{page:<{width}}  {title}" for page, title in titles.items()])
        return
    requested = name.removeprefix("docs/").removesuffix(".md")
    matches = [page for page in pages if requested in (page, page.rpartition("/")[2])]
    if len(matches) != 1:
        close = matches or difflib.get_close_matches(requested, [page.rpartition("/")[2] for page in pages], 3)
        raise ConfigError(
            f"there {'are several pages' if matches else 'is no page'} {requested}",
            expected="one of vlmpipe docs",
            fix=f"did you mean {' or '.join(close)}?" if close else "to list them: vlmpipe docs",
        )
    print(pages[matches[0]].read_text(encoding="utf-8"), end="")
