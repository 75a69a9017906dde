"""Trains a small model that answers questions about images with TensorFlow, in one process or several.

vlmpipe starts it once on each replica, with TF_CONFIG; the run files beside it have its command. It imports nothing of
vlmpipe.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import keras
import model
import numpy as np
import tensorflow as tf
from questions import bag_of_words, frequent_answers, pixels_of, training_order

STOPPED = 75  # exit code of a run that saved a checkpoint and can be resumed
STATE = "state.npz"
SUM = tf.distribute.ReduceOp.SUM
Steps = Callable[[int], tuple[float, bool]]  # make so many steps: their mean loss, and whether to stop

asked_to_stop = False  # by SIGTERM


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--strategy", choices=("mirrored", "multiworker", "parameter-server"), required=True)
    parser.add_argument("--cpu-devices", type=int, default=1, help="mirrored without GPUs: replicas on this many CPUs")
    for name in ("data", "output", "checkpoints"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--resume", type=Path, help="checkpoint to continue from")
    for name in ("steps", "batch", "save-every", "log-every", "seed"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--learning-rate", type=float, required=True)
    return parser.parse_args()


class State:
    """Model, optimizer and what was done; the strategy decides where the variables lie."""

    def __init__(self, given: argparse.Namespace, strategy: tf.distribute.Strategy) -> None:
        self._given, self.answers = given, frequent_answers(given.data)
        with strategy.scope():
            keras.utils.set_random_seed(given.seed)
            self.model = model.build(len(self.answers))
            warmup = max(1, given.steps // 30)
            schedule = keras.optimizers.schedules.CosineDecay(
                0.0, given.steps, warmup_target=given.learning_rate, warmup_steps=warmup
            )
            self.optimizer = keras.optimizers.Adam(schedule)
            self.optimizer.build(self.model.trainable_variables)
        self.done, self._log = 0, []
        if given.resume:
            self._read(given.resume)

    def order(self) -> tf.data.Dataset:
        """Encoded image, question and class of the questions that come next."""
        return training_order(self._given.data, self.answers, self._given.seed).skip(self.done * self._given.batch)

    def learn(self, pixels: tf.Tensor, words: tf.Tensor, classes: tf.Tensor) -> tf.Tensor:
        """One replica's share of a step. The loss is its part of the batch's mean: sums over replicas are the mean.

        The optimizer sums gradients over the replicas.
        """
        with tf.GradientTape() as tape:
            logits = self.model([pixels, words], training=True)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(classes, logits)
            loss = tf.reduce_sum(losses) / self._given.batch
        weights = self.model.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return loss

    def note(self, steps: int, loss: float) -> None:
        """Steps that were made, and their loss, for vlmpipe."""
        self.done += steps
        self._log.append({"step": self.done, "loss": loss})
        with Path(os.environ["VLMPIPE_METRICS"]).open("a", encoding="utf-8") as metrics:
            print(json.dumps({**self._log[-1], "total_steps": self._given.steps}), file=metrics)

    def save(self) -> None:
        """A checkpoint; trainer_state.json last, which makes it one.

        Through the chief's memory: tf.train.Checkpoint writes a variable on the disk of the process that holds it,
        which may be a parameter server.
        """
        folder = self._given.checkpoints / f"checkpoint-{self.done}"
        folder.mkdir(parents=True, exist_ok=True)
        np.savez(folder / STATE, *map(keras.ops.convert_to_numpy, self._variables))
        state = {"global_step": self.done, "max_steps": self._given.steps, "log_history": self._log}
        (folder / "trainer_state.json").write_text(json.dumps(state), encoding="utf-8")

    def _read(self, folder: Path) -> None:
        with np.load(folder / STATE) as arrays:
            for variable, name in zip(self._variables, arrays.files, strict=True):
                variable.assign(arrays[name])
        state = json.loads((folder / "trainer_state.json").read_text(encoding="utf-8"))
        self.done, self._log = state["global_step"], state["log_history"]

    @property
    def _variables(self) -> list[keras.Variable]:
        return [*self.model.variables, *self.optimizer.variables]

    @property
    def steps_to_pause(self) -> int:
        """Steps to the next one that is logged, saved, or the last."""
        given = self._given
        return min(every - self.done % every for every in (given.log_every, given.save_every, given.steps))

    @property
    def is_due(self) -> bool:
        return self.done % self._given.save_every == 0 and self.done < self._given.steps


def synchronous_steps(given: argparse.Namespace, strategy: tf.distribute.Strategy, state: State) -> Steps:
    """Each step uses one batch: every process reads its share of it, and gradients are summed over all replicas."""

    def share(context: tf.distribute.InputContext) -> tf.data.Dataset:
        mine = state.order().shard(context.num_input_pipelines, context.input_pipeline_id)
        batches = mine.batch(context.get_per_replica_batch_size(given.batch), drop_remainder=True)
        return batches.map(lambda images, questions, classes: (pixels_of(images), bag_of_words(questions), classes))

    @tf.function
    def step(batch: tuple[tf.Tensor, ...], stop: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        loss, stops = strategy.run(lambda *batch: (state.learn(*batch), tf.identity(stop)), args=batch)
        return strategy.reduce(SUM, loss, axis=None), strategy.reduce(SUM, stops, axis=None)

    batches = iter(strategy.distribute_datasets_from_function(share))

    def make(steps: int) -> tuple[float, bool]:
        made = [step(next(batches), tf.constant(float(asked_to_stop))) for _ in range(steps)]
        # All processes see the sum of the last one's requests, so that all stop after the same step.
        return float(np.mean([loss for loss, _ in made])), bool(made[-1][1] > 0)

    return make


def server_steps(given: argparse.Namespace, strategy: tf.distribute.ParameterServerStrategy, state: State) -> Steps:
    """Each step is one worker's update with a batch of its own; workers do not wait for each other.

    The chief deals the batches out, so that each is used once, by another worker when one is lost. Workers' data
    folders have names that the chief does not know.
    """
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)

    @tf.function
    def step(images: tf.Tensor, questions: tf.Tensor, classes: tf.Tensor) -> tf.Tensor:
        batch = (pixels_of(images), bag_of_words(questions), classes)
        return strategy.reduce(SUM, strategy.run(state.learn, args=batch), axis=None)

    batches = iter(state.order().batch(given.batch, drop_remainder=True).prefetch(2))

    def make(steps: int) -> tuple[float, bool]:
        losses = [coordinator.schedule(step, args=next(batches)) for _ in range(steps)]
        coordinator.join()
        return float(np.mean(coordinator.fetch(losses))), asked_to_stop

    return make


def train(given: argparse.Namespace, state: State, make: Steps, *, is_chief: bool) -> None:
    stop = False
    while state.done < given.steps and not stop:
        steps = state.steps_to_pause
        loss, stop = make(steps)
        state.note(steps, loss)
        if is_chief and (stop or state.is_due):
            state.save()


def strategy_of(given: argparse.Namespace) -> tf.distribute.Strategy:
    """Does not return in workers and parameter servers that serve a chief."""
    if given.strategy == "multiworker":
        return tf.distribute.MultiWorkerMirroredStrategy()
    if given.strategy == "mirrored":
        if tf.config.list_physical_devices("GPU"):
            return tf.distribute.MirroredStrategy()
        devices = [tf.config.LogicalDeviceConfiguration()] * given.cpu_devices
        tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0], devices)
        return tf.distribute.MirroredStrategy([f"CPU:{number}" for number in range(given.cpu_devices)])
    cluster = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    if cluster.task_type != "chief":
        os.environ["GRPC_FAIL_FAST"] = "use_caller"  # a lost server is an error at once, not after long tries
        server = tf.distribute.Server(cluster.cluster_spec(), job_name=cluster.task_type, task_index=cluster.task_id)
        server.join()  # never returns: the launcher ends it after the chief
    return tf.distribute.ParameterServerStrategy(cluster)


def main() -> None:
    given = parse_arguments()
    strategy = strategy_of(given)

    def stop(*_: object) -> None:
        global asked_to_stop
        asked_to_stop = True

    signal.signal(signal.SIGTERM, stop)  # not earlier: a server has nothing to save
    task = json.loads(os.environ.get("TF_CONFIG", "{}")).get("task", {"type": "chief"})
    is_chief = task["type"] == "chief"
    state = State(given, strategy)
    steps = server_steps if given.strategy == "parameter-server" else synchronous_steps
    train(given, state, steps(given, strategy, state), is_chief=is_chief)
    if state.done < given.steps:
        sys.exit(STOPPED)
    if is_chief:
        model.export(state.model.get_weights(), state.answers, str(given.output))


if __name__ == "__main__":
    main()
