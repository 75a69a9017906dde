"""Notes on an evaluation: what a reader of its scores must know, in sentences."""

from __future__ import annotations

from collections.abc import Iterator

from vlmpipe.trainer.records.evaluation import BenchmarkScores, Evaluation, FieldSlices, ranges_sentence


def overlap_sentence(evaluation: Evaluation) -> str:
    """A note about validation and benchmark images that training has seen, or that look like those; "" without any."""
    compared = evaluation.like_train_compared
    notes = [
        _share_sentence(
            evaluation, evaluation.images_also_in_train, "validation images are also in the training split"
        ),
        _share_sentence(
            evaluation, evaluation.images_like_train, "validation images look like training images", compared
        ),
    ]
    for name, scores in evaluation.benchmarks.items():
        sentence = f"images of {name} look like training images"
        notes.append(_share_sentence(scores, scores.images_like_train, sentence, scores.like_train_compared))
    if "images_like_train" in evaluation.model_fields_set and evaluation.images_like_train is None:
        notes.append("it is not known which images look like training images: the data was prepared without signatures")
    return "; ".join(filter(None, notes))


def _share_sentence(
    of: Evaluation | BenchmarkScores, shared: int | None, sentence: str, compared: float | None = None
) -> str:
    """compared: share of the pairs of images that were compared; None: all."""
    if not shared or of.images is None:
        return ""
    partly = f" ({compared:.0%} of the pairs compared)" if compared is not None and compared < 1 else ""
    return f"{shared:,} of {of.images:,} {sentence}{partly}"


def cut_sentence(evaluation: Evaluation) -> str:
    """A note about answers that the limit of tokens cut, or is bound to cut; "" without any."""
    cut, longer, most = evaluation.cut_answers, evaluation.longer_expected_answers, evaluation.max_new_tokens
    parts = []
    limit = _tokens(most)
    if cut:
        parts.append(f"{_answers_were(cut)} cut at {limit}")
    if longer:
        parts.append(f"{longer:,} expected {'answer is' if longer == 1 else 'answers are'} longer than {limit}")
    return " and ".join(parts) and f"{' and '.join(parts)}; raise evaluate.max_new_tokens"


def _tokens(count: int | None) -> str:
    return "1 token" if count == 1 else f"{count} tokens"


def _answers_were(count: int, to: str = "") -> str:
    return f"{count:,} {f'answer{to} was' if count == 1 else f'answers{to} were'}"


def evaluation_notes(evaluation: Evaluation) -> list[str]:
    """Return what a reader of scores must know: the same on the screen, in the report and on the model card."""
    notes = [cut_sentence(evaluation)]
    if start := evaluation.start:
        notes = [start.sentence(), start.retention.sentence() if start.retention else "", start.note, *notes]
    notes += [scores.sentence(form) for form, scores in evaluation.quantized.items()]
    for name, benchmark in evaluation.benchmarks.items():
        if benchmark.cut_answers:
            limit = f"cut at {_tokens(benchmark.max_new_tokens)}; raise its max_new_tokens"
            notes.append(f"{_answers_were(benchmark.cut_answers, f' to {name}')} {limit}")
    notes += [_turns_sentence(evaluation), overlap_sentence(evaluation), _memory_sentence(evaluation)]
    notes += [note for name, of_field in evaluation.by_field.items() for note in _field_notes(name, of_field)]
    return [note for note in notes if note]


def _field_notes(name: str, of_field: FieldSlices) -> Iterator[str]:
    if of_field.obstacle:
        yield f"{name} of data.slices gives no slices: {of_field.obstacle}"
        return
    if of_field.num_ranges:
        yield ranges_sentence(name, of_field.values, of_field.num_ranges)
    if of_field.without:
        yield f"{of_field.without:,} questions have no {name} (data.slices), and are in none of its slices"


def _memory_sentence(evaluation: Evaluation) -> str:
    halved, fits = evaluation.out_of_memory, evaluation.batch_tokens
    if not halved or fits is None:
        return ""
    times = "once" if halved == 1 else f"{halved:,} times"
    text = f"batches of questions did not fit into memory {times}, and were halved until {fits:,} tokens: set"
    return f"{text} evaluate.batch_tokens to that"


def _turns_sentence(evaluation: Evaluation) -> str:
    questions, samples, after = evaluation.questions, evaluation.samples, evaluation.questions_after_turns
    if after:
        return f"{after:,} questions were asked after their sample's earlier turns with the expected answers"
    has_later = questions is not None and samples is not None and questions > samples
    if evaluation.earlier_turns == "none" and has_later:
        return "later turns of a sample were asked alone, not after the earlier ones"
    return ""
