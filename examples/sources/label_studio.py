"""Tasks of a Label Studio export (its JSON format) as records.

In the run file, with the export and its images in the folder `exports`:

    data:
      source: examples/sources/label_studio.py:records
      source_arguments: {path: exports/tasks.json}
      image_folder: exports

Format: https://labelstud.io/guide/export#Label-Studio-JSON-format-of-annotated-tasks
"""

import json
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

ANSWERS = ("text", "choices", "rating", "number")  # keys of a result's value that can be an answer
MEDIA = {".jpg": "image", ".jpeg": "image", ".png": "image", ".webp": "image", ".mp4": "video", ".mov": "video"}


def records(path, caption_question="Describe this image."):
    """Yield a conversation for each task: a turn for each labelled control, about all images and videos of the task.

    The first question is `question` of the task's data, those of further controls are their names. The answer is that
    of the annotation marked as ground truth, or the first that was submitted.
    """
    for task in json.loads(Path(path).read_text(encoding="utf-8")):
        data = task["data"]
        files = [file for value in data.values() for file in files_in(value)]
        content = [{"type": kind, kind: name} for kind, name in files]
        messages = []
        for control, answer in answers(task).items():
            question = control if messages else data.get("question", caption_question)
            messages.append({"role": "user", "content": [*content, {"type": "text", "text": question}]})
            messages.append({"role": "assistant", "content": answer})
            content = []
        further = {key: data[key] for key in ("slice", "split") if key in data}
        yield {"id": task["id"], "messages": messages, **further}


def answers(task):
    """Return the text of each control by its name."""
    submitted = [one for one in task["annotations"] if not one.get("was_cancelled")]
    if not submitted:
        raise ValueError(f"task {task['id']} has no submitted annotation: export annotated tasks only")
    annotation = next((one for one in submitted if one.get("ground_truth")), submitted[0])
    texts = {}
    for result in annotation["result"]:
        key = next((key for key in ANSWERS if key in result["value"]), None)
        if key is None:
            raise ValueError(
                f"task {task['id']}: a result of type {result['type']} is no answer ({', '.join(ANSWERS)})"
            )
        value = result["value"][key]
        texts.setdefault(result["from_name"], []).extend(map(str, value if isinstance(value, list) else [value]))
    return {control: ", ".join(values) for control, values in texts.items()}


def files_in(value):
    """Yield kind and path of the images and videos that a value of a task's data names."""
    for address in value if isinstance(value, list) else [value]:
        if isinstance(address, str):
            name = path_of(address)
            if kind := MEDIA.get(Path(name).suffix.lower()):
                yield kind, name


def path_of(address):
    """Return an address of the server as a path: /data/local-files/?d=a/1.jpg, or an upload: /data/upload/1/a.jpg."""
    if address.startswith("/data/local-files/"):
        return parse_qs(urlsplit(address).query)["d"][0]
    return address.partition("?")[0].removeprefix("/data/")
