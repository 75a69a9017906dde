"""Every layout of a data set gives the images and labels that it has, or is refused by name."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.support.data.layout_table import LAYOUTS
from tests.support.data.layouts import Layout
from vlmpipe.trainer.config.data import DataConfig
from vlmpipe.trainer.data.accounting.coverage import Coverages
from vlmpipe.trainer.data.accounting.keys import Record
from vlmpipe.trainer.data.conversations.layouts import as_llava
from vlmpipe.trainer.data.prepare.validation.checks import check_image, check_turns
from vlmpipe.trainer.data.rejects import Reject, RejectCode, RejectedError
from vlmpipe.trainer.data.sample import Sample
from vlmpipe.trainer.data.sources import open_source
from vlmpipe.trainer.errors import DataError


def read(layout: Layout, folder: Path) -> tuple[list[Sample], list[Reject]]:
    """The samples and rejects, checked as preparation does before it tokenizes."""
    name = layout.write(folder)
    image_folder = str(folder / "images") if layout.has_folder else ""
    config = DataConfig.model_validate(
        {"source": str(folder / name), "image_folder": image_folder, "sequence_length": 100} | layout.data
    )
    coverages = Coverages(config)
    samples, rejects = [], []
    for record in coverages.counting(open_source(config)):
        if isinstance(record, Reject):
            rejects.append(record)
            continue
        try:
            check_turns(record.turns, len(record.images), ())
            for image in record.images:
                check_image(image.read(), config)
            samples.append(record)
        except RejectedError as error:
            rejects.append(Reject(record.where, record.id, error.code, str(error)))
    coverages.check()
    return samples, rejects


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_is_read_whole_or_refused_by_name(name: str, tmp_path: Path) -> None:
    layout = LAYOUTS[name]
    if layout.images is not None:
        samples, rejects = read(layout, tmp_path)
        assert rejects == []
        assert sum(len(sample.images) for sample in samples) == layout.images
        assert sum(not turn.is_context for sample in samples for turn in sample.turns) == layout.labels
        return
    if layout.refused in set(RejectCode):
        _, rejects = read(layout, tmp_path)
        assert Counter(reject.code for reject in rejects).keys() == {layout.refused}
        assert not any("Type" in reject.message or "Reject(" in reject.message for reject in rejects)
        return
    with pytest.raises(DataError, match=layout.refused):
        read(layout, tmp_path)


def test_there_are_many() -> None:
    assert len(LAYOUTS) >= 60


@pytest.mark.parametrize("messages", [["What?", "A cat."], "What? A cat."])
def test_what_is_no_message_stays_for_its_reader(messages: object) -> None:
    record = as_llava(Record({"image": {"<image_00>": "1.jpg"}, "conversations": messages}))
    assert record.peek("conversations") == messages
