"""A small network that chooses an answer to a question about an image, and the SavedModel that answers in words."""

from __future__ import annotations

import keras
import tensorflow as tf
from questions import SIDE, WORD_IDS, bag_of_words, pixels_of


def build(answers: int) -> keras.Model:
    """Pixels and words of the question to logits of the answers. No batch normalization: it depends on the replicas."""
    pixels = keras.Input((SIDE, SIDE, 3))
    words = keras.Input((WORD_IDS,))
    seen = keras.layers.Conv2D(32, 5, strides=4, padding="same", activation="relu")(pixels)
    seen = keras.layers.Conv2D(64, 3, strides=2, padding="same", activation="relu")(seen)
    seen = keras.layers.Dense(256, activation="relu")(keras.layers.Flatten()(seen))
    asked = keras.layers.Dense(256)(words)
    both = keras.layers.Concatenate()([keras.layers.Multiply()([seen, asked]), asked])
    both = keras.layers.Dense(256, activation="relu")(both)
    return keras.Model([pixels, words], keras.layers.Dense(answers)(both))


class Answerer(tf.Module):
    """What is saved and served: encoded images and questions in, answers out."""

    def __init__(self, model: keras.Model, answers: list[bytes]) -> None:
        super().__init__()
        self.model, self.answers = model, tf.constant(answers)

    @tf.function(
        input_signature=[
            tf.TensorSpec([None], tf.string, name="images"),
            tf.TensorSpec([None], tf.string, name="questions"),
        ]
    )
    def answer(self, images: tf.Tensor, questions: tf.Tensor) -> dict[str, tf.Tensor]:
        logits = self.model([pixels_of(images), bag_of_words(questions)])
        return {"answers": tf.gather(self.answers, tf.argmax(logits, axis=-1))}


def export(weights: list, answers: list[bytes], folder: str) -> None:
    """Write the SavedModel.

    Its model is made anew, outside of any strategy: the chief can save it alone.
    """
    model = build(len(answers))
    model.set_weights(weights)
    answerer = Answerer(model, answers)
    tf.saved_model.save(answerer, folder, signatures={"serving_default": answerer.answer})
