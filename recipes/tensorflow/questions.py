"""Questions about images, from the TFRecord files of `vlmpipe data export --format tfrecord`.

All in TensorFlow's operators, which run in tf.data's threads, in a parameter server's workers and in a SavedModel.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import tensorflow as tf

MAX_ANSWERS = 1000  # classes; rarer answers are left out
SHUFFLED = 1 << 15  # questions in the shuffle's buffer
SIDE = 64  # pixels of an image
WORD_IDS = 512
FEATURES = {"messages": tf.io.FixedLenFeature([], tf.string), "images": tf.io.RaggedFeature(tf.string)}


def read_questions(folder: Path, split: str) -> tf.data.Dataset:
    """Encoded image, question and answer (strings) of every turn; samples without exactly one image are left out."""
    files = sorted(str(path) for path in folder.glob(f"{split}-*.tfrecord"))
    if not files:
        raise SystemExit(f"no {split}-*.tfrecord in {folder}; train.trainer.data_format must be tfrecord")
    return tf.data.TFRecordDataset(files).flat_map(_turns)


def _turns(record: tf.Tensor) -> tf.data.Dataset:
    """`messages` is a JSON text. Quotes within a content are escaped, so that marks are found between contents only."""
    sample = tf.io.parse_single_example(record, FEATURES)
    messages = tf.strings.split(sample["messages"], '{"role": "')
    contents = tf.strings.regex_replace(messages, r'(?s)^\w+", "content": "((?:[^"\\]|\\.)*)".*', r"\1")
    questions = tf.boolean_mask(contents, tf.strings.regex_full_match(messages, '(?s)user".*'))
    answers = tf.boolean_mask(contents, tf.strings.regex_full_match(messages, '(?s)assistant".*'))
    questions = tf.strings.regex_replace(questions, r"(\\n)?<image>(\\n)?", "")
    turns = tf.where(tf.size(sample["images"]) == 1, tf.size(answers), 0)
    images = tf.repeat(sample["images"][:1], turns)
    return tf.data.Dataset.from_tensor_slices((images, questions[:turns], answers[:turns]))


def frequent_answers(folder: Path) -> list[bytes]:
    """The training split's answers, the most frequent first."""
    counts = Counter(answer for _, _, answer in read_questions(folder, "train").as_numpy_iterator())
    return [answer for answer, _ in sorted(counts.items(), key=lambda one: (-one[1], one[0]))[:MAX_ANSWERS]]


def training_order(folder: Path, answers: list[bytes], seed: int) -> tf.data.Dataset:
    """Encoded image, question and class, without end, each epoch in an order of its own: the same in all processes."""
    known = tf.constant(answers)

    def as_class(image: tf.Tensor, question: tf.Tensor, answer: tf.Tensor) -> tuple[tf.Tensor, ...]:
        return image, question, tf.argmax(known == answer)

    questions = read_questions(folder, "train").filter(lambda image, question, answer: tf.reduce_any(known == answer))
    return questions.map(as_class).shuffle(SHUFFLED, seed=seed).repeat()


def pixels_of(images: tf.Tensor) -> tf.Tensor:
    """float32 [n, SIDE, SIDE, 3] from 0 to 1, of PNG or JPEG files."""

    def decoded(image: tf.Tensor) -> tf.Tensor:
        picture = tf.io.decode_image(image, channels=3, expand_animations=False)
        return tf.ensure_shape(tf.image.resize(picture, (SIDE, SIDE)) / 255.0, (SIDE, SIDE, 3))

    return tf.map_fn(decoded, images, fn_output_signature=tf.float32)


def bag_of_words(questions: tf.Tensor) -> tf.Tensor:
    """float32 [n, WORD_IDS]: how often each word occurs, by its hash."""
    words = tf.strings.split(tf.strings.regex_replace(tf.strings.lower(questions), r"[^a-z0-9]+", " "))
    ids = tf.strings.to_hash_bucket_fast(words, WORD_IDS)
    return tf.reduce_sum(tf.one_hot(ids.to_tensor(-1), WORD_IDS), axis=1)
