"""Questions about images that the start model was trained on, from the prepared data of its run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from vlmpipe.trainer.config.model import IMAGE_TOKEN
from vlmpipe.trainer.data.sample import stable_digest
from vlmpipe.trainer.data.shards.index import Index
from vlmpipe.trainer.data.shards.prepared_files import open_prepared
from vlmpipe.trainer.data.shards.tar import ShardReader
from vlmpipe.trainer.evaluation.validation.questions import asked_turns
from vlmpipe.trainer.models.video_file import VideoFile


@dataclass(frozen=True)
class StartQuestion:
    """A question of a training sample about the sample's only image. identity: of sample and question."""

    identity: str
    question: str
    image: bytes


class StartSamples:
    """The training samples of prepared data, of which some are asked one of their own questions."""

    def __init__(self, prepared_uri: str) -> None:
        storage = open_prepared(prepared_uri)
        self._split = Index.load(prepared_uri, storage).split("train")
        self._shards = ShardReader.open(storage)
        self.unsuitable = 0  # drawn samples without a question about a single still image

    def drawn(self, count: int, seed: int) -> Iterator[StartQuestion]:
        """Questions of `count` samples at most: one of each of as many equal stretches of the samples."""
        samples = len(self._split)
        stretches = min(count, samples)
        for stretch in range(stretches):
            first, end = (samples * number // stretches for number in (stretch, stretch + 1))
            chosen = first + _drawn(end - first, "sample", seed, self._split.ids[first])
            question = self._question(chosen, seed)
            if question is None:
                self.unsuitable += 1
            else:
                yield question

    def _question(self, sample: int, seed: int) -> StartQuestion | None:
        identity, place = self._split.ids[sample], self._split.sample_location(sample)
        turns = asked_turns(self._shards.turns(place)) if len(place.image_offsets) == 1 else []
        if not turns:
            return None
        number, turn = turns[_drawn(len(turns), "turn", seed, identity)]
        question, [image] = turn.question.replace(IMAGE_TOKEN, "").strip(), self._shards.images(place)
        if not question or isinstance(image, VideoFile):
            return None
        return StartQuestion(stable_digest("start", identity, str(number)), question, image)


def _drawn(count: int, what: str, seed: int, identity: str) -> int:
    """A number below `count`, the same for the same sample, seed and purpose."""
    return int(stable_digest(what, str(seed), identity)[:16], 16) % count
