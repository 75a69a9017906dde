"""What a model card says about its data."""

from __future__ import annotations

import pytest
import yaml

from tests.support.trainer.tiny_runs import TINY
from vlmpipe.registry.model_card import _data, _escaped, model_card
from vlmpipe.trainer.config.data import DataConfig
from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.records.evaluation import Evaluation
from vlmpipe.trainer.records.summary import Summary


def test_mixed_licences_are_named_with_their_sources_and_a_missing_one_too() -> None:
    sources = [
        {"name": "a", "uri": "a.jsonl", "weight": 3, "license": "CC-BY-4.0"},
        {"name": "b", "uri": "b.jsonl", "weight": 1},
    ]
    said = _data(DataConfig.model_validate({"sources": sources, "sequence_length": 9}))
    assert said == "a (`a.jsonl`, 75.0% of samples, CC-BY-4.0); b (`b.jsonl`, 25.0% of samples, licence not given)"


def test_tokens_are_those_of_all_starts_and_the_card_says_so() -> None:
    job = JobConfig.model_validate(TINY | {"run": {"run_id": "r", "root_uri": "/runs"}})
    summary = Summary(steps=60, tokens=6500, starts=2, steps_made=65, steps_repeated=5)
    assert "| Tokens | 6,500 (in 2 starts, at least 5 steps made twice) |" in model_card(
        job, Evaluation(), summary, model="m"
    )
    once = model_card(job, Evaluation(), Summary(steps=60, tokens=6000, starts=1, steps_repeated=0), model="m")
    assert "| Tokens | 6,000 |" in once


@pytest.mark.parametrize(
    ("checkpoint", "said"),
    [
        ("", "60"),
        ("0001-00000060-abcdef", "60"),
        ("0001-00000040-abcdef", "40, the best of 60 by validation loss"),
        ("0001-00000050-abcdef", "50, of 60"),
    ],
    ids=["not known", "the newest", "the best", "another, as the best is damaged"],
)
def test_steps_are_those_of_the_exported_checkpoint(checkpoint: str, said: str) -> None:
    job = JobConfig.model_validate(TINY | {"run": {"run_id": "r", "root_uri": "/runs"}})
    names = {"checkpoint": "0001-00000060-abcdef", "best_checkpoint": "0001-00000040-abcdef"}
    summary = Summary(steps=60, best_metric="validation_loss", **names)
    card = model_card(job, Evaluation(), summary, model="m", checkpoint=checkpoint)
    assert f"| Optimizer steps | {said} |" in card


@pytest.mark.parametrize(
    "text", ["a\n---\nb: c\n", "\u2028x\u0085y\r\x7f\x80", "'\"#: {x}", "---", "größe \U0001f600", "\n"]
)
def test_the_cards_header_reads_as_it_was_meant_whatever_texts_are_in_it(text: str) -> None:
    job = JobConfig.model_validate(TINY | {"run": {"run_id": "r", "root_uri": "/runs"}})
    job = job.model_copy(update={"data": job.data.model_copy(update={"source": text})})
    card = model_card(job, Evaluation(exact_match=0.5, loss=1.0), Summary(), model="m")
    header = yaml.safe_load(card.split("---\n", 1)[1].split("\n---\n", 1)[0])
    (result,) = header["model-index"][0]["results"]
    assert (result["dataset"]["name"], result["dataset"]["split"]) == (text, "validation")
    assert header["library_name"] == "transformers"


def test_a_control_that_stands_on_fewer_questions_says_on_how_many() -> None:
    job = JobConfig.model_validate(TINY | {"run": {"run_id": "r", "root_uri": "/runs"}})
    control = {"exact_match": 0.2, "questions": 1200, "left_out": 3, "slices": {}}
    evaluation = {"exact_match": 0.5, "controls": {"shuffled_image": control, "no_image": control | {"left_out": 0}}}
    header = next(
        line
        for line in model_card(job, Evaluation.model_validate(evaluation), Summary(), model="m").splitlines()
        if "| majority baseline |" in line
    )
    assert header.count("(1,200 questions)") == 1


HOSTILE = [
    "<script>alert(1)</script>", "![x](https://evil.example/p.png)", "[here](javascript:alert(1))", "https://evil.example",
    "a\n\n# Heading", "| a | b |", "`code`", "\x1b[2J", "<!-- ", "&lt;b&gt;", "*bold* _it_ ~~no~~", "\u202egnp",
]  # fmt: skip


def test_names_from_data_are_shown_and_do_nothing_else() -> None:
    slices = {name: {"exact_match": n / 100, "questions": 9, "chance": 0.5} for n, name in enumerate(HOSTILE)}
    source = {"name": "a", "uri": "a`b<i>.jsonl", "weight": 1, "license": HOSTILE[0]}
    data = {name: value for name, value in TINY["data"].items() if name not in ("source", "max_samples")} | {
        "sources": [source]
    }
    job = JobConfig.model_validate(TINY | {"data": data, "run": {"run_id": "r", "root_uri": "/runs"}})
    card = model_card(job, Evaluation.model_validate({"slices": slices, "exact_match": 0.5}), Summary(), model="m")
    rows = [line for line in card.splitlines() if line.startswith("| ")]
    assert sum("| 9 |" in row for row in rows) == len(HOSTILE), "each name is in one row"
    for text in ("<script", "<!--", "<b>", "![x]", "[here](", "\x1b", "\u202e", "://evil", "\n# Heading"):
        assert text not in card, text
    assert "a'b<i>.jsonl`" in card and "&lt;script&gt;" in card


def test_plain_names_stay_as_they_are() -> None:
    assert _escaped("left digit, 1-2 sum") == "left digit, 1-2 sum"
