"""Notes of an evaluation."""

from __future__ import annotations

from vlmpipe.trainer.records.evaluation import Evaluation
from vlmpipe.trainer.records.evaluation_notes import cut_sentence, evaluation_notes


def test_one_token_is_written_as_one() -> None:
    evaluation = Evaluation(questions=9, max_new_tokens=1, cut_answers=1, longer_expected_answers=1)
    assert cut_sentence(evaluation) == (
        "1 answer was cut at 1 token and 1 expected answer is longer than 1 token; raise evaluate.max_new_tokens"
    )


def test_notes_name_every_limit_of_the_scores() -> None:
    evaluation = {
        "questions": 30, "samples": 10, "earlier_turns": "reference", "questions_after_turns": 20,
        "max_new_tokens": 16, "cut_answers": 3, "longer_expected_answers": 2,
        "images": 9, "images_like_train": 1, "like_train_compared": 0.5,
        "benchmarks": {"captions": {"cut_answers": 4, "max_new_tokens": 8}, "whole": {"cut_answers": 0}},
        "out_of_memory": 2, "batch_tokens": 4096,
    }  # fmt: skip
    assert evaluation_notes(Evaluation.model_validate(evaluation)) == [
        "3 answers were cut at 16 tokens and 2 expected answers are longer than 16 tokens; "
        "raise evaluate.max_new_tokens",
        "4 answers to captions were cut at 8 tokens; raise its max_new_tokens",
        "20 questions were asked after their sample's earlier turns with the expected answers",
        "1 of 9 validation images look like training images (50% of the pairs compared)",
        "batches of questions did not fit into memory 2 times, and were halved until 4,096 tokens: set "
        "evaluate.batch_tokens to that",
    ]
    alone = Evaluation(questions=30, samples=10, earlier_turns="none", questions_after_turns=0)
    assert evaluation_notes(alone) == ["later turns of a sample were asked alone, not after the earlier ones"]
    assert evaluation_notes(alone.model_copy(update={"samples": 30})) == evaluation_notes(Evaluation()) == []


def test_notes_say_of_each_quantized_export_what_became_of_it() -> None:
    scores = {
        "accepted": True, "min_agreement": 0.98, "questions": 1000, "same": 990, "before": 0.94, "after": 0.935,
        "interval": [-0.01, 0.001], "export_bytes": 4 << 20, "quantized_bytes": 1 << 20,
    }  # fmt: skip
    of_formats = {"int4": scores, "fp8": scores | {"accepted": False, "same": 979}}
    evaluation = {"quantized": of_formats | {"int3": {"obstacle": "there is no such format"}}}
    told = "exact match 0.935 in place of 0.940 (-0.010 to +0.001, each end at 5 %); 1.0 MiB in place of 4.0"
    assert evaluation_notes(Evaluation.model_validate(evaluation)) == [
        f"int4 export accepted: 0.990 of 1,000 answers are the export's, 0.980 required; {told}",
        f"fp8 export refused and deleted: 0.979 of 1,000 answers are the export's, 0.980 required; {told}",
        "no int3 export: there is no such format",
    ]
