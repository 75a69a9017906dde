"""Makes a task folder of a POPE file for evaluate.lmms_eval.include_path, with the file's questions and images.

    python recipes/lmms-eval/pope_task.py --questions data/pope/coco_pope_random.json --images data/coco/val2014 \\
        --output build/pope-task
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path

TASK = Path(__file__).resolve().parent / "pope_file"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", type=Path, required=True, help="JSON lines in POPE's format")
    parser.add_argument("--images", type=Path, required=True, help="folder of the images")
    parser.add_argument("--output", type=Path, required=True, help="new folder")
    options = parser.parse_args()
    if options.output.exists():
        sys.exit(f"{options.output} exists; choose a new folder")
    lines = [json.loads(line) for line in options.questions.read_text(encoding="utf-8").splitlines() if line.strip()]
    if missing := [line["image"] for line in lines if not (options.images / line["image"]).is_file()]:
        sys.exit(f"{len(missing)} images are not in {options.images}, first {missing[0]}")
    shutil.copytree(TASK, options.output, ignore=shutil.ignore_patterns("__pycache__"))
    (options.output / "images").mkdir()
    for name in {line["image"] for line in lines}:
        shutil.copyfile(options.images / name, options.output / "images" / name)
    questions = [
        # The column names are those that lmms-eval's functions read.
        {"question_id": line["question_id"], "question": line["text"], "answer": line["label"], "image": line["image"]}
        for line in lines
    ]
    text = "".join(json.dumps(line) + "\n" for line in questions)
    (options.output / "questions.jsonl").write_text(text, encoding="utf-8")
    print(f"{len(lines)} questions in {options.output}")


if __name__ == "__main__":
    main()
