"""The run file that fits a folder of data, with what could not be seen as questions in comments."""

from __future__ import annotations

import csv
import io
import itertools
import json
import math
import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from vlmpipe.config.overrides import apply_overrides
from vlmpipe.config.run_config import parse_run_config
from vlmpipe.config.yaml_loader import parse_yaml
from vlmpipe.drafting.facts import Facts, look, power_of_two
from vlmpipe.drafting.layout import Layout, find_layout
from vlmpipe.trainer.errors import ConfigError, os_errors
from vlmpipe.trainer.printable import one_line

TEMPLATE = Path(__file__).parents[1] / "run_files/llava-local.yaml"
LONGEST = 8192  # tokens of a sample that a look takes
SMALL_VOCABULARY, FEW_WORDS = 512, 300  # tokens; distinct words
STEPS, MAX_EPOCHS = 400, 30  # of a first run that ends within minutes
FEW_QUESTIONS = 100  # questions, below which a score says little
MAX_ANSWER_TOKENS = 64
DEFAULT_SHARE, MIN_VALIDATION = 0.1, 5  # share and number of images that are held out
COLUMNS = 100  # of comments


@dataclass(frozen=True)
class Draft:
    """A run file's text. table: text and path of the table that it reads, where one had to be made."""

    text: str
    layout: Layout
    facts: Facts
    questions: tuple[str, ...]
    table: tuple[Path, str] | None = None


def draft_run_file(place: Path, path: Path) -> Draft:
    """A run file for the data in `place`, to be written to `path`. Raises ConfigError or DataError; writes nothing but
    the table that it needs, next to `path`."""
    layout = find_layout(place)
    table = None
    if layout.table:
        table = path.with_name(f"{path.stem}-data.csv"), _csv(layout.table)
        _create(*table)
    try:
        data: dict[str, object] = {
            "source": str(table[0]) if table else layout.source,
            "image_folder": layout.image_folder,
        }
        if layout.columns:
            data["columns"] = dict(layout.columns)
        changes: dict[str, object] = {"name": run_file_name(path)}
        changes |= {f"data.{field}": value for field, value in data.items()}
        template = parse_yaml(TEMPLATE.read_text(encoding="utf-8"), TEMPLATE.name)
        tried = {"data.sequence_length": LONGEST}
        facts = look(parse_run_config(apply_overrides(template, changes | tried), str(place)))
        changes |= _sizes(facts)
        questions = (*layout.questions, *_questions(facts, changes))
        text = _header(place, layout, facts, questions) + _changed(TEMPLATE.read_text(encoding="utf-8"), changes)
        parse_run_config(parse_yaml(text, str(path)), str(path))
    except BaseException:
        if table:
            table[0].unlink()
        raise
    return Draft(text, layout, facts, questions, table)


def run_file_name(path: Path) -> str:
    """A name for the run file in `path`, of the form that names must have."""
    words = re.sub(r"[^a-z0-9]+", "-", path.stem.lower()).strip("-")[:50].strip("-")
    return words if len(words) > 3 and words[0].isalpha() else f"data-{words}" if words else "data"


def _create(path: Path, text: str) -> None:
    with os_errors(f"writing {path}"):
        try:
            with path.open("x", encoding="utf-8", newline="") as file:
                file.write(text)
        except FileExistsError:
            raise ConfigError(f"{path} exists already", fix="remove it, or give another name: --output FILE") from None


def _csv(rows: Sequence[Mapping[str, str]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _sizes(facts: Facts) -> dict[str, object]:
    """Lengths, epochs and batches that fit the samples."""
    longest = max(facts.tokens)
    length = max(256, power_of_two(1.25 * longest))
    epochs = math.ceil(8 * STEPS / max(1, facts.coverage.samples))
    few = len(facts.words) < FEW_WORDS
    share = _validation_share(facts)
    return {
        **({"data.validation_fraction": share} if share > DEFAULT_SHARE else {}),
        "model.tokenizer": f"train:{SMALL_VOCABULARY}" if few else "train:2000",
        "data.sequence_length": length,
        "train.epochs": max(1, min(MAX_EPOCHS, epochs)),
        "evaluate.max_new_tokens": min(MAX_ANSWER_TOKENS, facts.answer_tokens + 4),
    }


def _validation_share(facts: Facts) -> float:
    """Return the share of distinct images for validation: a tenth, and more of few images.

    DEFAULT_SHARE where the data has splits.
    """
    if facts.splits.keys() - {"none"}:
        return DEFAULT_SHARE
    return min(0.5, max(DEFAULT_SHARE, round(MIN_VALIDATION / max(1, facts.distinct_images), 2)))


def _questions(facts: Facts, changes: Mapping[str, object]) -> list[str]:
    """Questions that a look cannot answer."""
    questions = []
    width, height = facts.middle_size
    if max(width, height) > 128:
        questions.append(
            f"The images are about {width} x {height} pixels; this small model sees 64 x 64. Is that enough to answer? "
            "A pretrained one sees more: vlmpipe init qwen-vl."
        )
    if not facts.splits.keys() - {"none"}:
        share = _validation_share(facts)
        validation = share * sum(facts.questions.values())
        if share > DEFAULT_SHARE:
            questions.append(
                f"Only {facts.distinct_images} different images, which are never on both sides: {share:.0%} are held "
                "out. Are there more?"
            )
        if validation < FEW_QUESTIONS and not facts.is_part:
            questions.append(
                f"About {validation:.0f} questions are in the validation split: too few to tell models apart. Are "
                "there more data?"
            )
        questions.append("Do records belong together (a patient, a document)? Then name their field in data.split_by.")
    if facts.answer_tokens > MAX_ANSWER_TOKENS:
        questions.append(
            f"The longest answer has {facts.answer_tokens} tokens, and answers are cut at {MAX_ANSWER_TOKENS}."
        )
    if facts.coverage.unread:
        names = ", ".join(sorted(column.name for column in facts.coverage.unread)[:8])
        questions.append(f"Nothing reads {names}. Is something of it needed? Name it in data.columns.")
    if facts.bad:
        questions.append(f"{len(facts.bad):,} samples are bad, such as {facts.bad[0].sentence()}")
    if facts.coverage.without_images:
        questions.append(f"{facts.coverage.without_images:,} samples have no image. Is that meant?")
    return questions


def facts_lines(draft: Draft) -> list[tuple[str, str]]:
    """Findings for people: labels and texts."""
    facts = draft.facts
    width, height = facts.middle_size
    ordered = sorted(facts.tokens)
    median = f"{ordered[len(ordered) // 2]:,} a sample at the median"
    different = f"{len(facts.images):,} different ones in {facts.checked:,} samples that were checked"
    stated = {name: count for name, count in facts.splits.items() if name != "none"}
    splits = ", ".join(f"{count:,} {name}" for name, count in stated.items())
    return [
        ("layout", draft.layout.kind),
        ("samples", f"{facts.read:,}{' of more' if facts.is_part else ''}, {facts.coverage.images:,} images"),
        ("images", f"about {width} x {height} pixels, {different}" if width else "none"),
        ("questions", f"{len(facts.questions):,} different, {len(facts.answers):,} different answers"),
        ("tokens", f"{median}, at most {ordered[-1]:,} of {facts.checked:,} that were checked"),
        ("split", splits or f"{_validation_share(facts):.0%} of the images are held out"),
    ]


def _header(place: Path, layout: Layout, facts: Facts, questions: Sequence[str]) -> str:
    seen = "; ".join(f"{label}: {text}" for label, text in facts_lines(Draft("", layout, facts, ())))
    paragraphs = [("", f"For the data in {place}, written by vlmpipe init after a look at it."), ("", f"{seen}.")]
    if questions:
        paragraphs.append(("", "What it cannot tell:"))
        paragraphs += [("  ", f"{number}. {text}") for number, text in enumerate(questions, 1)]
    # Names and texts of the data: a line end in one would begin a line that is no comment.
    lines = (textwrap.wrap(one_line(text), COLUMNS, initial_indent=f"# {indent}", subsequent_indent=f"# {indent}  ")
             for indent, text in paragraphs)  # fmt: skip
    return "".join(f"{line}\n" for of_paragraph in lines for line in of_paragraph)


def _changed(template: str, changes: Mapping[str, object]) -> str:
    """The template with other values in its lines, which keep their comments; its own heading is left out.

    A field that the template has no line for follows the line before it in `changes` of the same section.
    """
    lines = list(itertools.dropwhile(lambda line: line.startswith("#"), template.splitlines()))
    for path, value in changes.items():
        number, indent = _line_of(lines, path.split("."))
        (above, _, key), shown = path.rpartition("."), json.dumps(value, ensure_ascii=False)
        section, _ = _line_of(lines, above.split("."))
        line = "" if section is None else lines[section]
        if section is not None and (match := re.match(rf"([^#]*[{{ ]{re.escape(key)}: )[^,}}]*", line)):
            lines[section] = f"{match[1]}{shown}{line[match.end() :]}"  # a section of one line
        elif number is None:
            after, indent = _line_of(lines, ["data", "sequence_length"])
            assert after is not None and path.startswith("data.")
            lines.insert(after, f"{' ' * indent}{key}: {shown}")
        else:
            comment = re.search(r"\s{2,}#.*$|\s#\s.*$", lines[number])
            keeps = comment and key not in ("source",)
            lines[number] = f"{' ' * indent}{key}: {shown}" + (comment[0] if comment and keeps else "")
    return "\n".join(line for line in lines if line.strip() != 'image_folder: ""') + "\n"


def _line_of(lines: Sequence[str], path: Sequence[str]) -> tuple[int | None, int]:
    """The line of a field, and its indent."""
    depth, start = 0, 0
    for level, key in enumerate(path):
        line_number = next(
            (
                number
                for number in range(start, len(lines))
                if re.match(rf"^ {{{2 * level}}}{re.escape(key)}:", lines[number])
            ),
            None,
        )
        if line_number is None:
            return None, depth
        start, depth = line_number + 1, 2 * level
    return start - 1, depth
