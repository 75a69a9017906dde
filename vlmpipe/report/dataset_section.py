"""Data section of the report: lengths, duplicates, rejects with their images, and a contact sheet."""

from __future__ import annotations

from vlmpipe.report.load import RunFiles, count, mapping, number, sequence
from vlmpipe.report.samples import EmbeddedImage, thumbnail
from vlmpipe.trainer.data.accounting.coverage import images_sentence, not_read
from vlmpipe.trainer.errors import UserError
from vlmpipe.trainer.storage import open_storage
from vlmpipe.trainer.storage.base import Storage


def data_view(files: RunFiles) -> dict[str, object]:
    """Values for the template from the run's data; unknown parts are empty. Reads preparation's small images."""
    uri = files.prepared.prepared_uri if files.prepared else ""
    repairs = mapping(files.rejects.get("repairs"))
    return {
        "changes": _changes(mapping(files.changes.get("changes"))),
        "sources": _sources(files.stats),
        "histograms": _histograms(files.stats),
        "warnings": [*_coverage(files.stats), *_warnings(files.stats)],
        "rejects": _rejects(files.rejects, open_storage(files.rejects_uri) if files.rejects_uri else None),
        "repairs": [(name.replace("_", " "), value) for name, value in repairs.items() if number(value) is not None],
        "sheet": _sheet(files.contact_sheet, open_storage(uri) if uri else None),
    }


def _changes(changes: dict[str, object]) -> str:
    """Changes of the data since the set prepared before; "" without one."""
    if number(changes.get("same")) is None:
        return ""
    names = {"new": "new", "changed": "changed", "gone": "gone", "moved": "in the other split", "same": "as before"}
    known = [f"{count(changes[key])} {name}" for key, name in names.items() if number(changes.get(key))]
    before = str(changes.get("before"))[:8]
    return f"Samples against the data that was last prepared under this name ({before}): {', '.join(known) or 'none'}."


def _sources(stats: dict[str, object]) -> list[tuple[str, list[object]]]:
    """Name of each source; its samples for training and validation, its images, its share of the tokens in percent."""
    sums = {
        name: [mapping(content).get(split, {}) for split in ("train", "eval")]
        for name, content in mapping(stats.get("sources")).items()
    }
    tokens = {name: sum(number(mapping(split).get("tokens")) or 0 for split in splits) for name, splits in sums.items()}
    whole = sum(tokens.values()) or 1
    return [
        (
            name,
            [
                *(number(mapping(split).get("samples")) for split in splits),
                sum(number(mapping(split).get("images")) or 0 for split in splits),
                round(100 * tokens[name] / whole, 1),
            ],
        )
        for name, splits in sums.items()
    ]


def _histograms(stats: dict[str, object]) -> list[dict[str, object]]:
    """Samples by length, training first; `heights` are shares of the highest bar."""
    histograms = list[dict[str, object]]()
    for split, content in sorted(mapping(stats.get("splits")).items(), reverse=True):
        histogram = mapping(mapping(content).get("sample_tokens_histogram"))
        bars = [number(value) or 0.0 for value in sequence(histogram.get("samples"))]
        edges = [number(value) or 0.0 for value in sequence(histogram.get("edges"))]
        if not any(bars) or len(edges) != len(bars) + 1:
            continue
        percentiles = mapping(mapping(content).get("sample_tokens_percentiles"))
        label = (
            f"Half of the samples in {split} have at most {count(percentiles.get('50'))} tokens, "
            f"95 of 100 at most {count(percentiles.get('95'))}, the longest has {count(percentiles.get('100'))}."
        )
        heights, ends = [bar / max(bars) for bar in bars], (count(round(edges[0])), count(round(edges[-1])))
        histograms.append({"split": split, "heights": heights, "low": ends[0], "high": ends[1], "label": label})
    return histograms


def _coverage(stats: dict[str, object]) -> list[str]:
    """Images, samples without one, and keys of the records that nothing read; nothing for older statistics."""
    splits = [mapping(split) for split in mapping(stats.get("splits")).values()]
    if not any(number(split.get("images")) is not None for split in splits):
        return []
    images = sum(int(number(split.get("images")) or 0) for split in splits)
    without = sum(int(number(next(iter(sequence(split.get("images_per_sample"))), 0)) or 0) for split in splits)
    lines = [images_sentence(images, without)]
    coverage = mapping(stats.get("coverage"))
    sources = mapping(coverage.get("sources"))
    for name, source in sources.items():
        unread = {key: int(number(times) or 0) for key, times in mapping(mapping(source).get("unread")).items()}
        if unread:
            of = f" of {name}" if len(sources) > 1 else ""
            lines.append(
                f"Keys{of}" + not_read(unread, int(number(mapping(source).get("samples")) or 0)).replace(";", "", 1)
            )
    return lines + [str(note) for note in sequence(coverage.get("notes"))]


def _warnings(stats: dict[str, object]) -> list[str]:
    duplicates = mapping(stats.get("duplicates"))
    sentences = [
        (stats.get("eval_images_also_in_train"),
         "validation images are also in the training split: the validation score on them means less."),
        (mapping(stats.get("near_duplicates")).get("eval_images"),
         "validation images look like images of the training split: the validation score on them means less."),
        (stats.get("eval_samples_also_in_train"),
         "validation samples are also in the training split, image and text: the model has seen their answers."),
        (duplicates.get("samples_dropped"), "samples repeat another one's images and text, and were left out."),
        ((number(duplicates.get("samples")) or 0) - (number(duplicates.get("samples_dropped")) or 0),
         "samples repeat another one's images and text. data.duplicates: drop leaves them out."),
        (duplicates.get("images"), "images repeat the bytes of another one."),
    ]  # fmt: skip
    return [f"{count(value)} {sentence}" for value, sentence in sentences if number(value)]


def _rejects(rejects: dict[str, object], store: Storage | None) -> list[dict[str, object]]:
    examples, images = mapping(rejects.get("examples")), mapping(rejects.get("pictures"))
    return [
        {
            "code": code,
            "samples": samples,
            "example": next(iter(sequence(examples.get(code))), ""),
            "images": [_embedded(str(name), store) for name in sequence(images.get(code)) if name],
        }
        for code, samples in mapping(rejects.get("by_code")).items()
    ]


def _sheet(sheet: dict[str, object], store: Storage | None) -> list[dict[str, object]]:
    records = map(mapping, sequence(sheet.get("samples")))
    return [
        {"record": record, "images": [_embedded(str(name), store) for name in sequence(record.get("pictures"))]}
        for record in records
    ]


def _embedded(name: object, store: Storage | None) -> EmbeddedImage:
    if store is None:
        return EmbeddedImage(problem="The folder of the prepared data is not known.")
    try:
        return thumbnail(store.read(str(name)))
    except UserError as error:
        return EmbeddedImage(problem=f"The image cannot be read: {error.found}.")
