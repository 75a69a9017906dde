"""The run file's `evaluate.benchmarks`, question files of published sets, and `evaluate.retention`."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from pydantic import Field, model_validator

from vlmpipe.trainer.config.base import Positive, Section, StorageUri

BenchmarkFormat = Literal["vqav2", "textvqa", "docvqa", "pope", "mmbench", "chartqa", "coco-captions"]
FORMATS: tuple[BenchmarkFormat, ...] = get_args(BenchmarkFormat)
# Scores of each format by falling importance: the first one is shown by slice and compared question by question.
SCORES: dict[BenchmarkFormat, tuple[str, ...]] = {
    "vqav2": ("vqa_accuracy",),
    "textvqa": ("vqa_accuracy",),
    "docvqa": ("anls",),
    "pope": ("accuracy", "precision", "recall", "f1", "yes_ratio"),
    "mmbench": ("accuracy", "circular_accuracy"),
    "chartqa": ("relaxed_accuracy",),
    "coco-captions": ("cider_d", "bleu_4", "rouge_l"),
}
TITLES = {
    "vqa_accuracy": "VQA accuracy", "anls": "ANLS", "accuracy": "accuracy", "precision": "precision",
    "recall": "recall", "f1": "F1", "yes_ratio": "share of yes", "circular_accuracy": "circular accuracy",
    "relaxed_accuracy": "relaxed accuracy", "cider_d": "CIDEr-D", "bleu_4": "BLEU-4", "rouge_l": "ROUGE-L",
}  # fmt: skip
# Longest answers in tokens, where the run file has no limit for the benchmark.
ANSWER_TOKENS: dict[BenchmarkFormat, int] = {
    "vqav2": 16, "textvqa": 32, "docvqa": 64, "pope": 16, "mmbench": 32, "chartqa": 32, "coco-captions": 64,
}  # fmt: skip
NO_GOAL = ("yes_ratio",)  # neither high nor low values are better
ANSWERS_FOLDER = "benchmarks"  # in a run: <name>.jsonl, the answers to a benchmark's questions
MAX_CIDER_D = 10.0  # all other scores end at 1


class BenchmarkConfig(Section):
    """A question file to score the exported model on, after the validation questions."""

    name: str = Field(
        pattern=r"^[a-z0-9][a-z0-9._-]{0,63}$",
        description="Name in evaluate.json, report and gate, for example pope-random.",
    )
    format: BenchmarkFormat = Field(description="Published format of the file, which decides how answers are scored.")
    uri: StorageUri = Field(
        min_length=1,
        description="File of questions, local or in a bucket; for other formats than vqav2 it also holds the answers.",
    )
    annotations: StorageUri = Field("", description="VQAv2's annotations, which hold the answers. For vqav2 only.")
    images: StorageUri = Field("", description="Folder of the images that the file names. Not for mmbench.")
    prompt: str = Field(
        "",
        description="Text of each question, with {question} in place of the file's; empty is the question alone, for "
        "mmbench with its choices, for coco-captions a request for a caption.",
    )
    max_questions: int = Field(0, ge=0, description="Questions to ask, evenly spaced in the file; 0 is all.")
    max_new_tokens: int = Field(
        0,
        ge=0,
        description="Longest answer in tokens; 0 takes the format's default: 16 for vqav2 and pope, 32 for textvqa, "
        "mmbench and chartqa, 64 for docvqa and coco-captions.",
    )

    @property
    def answer_tokens(self) -> int:
        """The limit of an answer."""
        return self.max_new_tokens or ANSWER_TOKENS[self.format]

    @model_validator(mode="after")
    def _fits_its_format(self) -> BenchmarkConfig:
        if bool(self.annotations) != (self.format == "vqav2"):
            have = "found without annotations" if self.format == "vqav2" else "found with annotations"
            raise ValueError(f"{have}, which format vqav2 needs and no other has")
        if bool(self.images) == (self.format == "mmbench"):
            have = "found with images" if self.images else "found without images"
            raise ValueError(f"{have}, a folder that every format needs but mmbench, whose file holds its images")
        if self.prompt and self.format != "coco-captions" and "{question}" not in self.prompt:
            raise ValueError("found a prompt without {question}, which would ask every question in the same words")
        return self


# Questions that a model of images can answer in a word, whatever it is trained on.
GENERAL_PROMPTS = (
    "What is the main object in the image? Answer in one word.",
    "Is there text in the image? Answer yes or no.",
    "What is the main color of the image? Answer in one word.",
)
MIN_BENCHMARK_QUESTIONS = 50  # of a benchmark in the probe, where it has as many


class RetentionConfig(Section):
    """The retention probe: questions to the start weights and to the trained ones, beside the validation questions."""

    probe: Literal["auto", "off"] = Field(
        "auto",
        description="auto takes a share of the questions of evaluate.benchmarks, but of coco-captions; without any it "
        "compares both models' answers to prompts about validation images. off asks nothing.",
    )
    benchmark_share: float = Field(
        0.25,
        gt=0,
        le=1,
        description="Share of each benchmark's questions, evenly spaced in its file; at least 50 where it has as many.",
    )
    prompts: tuple[Annotated[str, Field(min_length=1)], ...] = Field(
        GENERAL_PROMPTS,
        description="Prompts about each image where there are no benchmarks; the default asks for object, text and "
        "color. An answer is kept if the trained model gives the same one.",
    )
    max_images: Positive = Field(
        50,
        description="Most validation images, evenly spaced, that prompts are asked about. Lower it for a faster "
        "evaluation.",
    )

    def benchmark_questions(self, count: int) -> int:
        """Return how many of a benchmark's `count` questions the probe takes."""
        return min(count, max(MIN_BENCHMARK_QUESTIONS, round(self.benchmark_share * count)))
