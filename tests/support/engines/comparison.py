"""What a server answers beside what the evaluation did: prompts, answers, and probabilities of first tokens.

Evaluation rounds what a frozen vision encoder gives to bf16, as training does, and a server in fp32 does not. First
tokens are compared with those of a model that does not either, and so are answers that differ.
"""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests.support.paths import ROOT
from vlmpipe.serving.agreement import Disagreement, is_cut_copy, measure_agreement
from vlmpipe.serving.openai import CHAT_PATH, ChatServer, request_body
from vlmpipe.serving.questions import ValidationQuestion, validation_questions
from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.evaluation import evaluate
from vlmpipe.trainer.evaluation.answer import answer_questions, encoded_inputs, published_inputs
from vlmpipe.trainer.evaluation.validation.questions import with_images

RESULTS = ROOT / "build/engines"  # a file for each comparison
TOP = 5  # tokens whose probabilities are compared
DEVICE = torch.device("cpu")


@dataclass
class Comparison:
    """Of one run's questions. Differences are of log probabilities."""

    questions: int = 0
    distinct_answers: int = 0
    equal_answers: int = 0
    cut_answers: int = 0  # of the equal ones, those that are cut within a character
    unrounded_answers: int = 0  # of the others, those that the model gives where features are not rounded
    equal_prompts: int = 0
    largest_difference: float = 0.0
    difference_as_requested: float = 0.0  # the same where each request has options of its own
    others: list[dict[str, Any]] = field(default_factory=list)

    def keep(self, model: str, server: str) -> None:
        """Write it down: what the tables in docs are made of."""
        RESULTS.mkdir(parents=True, exist_ok=True)
        content = {"model": model, "server": server, **asdict(self)}
        (RESULTS / f"{model}, {server}.json").write_text(json.dumps(content, indent=1) + "\n")


def compare(
    job: JobConfig,
    url: str,
    name: str,
    *,
    most: int = 100,
    causal_images: bool = False,
    options: Mapping[str, Any] | None = None,
) -> Comparison:
    """Ask the server at `url` (up to /v1), where the model is called `name`, up to `most` validation questions.

    Args:
        causal_images: first tokens are compared with those of a model whose image tokens see none behind them.
        options: fields of a request, with which first tokens are asked for once more.
    """
    asked = validation_questions(job.run.run_uri, most)
    reference = Reference(job)
    expected = reference.first_tokens(causal_images=causal_images)
    agreement = measure_agreement(asked, ChatServer(f"{url}{CHAT_PATH}", name).ask)
    assert not agreement.unfinished
    found = Comparison(
        questions=agreement.asked,
        equal_answers=agreement.asked - len(agreement.disagreements),
        cut_answers=agreement.cut,
        unrounded_answers=sum(map(reference.gives, agreement.disagreements)),
        others=[asdict(one) for one in agreement.disagreements],
    )
    for one in asked:
        prompt, log_probs = expected[one.id, one.turn]
        tokens, top = first_token(url, name, one)
        found.equal_prompts += tokens == prompt
        found.largest_difference = max(found.largest_difference, difference(top, log_probs))
        if options:
            _, top = first_token(url, name, one, options)
            found.difference_as_requested = max(found.difference_as_requested, difference(top, log_probs))
    found.distinct_answers = len({one.evaluated for one in asked})
    return found


def difference(top: Mapping[int, float], log_probs: Tensor) -> float:
    return max(abs(float(log_probs[token]) - value) for token, value in top.items())


def first_token(
    url: str, name: str, question: ValidationQuestion, options: Mapping[str, Any] | None = None
) -> tuple[list[int], dict[int, float]]:
    """The server's tokens of the prompt, and its log probabilities of the likeliest first tokens."""
    wanted = {
        "logprobs": True, "top_logprobs": TOP, "return_token_ids": True, "return_tokens_as_token_ids": True,
    }  # fmt: skip
    body = json.loads(request_body(name, question.messages, 1)) | wanted | dict(options or {})
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}{CHAT_PATH}", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=120) as reply:
        answer = json.load(reply)
    (first,) = answer["choices"][0]["logprobs"]["content"]
    top = {int(one["token"].removeprefix("token_id:")): one["logprob"] for one in first["top_logprobs"]}
    return answer["prompt_token_ids"], top


class Reference:
    """The export as transformers computes it, without rounding of features."""

    def __init__(self, job: JobConfig) -> None:
        worker: Any = SimpleNamespace(device=DEVICE)
        subject = evaluate.load_subject(job, worker)
        self._model = subject.model
        self._job = job.model_copy(update={"model": job.model.model_copy(update={"freeze": ()})})
        questions = subject.validation.questions(job.evaluate.max_samples, job.evaluate.earlier_turns)
        self._asked = {(one.id, one.turn): asked for one, asked in with_images(subject.validation, questions)}

    def gives(self, one: Disagreement) -> bool:
        """Whether its answer is the served one."""
        most = self._job.evaluate.max_new_tokens
        (found,) = answer_questions(
            self._job, self._model, [self._asked[one.id, one.turn]], DEVICE, max_new_tokens=most
        )
        is_same = found.text == one.served or is_cut_copy(found.text, one.served)
        return is_same and found.finish_reason == one.served_finish

    @torch.inference_mode()
    def first_tokens(self, *, causal_images: bool) -> dict[tuple[str, int], tuple[list[int], Tensor]]:
        """By question and turn: the prompt's tokens, and the log probabilities of the answer's first token."""
        model, found = self._model, {}
        inputs = published_inputs if model.chat.form.published else encoded_inputs
        for key, asked in self._asked.items():
            shown = asked.shown
            prompt = model.chat.prompt(asked.turn, shown.counts, shown.sizes, asked.earlier)
            ids = torch.tensor([prompt])
            given = inputs(self._job, model, [shown], DEVICE, is_blank=False)(ids)
            if causal_images:
                given["token_type_ids"] = torch.zeros_like(ids)
            whole: Any = model.model
            made = whole.generate(
                **{"attention_mask": torch.ones_like(ids), **given},
                max_new_tokens=1,
                do_sample=False,
                output_logits=True,
                return_dict_in_generate=True,
            )
            found[key] = prompt, made.logits[0][0].float().log_softmax(-1)
        return found
