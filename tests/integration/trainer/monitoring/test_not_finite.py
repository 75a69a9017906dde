"""A training whose numbers are none ends with the exit code of its data, and names samples and what to do."""

from __future__ import annotations

from pathlib import Path

from tests.support.trainer.runs import ends_of_ranks, make_run
from vlmpipe.trainer.errors import ExitCode


def test_a_loss_that_is_not_a_number_ends_training_with_the_samples_that_it_came_from(tmp_path: Path) -> None:
    changes = {"features.cache": "off", "train.optimizer.learning_rate": 1e30, "train.max_steps": 6}
    job = make_run(tmp_path, "run", changes, features="off")
    codes, (said,) = ends_of_ranks("vlmpipe.trainer.train", ["--config", f"{job.run.run_uri}/run.json"], processes=1)
    assert codes == [ExitCode.DATA], said
    words = " ".join(said.split())
    assert "error: the loss of step 2 is nan; this rank's samples: digit" in words
    assert "lower train.optimizer.learning_rate" in words and "Traceback" not in words
    assert not list(Path(job.run.run_uri).glob("checkpoints/*/COMMIT")), "weights that are no numbers are not saved"
