"""Samples about copies of one image, about images that far more samples have than others, and about blank ones."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from vlmpipe.trainer.audit.catalogue import Catalogue
from vlmpipe.trainer.audit.findings import Finding, Flagged, collected
from vlmpipe.trainer.audit.images.image_groups import ImageGroups
from vlmpipe.trainer.audit.images.image_vectors import ImageVectors
from vlmpipe.trainer.audit.images.search import EXTRA, MAX_INDEXED, has_index
from vlmpipe.trainer.extras import install_command

LISTED_SHARED = 20  # samples of an image that are listed
TEXTS = 2000  # samples of a finding that are listed with their texts
SHARED_TIMES, SHARED_FEWEST = 10, 20  # samples of an image: this many times the median, and at least this number

Answers = dict[int, tuple[tuple[int, ...], tuple[int, ...]]]  # digests of questions and answers, by sample


def near_duplicates(catalogue: Catalogue, groups: ImageGroups, vectors: ImageVectors) -> Finding:
    """Samples of copied images. Excluded: training samples whose image has a copy in the validation split, and of
    samples of one split with equal questions and answers all but the first.
    """
    members = _samples_of_groups(catalogue, groups.of_image)
    texts = said_by(catalogue, [sample for samples in members.values() for sample in samples])
    flagged: list[Flagged] = []
    for group, samples in sorted(members.items()):
        images = {int(image_row) for sample in samples for image_row in catalogue.images_of(sample)}
        copies = sum(groups.of_image[image_row] == group for image_row in images)
        validation = [sample for sample in samples if catalogue.split_of(sample) == "eval"]
        firsts: dict[object, int] = {}
        for sample in sorted(samples, key=lambda member: (catalogue.split_of(member), catalogue.id_of(member))):
            leaks = bool(validation) and catalogue.split_of(sample) == "train"
            first = firsts.setdefault((catalogue.split_of(sample), texts[sample]), sample)
            detail = f"one of {copies} copies of an image"
            if leaks:
                detail = f"copy of the image of {catalogue.id_of(validation[0])} in the validation split"
            elif first != sample:
                detail = f"repeats {catalogue.id_of(first)}: copied image, equal text"
            is_excluded, with_text = leaks or first != sample, len(flagged) < TEXTS
            member = flag(catalogue, sample, "near_duplicate", detail, group, excluded=is_excluded, with_text=with_text)
            flagged.append(member)
    obstacle = ""
    if vectors.left_out:
        more = "" if has_index() else f"{install_command(EXTRA)} for up to {MAX_INDEXED:,}, or "
        obstacle = (
            f"{vectors.left_out:,} of {len(catalogue.images):,} images were not compared: {len(vectors.rows):,} are at "
            f"most; {more}audit run files with a part of data.sources each"
        )
    advice = "exclude the copies: those of validation images from training, and repeats within a split"
    return collected("near_duplicate", flagged, checked=len(vectors.rows), advice=advice, obstacle=obstacle)


def shared_images(catalogue: Catalogue) -> Finding:
    """Samples of images that far more samples have than the rest. None is excluded: their
    texts may be right.
    """
    starts, samples = catalogue.samples_by_image()
    counts = np.diff(starts)
    limit = max(SHARED_FEWEST, SHARED_TIMES * float(np.median(counts)) if len(counts) else 0)
    flagged: list[Flagged] = []
    met: set[int] = set()
    for number, image_row in enumerate(np.flatnonzero(counts >= limit).tolist(), 1):
        of_image = samples[starts[image_row] : starts[image_row + 1]]
        alone = sum(len(catalogue.images_of(sample)) == 1 for sample in of_image.tolist())
        detail = (
            f"its image is in {len(of_image):,} samples, {alone:,} of which have no other; half of all images are in "
        )
        detail += f"{np.median(counts):g} or fewer"
        first = int(of_image[0])
        flagged += [
            flag(catalogue, int(sample), "shared_image", detail, number, len(of_image), with_text=int(sample) == first)
            for sample in of_image[:LISTED_SHARED]
        ]
        met.update(of_image.tolist())
    advice = "check for logos and blank pages: they join samples into one group of a split; see data.max_image_share"
    return collected("shared_image", flagged, checked=len(counts), advice=advice, samples=len(met))


def blank_images(catalogue: Catalogue, vectors: ImageVectors) -> Finding:
    """Samples whose images are all blank: without structure that a hash could hold."""
    blank = vectors.without_structure
    flagged = []
    is_blank = np.zeros(len(catalogue.images), np.bool_)
    is_blank[sorted(blank)] = True
    starts, samples = catalogue.samples_by_image()
    candidates = {
        int(member) for image_row in sorted(blank) for member in samples[starts[image_row] : starts[image_row + 1]]
    }
    for sample in sorted(candidates):
        if is_blank[catalogue.images_of(sample)].all():
            flagged.append(flag(catalogue, sample, "blank_image", "its images are blank", excluded=True))
    advice = "exclude them, unless the question is whether there is anything to see"
    return collected("blank_image", flagged, checked=len(catalogue.images), advice=advice)


def flag(
    catalogue: Catalogue,
    sample: int,
    kind: str,
    detail: str,
    group: int = 0,
    score: float = 0.0,
    *,
    turn: int = 0,
    excluded: bool = False,
    with_text: bool = True,
) -> Flagged:
    """A flagged sample with the texts of a turn."""
    question, answer = catalogue.texts(sample, turn) if with_text else ("", "")
    return Flagged.model_validate(
        {
            "id": catalogue.id_of(sample),
            "split": catalogue.split_of(sample),
            "kind": kind,
            "detail": detail,
            "group": group,
            "score": score,
            "question": question,
            "answer": answer,
            "is_excluded": excluded,
        }
    )


def said_by(catalogue: Catalogue, samples: Sequence[int]) -> Answers:
    """Digests of the questions and answers of some samples."""
    turns = catalogue.turns
    texts_of: Answers = {}
    for sample in set(samples):
        start, end = np.searchsorted(turns["sample"], [sample, sample + 1])
        texts_of[sample] = (tuple(turns["question"][start:end].tolist()), tuple(turns["answer"][start:end].tolist()))
    return texts_of


def _samples_of_groups(catalogue: Catalogue, groups: NDArray[np.int64]) -> dict[int, list[int]]:
    """The samples of each group of images, each sample in the first group of its images."""
    starts, samples = catalogue.samples_by_image()
    of_sample: dict[int, int] = {}
    for image_row in np.flatnonzero(groups).tolist():
        for sample in samples[starts[image_row] : starts[image_row + 1]].tolist():
            of_sample[sample] = min(int(groups[image_row]), of_sample.get(sample, int(groups[image_row])))
    members: dict[int, list[int]] = defaultdict(list)
    for sample, group in of_sample.items():
        members[group].append(sample)
    return members
