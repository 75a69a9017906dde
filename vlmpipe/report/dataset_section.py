"""Data section of the report: lengths, duplicates, rejects with their images, and a contact sheet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trainer.errors import UserError
from trainer.storage import open_storage
from trainer.storage.base import Storage
from vlmpipe.report.format import count
from vlmpipe.report.load import RunFiles, number
from vlmpipe.report.samples import Picture, thumbnail


@dataclass(frozen=True)
class Histogram:
    """Samples by length; `heights` are shares of the highest bar."""

    split: str
    heights: tuple[float, ...]
    low: str
    high: str
    label: str


@dataclass(frozen=True)
class RejectRow:
    """One reject code with its examples."""

    code: str
    samples: int
    examples: tuple[str, ...]
    pictures: tuple[Picture, ...]


@dataclass(frozen=True)
class SheetCard:
    """One sample as the model gets it."""

    record: dict[str, Any]
    pictures: tuple[Picture, ...]


@dataclass(frozen=True)
class DataView:
    """The data section, ready to be laid out. Parts that are not known are empty."""

    changes: str
    histograms: list[Histogram]
    warnings: list[str]
    rejects: list[RejectRow]
    repairs: list[tuple[str, int]]
    sheet: list[SheetCard]


def data_view(files: RunFiles) -> DataView:
    """Everything about the run's data. Reads the small pictures that preparation has left."""
    uri = files.prepared.get("prepared_uri")
    store = open_storage(uri) if uri else None
    repairs = _dict(files.rejects.get("repairs"))
    return DataView(
        changes=_changes(_dict(files.changes.get("changes"))),
        histograms=_histograms(files.stats),
        warnings=_warnings(files.stats),
        rejects=_rejects(files.rejects, open_storage(files.rejects_uri) if files.rejects_uri else None),
        repairs=[(name.replace("_", " "), int(value)) for name, value in repairs.items() if number(value) is not None],
        sheet=_sheet(files.contact_sheet, store),
    )


def _changes(changes: dict[str, Any]) -> str:
    """What is new in the data, where there was an earlier set to compare with."""
    if number(changes.get("same")) is None:
        return ""
    names = {"new": "new", "changed": "changed", "gone": "gone", "moved": "in the other split", "same": "as before"}
    known = [f"{count(changes[key])} {name}" for key, name in names.items() if number(changes.get(key))]
    before = str(changes.get("before"))[:8]
    return f"Samples against the data that was last prepared under this name ({before}): {', '.join(known) or 'none'}."


def _histograms(stats: dict[str, Any]) -> list[Histogram]:
    found = []
    for split, content in sorted(_dict(stats.get("splits")).items(), reverse=True):  # train first
        histogram = _dict(_dict(content).get("sample_tokens_histogram"))
        bars = [number(value) or 0.0 for value in histogram.get("samples") or []]
        edges = [number(value) or 0.0 for value in histogram.get("edges") or []]
        if not any(bars) or len(edges) != len(bars) + 1:
            continue
        percentiles = _dict(content.get("sample_tokens_percentiles"))
        label = (
            f"Half of the samples in {split} have at most {count(percentiles.get('50'))} tokens, "
            f"95 of 100 at most {count(percentiles.get('95'))}, the longest has {count(percentiles.get('100'))}."
        )
        heights = tuple(bar / max(bars) for bar in bars)
        found.append(Histogram(split, heights, count(round(edges[0])), count(round(edges[-1])), label))
    return found


def _warnings(stats: dict[str, Any]) -> list[str]:
    duplicates = _dict(stats.get("duplicates"))
    sentences = [
        (stats.get("eval_images_also_in_train"),
         "held-out pictures are also in the training split: the held-out score on them means less."),
        (stats.get("eval_samples_also_in_train"),
         "held-out samples are also in the training split, picture and text: the model has seen their answers."),
        (duplicates.get("samples_dropped"), "samples repeat another one's pictures and text, and were left out."),
        ((number(duplicates.get("samples")) or 0) - (number(duplicates.get("samples_dropped")) or 0),
         "samples repeat another one's pictures and text. data.duplicates: drop leaves them out."),
        (duplicates.get("images"), "pictures repeat the bytes of another one."),
    ]  # fmt: skip
    return [f"{count(value)} {sentence}" for value, sentence in sentences if number(value)]


def _rejects(rejects: dict[str, Any], store: Storage | None) -> list[RejectRow]:
    examples, pictures = _dict(rejects.get("examples")), _dict(rejects.get("pictures"))
    rows = []
    for code, samples in _dict(rejects.get("by_code")).items():
        shown = tuple(_picture(name, store) for name in pictures.get(code) or [] if name)
        rows.append(RejectRow(code, samples, tuple(examples.get(code) or [""]), shown))
    return rows


def _sheet(sheet: dict[str, Any], store: Storage | None) -> list[SheetCard]:
    records = [_dict(record) for record in sheet.get("samples") or []]
    return [
        SheetCard(record, tuple(_picture(name, store) for name in record.get("pictures") or [])) for record in records
    ]


def _picture(name: Any, store: Storage | None) -> Picture:
    if store is None:
        return Picture(problem="It is not known where the prepared data lies.")
    try:
        return thumbnail(store.read(str(name)))
    except UserError as error:
        return Picture(problem=f"The picture cannot be read: {error.found}.")


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
