"""Which answers to the retention probe may be taken from an earlier run."""

from __future__ import annotations

from vlmpipe.trainer.config.benchmarks import BenchmarkConfig
from vlmpipe.trainer.data.sample import ImageRef
from vlmpipe.trainer.evaluation.baseline.probe import Probe
from vlmpipe.trainer.evaluation.benchmarks.question import BenchmarkQuestion

BENCHMARK = BenchmarkConfig(name="colors", format="chartqa", uri="questions.json", images="images")


def probe(image: bytes, text: str = "Which color?") -> Probe:
    question = BenchmarkQuestion("1", text, ImageRef("1.png", lambda: image), ("red",))
    return Probe(benchmarks=[(BENCHMARK, [question])])


def test_answers_belong_to_the_bytes_of_a_benchmarks_images_not_to_their_names() -> None:
    assert probe(b"red").digest() == probe(b"red").digest()
    assert probe(b"red").digest() != probe(b"green").digest()
    assert probe(b"red").digest() != probe(b"red", "Which one?").digest()
