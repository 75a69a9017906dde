"""Hooks of preference training: the loss of pairs, references before training, and scores in the evaluation."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.config.train import TrainConfig
from vlmpipe.trainer.data.loader import Float32Array
from vlmpipe.trainer.features.before_training import BeforeTraining
from vlmpipe.trainer.features.preferences.objectives import pair_loss_of
from vlmpipe.trainer.features.preferences.references import ReferenceLogProbs, references_of_run
from vlmpipe.trainer.features.preferences.scores import preference_scores, simpo_scores
from vlmpipe.trainer.hooks.feature import Feature
from vlmpipe.trainer.models.loss.pairs import PairLoss


class Preferences(Feature):
    """Trains on which of two answers is preferred."""

    def pair_loss(self, train: TrainConfig) -> PairLoss | None:
        return pair_loss_of(train)

    def references(self, run: BeforeTraining) -> Float32Array:
        """Log probabilities under the model that training starts from. See `FindsReferences`."""
        if run.job.train.has_reference:
            return ReferenceLogProbs(run).find(run.index, run.worker)
        return np.zeros((len(run.index.split("train")), 2), np.float32)  # known, and not looked at

    def pair_scores(self, job: JobConfig, log_probs: Tensor, tokens: Tensor) -> dict[str, float]:
        train = job.train
        if not train.has_reference:
            return simpo_scores(log_probs, tokens, train.simpo_beta, train.simpo_gamma)
        references = None if train.trainer else torch.from_numpy(references_of_run(job.run.run_uri, "eval"))
        return preference_scores(log_probs, references, train.dpo_beta)


FEATURE = Preferences()
