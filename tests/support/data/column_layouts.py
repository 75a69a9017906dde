"""Layouts of Parquet, tars, tables of VLMEvalKit and folders."""

from __future__ import annotations

import base64
import json

from tests.support.data.json_layouts import MEDIA
from tests.support.data.layouts import (
    ROWS,
    Layout,
    asked,
    rows,
    said,
    struct,
    table,
    tar,
    tsv,
)
from tests.support.data.prepared import png

MP4 = b"\0\0\0\x18ftypmp42" + bytes(64)

COLUMN_LAYOUTS: dict[str, Layout] = {
    # ---- Parquet
    "image and caption": Layout(rows(lambda n: {"image": struct(n), "caption": f"Number {n}."}), ROWS),
    "PixMo": Layout(rows(lambda n: {"image_url": f"https://e.org/{n}", "caption": "A."}), refused="conv.no_media"),
    "PixMo's questions": Layout(
        rows(lambda n: {"image_url": f"https://e.org/{n}", "question": "A?", "answer": "B."}), refused=MEDIA
    ),
    "paths in a column": Layout(
        rows(lambda n: {"image_path": f"{n}.png", "question": "Which?", "answer": "A."}), refused=MEDIA,
        has_folder=True,
    ),
    "paths in a column that is named": Layout(
        rows(lambda n: {"image_path": f"{n}.png", "question": "Which?", "answer": "A."}), ROWS, has_folder=True,
        data={"columns": {"image": "image_path"}},
    ),
    "an unneeded column of images": Layout(
        rows(lambda n: {"image": struct(n), "depth_map": struct(n), "question": "Which?", "answer": "A."}), ROWS,
        data={"columns": {"ignored": ["depth_map"]}},
    ),
    "a second column of images": Layout(
        rows(lambda n: {"image": struct(n), "depth_map": struct(n), "question": "Which?", "answer": "A."}),
        refused=MEDIA,
    ),
    "MMMU": Layout(
        rows(lambda n: {"image_1": struct(n), "image_2": None if n % 2 else struct(n), "question": "<image 1>?",
                        "options": "['a', 'b']", "answer": "A"}),
        refused=MEDIA,
    ),
    "MMMU, named": Layout(
        rows(lambda n: {"image_1": struct(n), "image_2": None if n % 2 else struct(n), "question": "Which?",
                        "answer": "A"}),
        ROWS + ROWS // 2, data={"columns": {"image": ["image_1", "image_2"]}},
    ),
    "a caption without its image": Layout(
        rows(lambda n: {"image": struct(n) if n else None, "caption": "A."}), refused="conv.no_media"
    ),
    "an empty list beside an image": Layout(
        rows(lambda n: {"images": [struct(n)][1:], "image": struct(n), "question": "Which?", "answer": "A."}), ROWS
    ),
    "a column of videos": Layout(
        rows(lambda n: {"video": {"bytes": MP4, "path": f"{n}.mp4"}, "question": "What?", "answer": "A."}),
        refused=MEDIA,
    ),
    "the Cauldron": Layout(
        rows(lambda n: {"images": [struct(n)], "texts": [{"user": "Which?", "assistant": "A.", "source": "x"}]}), ROWS
    ),
    "RLAIF-V": Layout(
        rows(lambda n: {"image": struct(n), "question": "Which?", "chosen": "A.", "rejected": "B.", "ds_name": "x"}),
        ROWS,
    ),
    "DocVQA's answers": Layout(
        rows(lambda n: {"image": struct(n), "question": "Which?", "answers": ["A", "B"]}), refused="record.form"
    ),
    "answers under another name": Layout(
        rows(lambda n: {"image": struct(n), "query": "Which?", "label": "A."}), ROWS,
        data={"columns": {"question": "query", "answer": "label"}},
    ),
    "ids of pandas": Layout(rows(lambda n: {"id": float(n), "image": struct(n), "caption": "A."}), ROWS),
    "messages in a column": Layout(rows(lambda n: {"images": [struct(n)], "messages": said(n)}), ROWS),
    "a weight in a column of messages": Layout(
        rows(lambda n: {"image": struct(n), "messages": [*said(n, weight=0), *said(n, "")]}), ROWS
    ),
    "messages as text in a column": Layout(
        rows(lambda n: {"image": struct(n), "messages": json.dumps(said(n))}), ROWS
    ),
    "an embedding beside": Layout(
        rows(lambda n: {"image": struct(n), "caption": "A.", "embedding": [0.5] * 8, "url": "https://e.org/1.jpg"}),
        ROWS,
    ),
    "ScienceQA": Layout(
        rows(lambda n: {"image": struct(n), "question": "Which?", "choices": ["a", "b"], "answer": n % 2, "hint": ""}),
        ROWS,
    ),
    "MMMU, named, with its options": Layout(
        rows(lambda n: {"image_1": struct(n), "question": "<image 1> Which?", "options": "['a', 'b']", "answer": "A"}),
        ROWS, data={"columns": {"image": ["image_1"]}},
    ),
    "AI2D's numbers of options as texts": Layout(
        rows(lambda n: {"image": struct(n), "question": "Which?", "options": ["a", "b"], "answer": "1"}),
        refused="record.form",
    ),
    "SEED-Bench": Layout(
        rows(lambda n: {"image": [struct(n)], "question": "Which?", "choice_a": "x", "choice_b": "y", "answer": "A"}),
        ROWS,
    ),
    "MMBench's columns of options": Layout(
        rows(lambda n: {"image": struct(n), "question": "Which?", "A": "x", "B": "y", "C": None, "answer": "B"}), ROWS
    ),
    "ChartQA, named": Layout(
        rows(lambda n: {"image": struct(n), "query": "Which?", "label": ["12"], "human_or_machine": 0}), ROWS,
        data={"columns": {"question": "query", "answer": "label"}},
    ),
    "GQA's questions alone": Layout(
        rows(lambda n: {"imageId": str(n), "question": "Which?", "answer": "yes"}), refused=MEDIA
    ),
    "VQAv2's numbers of images": Layout(
        rows(lambda n: {"image_id": n, "question": "Which?", "answer": "yes"}), refused=MEDIA
    ),
    "pixels that were prepared elsewhere": Layout(
        rows(lambda n: {"pixel_values": [[0.5, 0.5]], "question": "Which?", "answer": "A."}), refused=MEDIA
    ),
    "features of images in place of them": Layout(
        rows(lambda n: {"image_embeds": [0.5] * 4, "question": "Which?", "answer": "A."}), refused=MEDIA
    ),
    "features beside the image": Layout(
        rows(lambda n: {"image": struct(n), "image_embeds": [0.5] * 4, "question": "Which?", "answer": "A."}), ROWS
    ),
    "FineVision": Layout(
        rows(lambda n: {"images": [struct(n)], "texts": [{"user": "Which?", "assistant": "A."}], "source": "x",
                        "relevance_ratings": [5], "relevance_min": 5}),
        ROWS,
    ),
    "Flickr30k's lists of captions": Layout(
        rows(lambda n: {"image": struct(n), "caption": ["A.", "B."], "split": "train"}), refused="record.form"
    ),
    "LAION's columns": Layout(
        rows(lambda n: {"URL": f"https://e.org/{n}.jpg", "TEXT": "A cat."}), refused="has the columns URL, TEXT"
    ),
    "OBELICS": Layout(
        rows(lambda n: {"images": [f"https://e.org/{n}.jpg", None], "texts": [None, "A cat."]}), refused="record.form"
    ),
    # ---- tars
    "img2dataset": Layout(
        tar(lambda n: [("jpg", png(n)), ("txt", b"A."), ("json", json.dumps(
            {"caption": "A.", "url": "https://e.org/1.jpg", "key": "1", "status": "success", "width": 3}).encode())]),
        ROWS,
    ),
    "tars whose images are missing": Layout(
        tar(lambda n: [("txt", b"A.")] if n % 2 else [("jpg", png(n)), ("txt", b"A.")]), refused="conv.no_media"
    ),
    "AVIF in tars": Layout(
        tar(lambda n: [("avif", b"xx"), ("json", b'{"question": "A?", "answer": "B."}')]), refused=MEDIA
    ),
    "arrays in tars": Layout(
        tar(lambda n: [("npy", b"xx"), ("json", b'{"question": "A?", "answer": "B."}')]), refused=MEDIA
    ),
    "videos in tars": Layout(
        tar(lambda n: [("mp4", MP4), ("json", json.dumps({"messages": said(n, "")}).encode())]), refused=MEDIA
    ),
    "LLaVA's records in tars": Layout(
        tar(lambda n: [("png", png(n)), ("json", json.dumps({"image": "x.png", "conversations": asked(n)}).encode())]),
        ROWS,
    ),
    # ---- VLMEvalKit's tables
    "VLMEvalKit": Layout(
        tsv(["index", "image", "question", "A", "B", "answer", "category"],
            lambda n: [str(n), base64.b64encode(png(n)).decode(), "Which?", "This", "That", "A", "x"]), ROWS,
    ),
    "VLMEvalKit, images of other rows": Layout(
        tsv(["index", "image", "question", "answer"],
            lambda n: [str(n), "0" if n else base64.b64encode(png(n)).decode(), "Which?", "A"]), ROWS,
    ),
    "VLMEvalKit, paths": Layout(
        tsv(["index", "image", "question", "answer"], lambda n: [str(n), f"images/{n}.png", "Which?", "A"]),
        refused="ref.missing",
    ),
    # ---- folders
    "ImageFolder": Layout(table(["file_name", "text"], lambda n: [f"{n}.png", f"Number {n}."]), ROWS),
    "ImageFolder with more columns": Layout(
        table(["file_name", "text", "lens"], lambda n: [f"{n}.png", f"Number {n}.", "50 mm"]), ROWS
    ),
    "a table with other names": Layout(
        table(["picture", "label"], lambda n: [f"{n}.png", f"Number {n}."]), ROWS,
        data={"columns": {"image": "picture", "answer": "label"}},
    ),
}  # fmt: skip
