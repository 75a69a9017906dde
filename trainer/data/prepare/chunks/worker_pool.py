"""Worker processes that prepare chunks in parallel: fresh interpreters that read their tasks from standard input.

Parsing and tokenizing hold Python's lock, so threads are not enough. Forking would copy locks that threads hold, and
multiprocessing's spawn imports the main program again, which a script without a main guard does not survive.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from itertools import islice
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from vlmpipe.trainer.config.job import JobConfig
from vlmpipe.trainer.data.prepare.chunks.chunk import ChunkMaker
from vlmpipe.trainer.data.prepare.chunks.plan import Chunk
from vlmpipe.trainer.errors import ExitCode, UserError
from vlmpipe.trainer.threads import start_thread

REPORT_RECORDS = 100  # between two progress lines
MAX_THREADS = 32
# https://docs.kernel.org/admin-guide/cgroup-v2.html, "CPU Interface Files": quota and period in microseconds.
CPU_LIMIT = Path("/sys/fs/cgroup/cpu.max")
ROOT = Path(__file__).parents[5]  # where vlmpipe is imported from

ChunkReport = Callable[[int, int, int], None]  # number of the chunk, its records read and rejected so far
Message = dict[str, Any] | None  # None: the process has ended


def cores() -> int:
    """Processor cores that this process may use: the machine's, or fewer if its container has a limit."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with suppress(OSError, ValueError):  # no cgroup v2, or no limit ("max")
        quota, period = CPU_LIMIT.read_text(encoding="utf-8").split()
        usable = min(usable, max(1, int(quota) // int(period)))
    return usable


def threads_for(processes: int) -> int:
    """Threads for each of `processes` processes, so that together they use the cores."""
    return max(1, min(MAX_THREADS, cores() // processes))


class _Worker:
    def __init__(self, job: dict[str, object], answers: SimpleQueue[tuple[_Worker, Message]]) -> None:
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "vlmpipe.trainer.data.prepare.chunks.worker_pool"],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            errors="replace",
        )
        self._answers = answers
        self.send(job)
        start_thread(self._listen, name="answers")

    def send(self, message: dict[str, object]) -> None:
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended, which _listen reports
            self.process.stdin.write(json.dumps(message) + "\n")
            self.process.stdin.flush()

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):
                pipe.close()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        with suppress(ValueError):  # closed by `end` meanwhile
            for line in self.process.stdout:
                self._answers.put((self, json.loads(line)))
        self._answers.put((self, None))


def make_in_processes(chunks: Iterable[Chunk], job: dict[str, object], workers: int, *, report: ChunkReport) -> None:
    """Prepare the chunks in `workers` processes.

    Raises a worker's own UserError, and UserError when a worker was killed.

    Args:
        job: JSON of the `config`, the `plan` folder with the tokenizer in it, `settings` and `threads` of a ChunkMaker.
    """
    answers: SimpleQueue[tuple[_Worker, Message]] = SimpleQueue()
    crew: list[_Worker] = []
    try:
        todo = iter(chunks)
        for chunk in islice(todo, workers):
            crew.append(_Worker(job, answers))
            crew[-1].send({"chunk": chunk.to_json()})
        busy = len(crew)
        while busy:
            worker, answer = answers.get()
            if answer is None:
                raise _ended(worker.process.wait())
            if "error" in answer:
                raise UserError(**answer["error"])
            if "done" not in answer:
                report(answer["chunk"], answer["read"], answer["rejected"])
            elif following := next(todo, None):
                worker.send({"chunk": following.to_json()})
            else:
                busy -= 1
    finally:
        for worker in crew:
            worker.end()


def _ended(code: int) -> UserError:
    how = f"was ended by signal {-code}" if code < 0 else f"ended with code {code}"
    return UserError(
        f"a process that prepared data {how}",
        expected="processes that run to their end; too little memory is the usual reason",
        fix="set data.workers to fewer processes and run again: chunks that are done are not done again",
        code=ExitCode.UNEXPECTED,
    )


def main() -> None:
    """A worker: reads a job from the first line of standard input, then a chunk from each further line."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent ends its workers
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # libraries may print

    def say(answer: dict[str, object]) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    try:
        maker = _maker(json.loads(sys.stdin.readline()))
        for line in sys.stdin:
            chunk = Chunk.from_json(json.loads(line)["chunk"])

            def report(read: int, rejected: int, chunk: Chunk = chunk) -> None:
                if read % REPORT_RECORDS == 0 or read == chunk.records:
                    say({"chunk": chunk.number, "read": read, "rejected": rejected})

            maker.make(chunk, report)
            say({"done": chunk.number})
    except UserError as error:
        say({"error": {"found": error.found, "expected": error.expected, "fix": error.fix, "code": int(error.code)}})


def _maker(job: dict[str, Any]) -> ChunkMaker:
    from vlmpipe.trainer.data.chat.encode import Chat
    from vlmpipe.trainer.data.replay.place import with_located_data
    from vlmpipe.trainer.data.sources import open_source
    from vlmpipe.trainer.models.image_tokens import image_form_of
    from vlmpipe.trainer.storage import open_storage

    config = with_located_data(JobConfig.model_validate_json(job["config"]))
    chat = Chat.load(open_storage(job["plan"]), image_form_of(config.model))
    return ChunkMaker(config, open_source(config.data), Path(job["plan"]), chat, job["settings"], job["threads"])


if __name__ == "__main__":
    with suppress(BrokenPipeError):  # the parent is gone
        main()
