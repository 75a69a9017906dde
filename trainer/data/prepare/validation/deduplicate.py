"""Ids, content hashes and answers seen so far, in tables on disk."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vlmpipe.trainer.config.model import IMAGE_TOKEN
from vlmpipe.trainer.data.prepare.digest_files import DigestFiles
from vlmpipe.trainer.data.sample import Split, Turn
from vlmpipe.trainer.data.sqlite_table import disk_table, short_digest

LONGEST_COUNTED_ANSWER = 64  # characters; a longer answer is never the most frequent one
LONGEST_COUNTED_QUESTION = 200  # characters; longer questions are taken for different ones
MIN_REPEATS = 10  # training questions with the same text, from which the text has a most frequent answer of its own
MAX_QUESTIONS = 500  # texts of a slice that have one, the most frequent ones: stats.json stays small


Met = str  # of an id: NEW, or met with only OTHER content, or with the SAME (then how many times so far)
NEW, SAME, OTHER = "new", "same", "other"


class SeenIds:
    """The ids met so far, with digests of their content."""

    def __init__(self) -> None:
        self._table = disk_table(
            "CREATE TABLE ids (id BLOB, content BLOB, times INTEGER, PRIMARY KEY (id, content)) WITHOUT ROWID"
        )

    def add(self, identity: str, content: str) -> Met:
        """Return whether the id is new, or was met with the same content and how often, or only with other content."""
        key, value = short_digest(identity), bytes.fromhex(content)[:16]
        counts = "SELECT count(*), max(CASE WHEN content = ? THEN times ELSE 0 END) FROM ids WHERE id = ?"
        contents, times = self._table.execute(counts, (value, key)).fetchone()
        self._table.execute(
            "INSERT INTO ids VALUES (?, ?, 1) ON CONFLICT DO UPDATE SET times = times + 1", (key, value)
        )
        if times:
            return f"{SAME} {times}"
        return OTHER if contents else NEW


EVAL_BITS = 32  # of a count: training samples below, those held out above


@dataclass(frozen=True)
class ContentTotals:
    """How many digests there are.

    distinct: of each split. repeats: repetitions over both splits. in_both_splits: distinct ones.
    """

    distinct: dict[Split, int]
    repeats: int
    in_both_splits: int


class ContentCounts:
    """How often each digest occurs in each split."""

    def __init__(self) -> None:
        self._digests = DigestFiles()

    def add(self, digests: NDArray[np.uint8], are_training: NDArray[np.bool_]) -> None:
        """Add contents. digests: (contents, 16) bytes."""
        self._digests.add(digests, count=np.where(are_training, 1, 1 << EVAL_BITS))

    def totals(self) -> ContentTotals:
        train = validation = both = repeats = 0
        for rows in self._digests:
            in_eval, in_train = np.divmod(rows["count"], np.uint64(1 << EVAL_BITS))
            train, validation = train + int((in_train > 0).sum()), validation + int((in_eval > 0).sum())
            both += int(((in_train > 0) & (in_eval > 0)).sum())
            repeats += int((in_train + in_eval).sum()) - len(rows)
        return ContentTotals({"train": train, "eval": validation}, repeats, both)


ANSWER_COLUMNS = "slice TEXT, question TEXT, answer TEXT, train INTEGER, eval INTEGER"
SUMMED_ANSWERS = (
    "SELECT slice, question, answer, sum(train), sum(eval) FROM given GROUP BY slice, question, answer "
    "ORDER BY slice, question, answer"
)
AnswerRow = tuple[str, str, str, int, int]  # slice, question, answer, how often in train and in eval


def counted_question(question: str) -> str:
    """The text by which questions are taken for the same one: without images and white space, empty if it is long."""
    text = " ".join(question.replace(IMAGE_TOKEN, " ").split())
    return text if len(text) <= LONGEST_COUNTED_QUESTION else ""


class AnswerCounts:
    """How often each answer is given to each question, by split and slice."""

    def __init__(self) -> None:
        # Without a key, so that rows are written one after the other; `_sum` sorts them.
        self._table = disk_table(f"CREATE TABLE given ({ANSWER_COLUMNS})")

    def add(self, split: Split, turns: Iterable[Turn]) -> None:
        # Long answers are counted under the empty answer, which no sample has.
        rows = (
            (
                turn.slice,
                counted_question(turn.question),
                turn.answer if len(turn.answer) <= LONGEST_COUNTED_ANSWER else "",
                *counts,
            )
            for counts in [(split == "train", split == "eval")]
            for turn in turns
            if not turn.is_context and not turn.has_tools
        )
        self.add_counted(rows)

    def rows(self) -> list[AnswerRow]:
        """All counts, sorted."""
        return self._table.execute(SUMMED_ANSWERS).fetchall()

    def add_counted(self, rows: Iterable[AnswerRow]) -> None:
        """Add another table's `rows`."""
        self._table.executemany("INSERT INTO given VALUES (?, ?, ?, ?, ?)", rows)

    def slices(self) -> dict[str, dict[str, object]]:
        """Number of questions of each slice, its most frequent training answer and those of its repeated questions,
        and what these answers score on the eval split."""
        by_name: dict[str, dict[str, object]] = {}
        self._table.execute("DROP TABLE IF EXISTS answers")
        self._table.execute(
            f"CREATE TABLE answers ({ANSWER_COLUMNS}, PRIMARY KEY (slice, question, answer)) WITHOUT ROWID"
        )
        self._table.execute(f"INSERT INTO answers {SUMMED_ANSWERS}")  # in the order of the key
        questions = "SELECT slice, sum(train), sum(eval) FROM answers GROUP BY slice ORDER BY slice"
        for name, trained, validation in self._table.execute(questions).fetchall():
            majority = self._majority("slice = ?", name)
            repeated = self._table.execute(
                "SELECT question FROM answers WHERE slice = ? AND question != '' GROUP BY question "
                "HAVING sum(train) >= ? ORDER BY sum(train) DESC, question LIMIT ?",
                (name, MIN_REPEATS, MAX_QUESTIONS),
            ).fetchall()
            of_question = {text: self._majority("slice = ? AND question = ?", name, text) for (text,) in repeated}
            constants = {text: answer for text, (answer, _) in of_question.items() if answer is not None}
            # Of the slice's answer, where a question has none of its own.
            elsewhere = majority[1] - sum(self._right(name, text, majority[0]) for text in constants)
            right = elsewhere + sum(of_question[text][1] for text in constants)
            by_name[name] = {
                "train_questions": trained,
                "eval_questions": validation,
                "majority_answer": majority[0],
                "question_answers": constants,
                "chance": right / validation if validation else None,
            }
        return by_name

    def _majority(self, where: str, *values: str) -> tuple[str | None, int]:
        """The most frequent training answer, and how often it is right on the eval split."""
        # Ties by alphabet, so that the order of samples does not matter.
        majority = self._table.execute(
            f"SELECT answer, sum(eval) FROM answers WHERE {where} AND answer != '' GROUP BY answer "
            "HAVING sum(train) > 0 ORDER BY sum(train) DESC, answer LIMIT 1",
            values,
        ).fetchone()
        return majority or (None, 0)

    def _right(self, name: str, question: str, answer: str | None) -> int:
        counts = self._table.execute(
            "SELECT eval FROM answers WHERE slice = ? AND question = ? AND answer = ?", (name, question, answer)
        ).fetchone()
        return counts[0] if counts else 0
