"""Where a folder's samples are and under which names: the data section of a run file that reads it."""

from __future__ import annotations

import contextlib
import csv
import io
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path

from vlmpipe.trainer.data.sample import IMAGE_SUFFIXES, SPLIT_NAMES
from vlmpipe.trainer.data.sources.file_patterns import SPECIAL
from vlmpipe.trainer.data.sources.split_names import split_in
from vlmpipe.trainer.data.text_files.csv_rows import csv_rows
from vlmpipe.trainer.errors import ConfigError, DataError, os_errors
from vlmpipe.trainer.storage.regular_files import open_regular
from vlmpipe.trainer.storage.user_folders import expanded

METADATA = "metadata.csv"
TABLES = (".csv", ".json", ".jsonl", ".parquet", ".tsv")
SHARDS = (".tar", ".parquet", ".arrow")  # a folder of them is a source
# What people call columns, the likeliest first, compared in lower case.
ALIASES = {
    "image": ("filename", "image_path", "image_file", "img_path", "img", "path", "picture", "photo", "file"),
    "question": ("prompt", "query", "instruction", "input"),
    "answer": ("response", "output", "label", "target", "completion", "class", "category", "description", "title"),
}
READ = {"image": ("file_name", "image", "images"), "question": ("question",), "answer": ("answer", "text", "caption")}
CONVERSATIONS = ("conversations", "messages", "prompt", "texts")  # of a record whose columns are not mapped
LABEL_QUESTION = "What is in the picture?"
LOOKED_AT = 20  # records whose keys are collected
START_BYTES = 1 << 20  # of a CSV file, in which they are looked for


@dataclass(frozen=True)
class Layout:
    """How a run file reads the data.

    kind: for people. table: of class folders and caption files, the rows of a table that has to be written, by columns.
    questions: what cannot be seen in the data.
    """

    source: str
    kind: str
    image_folder: str = ""
    columns: tuple[tuple[str, str], ...] = ()
    table: tuple[dict[str, str], ...] = ()
    questions: tuple[str, ...] = ()


def find_layout(place: Path) -> Layout:
    """The layout of a file or folder. Raises ConfigError or DataError where nothing can be learnt from it."""
    place = expanded(place)  # of --data=~/photos, which shells leave as it is
    if not place.exists():
        raise ConfigError(
            f"--data is {place}, which does not exist",
            expected="a folder or a file of this machine",
            fix="a data set of the Hugging Face hub is fetched first: vlmpipe data fetch OWNER/NAME",
        )
    if place.is_file():
        if place.suffix.lower() in IMAGE_SUFFIXES:
            raise ConfigError(f"--data is one image, {place}", expected="a folder, or a table of images and texts")
        return _with_columns(str(place), place, f"the file {place.name}")
    with os_errors(f"reading {place}"):
        names = sorted(path for path in place.iterdir() if not path.name.startswith("."))
        is_of_shards = any(path.suffix in SHARDS for path in _visible(place))
    if (place / METADATA).is_file():
        return _with_columns(str(place), place / METADATA, f"images with {METADATA}")
    if is_of_shards:
        first = next(iter(sorted(path for path in _visible(place) if path.suffix == ".parquet")), None)
        kind = "a folder of Parquet, Arrow or tar files"
        return _with_columns(str(place), first, "a folder of Parquet files") if first else Layout(str(place), kind)
    tables = [path for path in names if path.suffix.lower() in TABLES]
    if len(tables) == 1:
        return _with_columns(str(tables[0]), tables[0], f"images with {tables[0].name}")
    if _are_splits(tables) and not SPECIAL.search(f"{place}"):
        named = ",".join(path.name for path in tables)
        return _with_columns(f"{place}/{{{named}}}", tables[0], f"images with {' and '.join(named.split(','))}")
    if tables:
        shown = ", ".join(path.name for path in tables[:5])
        raise ConfigError(
            f"{place} holds {len(tables)} tables: {shown}", expected="one", fix=f"name it: --data {tables[0]}"
        )
    return _of_images(place)


def _are_splits(tables: Sequence[Path]) -> bool:
    """Return whether tables of one form are the splits of one data set by their names, such as train.json and
    val.json.
    """
    splits = {split_in(path.name) for path in tables}
    same_format = len({path.suffix.lower() for path in tables}) == 1
    return len(splits) > 1 and None not in splits and same_format and not any("," in path.name for path in tables)


def _visible(place: Path) -> Iterator[Path]:
    """All below a folder, without what programs hide there, such as .ipynb_checkpoints, or copies of it by macOS."""
    for path in place.rglob("*"):
        if not any(part.startswith(".") or part == "__MACOSX" for part in path.relative_to(place).parts):
            yield path


def _of_images(place: Path) -> Layout:
    """Return the layout of a folder of images without a table: .txt files are captions, or else folder names labels."""
    images = sorted(path for path in _visible(place) if path.suffix.lower() in IMAGE_SUFFIXES)
    if not images:
        raise DataError(f"{place} holds no images and no table", expected="images, with texts to learn")
    name = {path: path.relative_to(place).as_posix() for path in images}
    captions = {path: path.with_suffix(".txt") for path in images if path.with_suffix(".txt").is_file()}
    if captions:
        rows = [{"file_name": name[path], "text": _text(text)} for path, text in captions.items()]
        left = len(images) - len(rows)
        questions = (f"{left:,} of {len(images):,} images have no .txt beside them and are left out. Is that meant?",)
        return Layout(
            "", "images with captions in .txt files", str(place), table=tuple(rows), questions=questions if left else ()
        )
    labels = {path: path.relative_to(place).parts[:-1] for path in images}
    # Folders such as train/cat and val/cat state splits, too. Of train/cat alone some are held out.
    splits = {SPLIT_NAMES.get(label[0].lower()) if len(label) > 1 else None for label in labels.values()}
    have_splits = len(splits) > 1 and None not in splits
    are_splits = all(label and label[-1].lower() in SPLIT_NAMES for label in labels.values())
    if len(set(labels.values())) > 1 and all(labels.values()) and not are_splits:
        rows = [
            {"file_name": name[path], "question": LABEL_QUESTION, "answer": label[-1].replace("_", " ")}
            | ({"split": label[0]} if have_splits else {})
            for path, label in labels.items()
        ]
        shown = ", ".join(dict.fromkeys(row["answer"] for row in rows))
        asked = f"The names of folders are taken as answers to {LABEL_QUESTION!r}: {shown[:80]}. Ask it better?"
        return Layout("", "a folder of images for each answer", str(place), table=tuple(rows), questions=(asked,))
    raise DataError(
        f"{place} holds {len(images):,} images and no text to learn",
        expected=f"{METADATA} with file_name, question and answer; a .txt of each image; or a folder for each answer",
        fix="vlmpipe docs bring-your-own-data shows a file",
    )


def _text(path: Path) -> str:
    try:
        with os_errors(f"reading {path}"):
            return path.read_text(encoding="utf-8-sig").strip()
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} is not UTF-8 at byte {error.start:,}",
            expected="captions in UTF-8",
            fix="save it as UTF-8",
        ) from error


def _with_columns(source: str, table: Path, kind: str) -> Layout:
    """The layout of a table, with the columns that have other names than those that are read."""
    keys = list(dict.fromkeys(key for record in islice(_records(table), LOOKED_AT) for key in record))
    folder = _image_folder(table)
    if not keys or set(keys) & set(CONVERSATIONS[:2]):
        return Layout(source, kind, folder)
    columns, questions = dict[str, str](), list[str]()
    read = READ | ({"image": ("file_name",)} if table.suffix.lower() == ".csv" else {})
    for role, aliases in ALIASES.items():
        if set(read[role]) & set(keys):
            continue
        known = [key for alias in (*READ[role], *aliases) for key in keys if key.lower() == alias]
        if known:
            columns[role] = known[0]
            if len(known) > 1:
                questions.append(
                    f"Is the {role} in the column {known[0]!r}, or in {' or '.join(map(repr, known[1:]))}?"
                )
    if not (columns.get("answer") or set(READ["answer"]) & set(keys)):
        questions.append(
            f"Which of these columns is the answer: {', '.join(map(repr, keys[:12]))}? Name it in columns."
        )
    return Layout(
        source, f"{kind}, columns {', '.join(keys[:8])}", folder, tuple(columns.items()), (), tuple(questions)
    )


def _image_folder(table: Path) -> str:
    """The folder of images where records name them without it; empty where they are relative to the table."""
    folder = next((table.parent / name for name in ("images", "image", "imgs", "photos", "train2017") if
                   (table.parent / name).is_dir()), None)  # fmt: skip
    name = next(filter(None, (_named_image(record) for record in islice(_records(table), LOOKED_AT))), "")
    if not folder or not name or (table.parent / name).is_file() or not (folder / name).is_file():
        return ""
    return str(folder)


def _named_image(record: Mapping[str, object]) -> str:
    """The first text of a record that is the name of an image."""
    values = chain.from_iterable(value if isinstance(value, list) else [value] for value in record.values())
    return next((value for value in values if isinstance(value, str) and _is_image(value)), "")


def _is_image(name: str) -> bool:
    return Path(name).suffix.lower() in IMAGE_SUFFIXES


def _records(table: Path) -> Iterator[dict[str, object]]:
    """The first records of a table; none of one that is not read here."""
    suffix = table.suffix.lower()
    with os_errors(f"reading {table}"):
        if suffix == ".csv":
            text = _start_of(table).decode("utf-8-sig", "replace")
            header = text.partition("\n")[0]
            if ";" in header and "," not in header:
                raise DataError(
                    f"{table} has the columns {header.strip()!r}", expected="columns that are separated by commas",
                    fix="save it with commas; spreadsheets ask for the separator",
                )  # fmt: skip
            yield from _rows(text)
        elif suffix == ".parquet":
            import pyarrow.parquet as pq

            yield dict.fromkeys(pq.read_schema(table).names)
        elif suffix == ".jsonl":
            with table.open(encoding="utf-8") as lines:
                yield from _objects(line for line in islice(lines, LOOKED_AT))
        elif suffix == ".json":
            from vlmpipe.trainer.data.text_files.json_stream import open_json

            with open_json(table, "one JSON array of records") as reader:
                yield from (record for record in islice(reader.items(), LOOKED_AT) if isinstance(record, dict))


def _start_of(table: Path) -> bytes:
    """The first bytes of a file that may be larger than memory."""
    with open_regular(table) as file:
        return file.read(START_BYTES)


def _rows(text: str) -> Iterator[dict[str, object]]:
    """Lines of a CSV file by its header; fields beyond it, which the source refuses, have no name."""
    with contextlib.suppress(csv.Error):  # the source's own reader says it better
        for row in csv_rows(io.StringIO(text)):
            yield {name: value for name, value in row.items() if name is not None}


def _objects(lines: Iterable[str]) -> Iterator[dict[str, object]]:
    for line in filter(str.strip, lines):
        try:
            record = json.loads(line)
        except ValueError:  # the source's own reader says it better
            return
        if isinstance(record, dict):
            yield record
