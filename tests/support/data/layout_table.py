"""Layouts of data sets that people have: what preparation makes of each, or why it is refused."""

from __future__ import annotations

import base64
import json

from tests.support.data.layouts import (
    ROWS,
    Layout,
    array,
    asked,
    inline,
    lines,
    parts,
    placed,
    rows,
    said,
    struct,
    table,
    tar,
    task,
    tsv,
    twice,
)
from tests.support.data.prepared import conversation, png

MEDIA = "has media that nothing reads"
MP4 = b"\0\0\0\x18ftypmp42" + bytes(64)

LAYOUTS: dict[str, Layout] = {
    # ---- conversations in JSON
    "llava": Layout(array(lambda n: {"id": n, "image": f"{n}.png", "conversations": asked(n)}), ROWS, has_folder=True),
    "llava, several turns": Layout(
        array(lambda n: {"image": f"{n}.png", "conversations": [*asked(n), *conversation("And?", "No.")]}),
        ROWS, 2 * ROWS, has_folder=True,
    ),
    "llava with metadata": Layout(
        lines(lambda n: {"id": n, "image": f"{n}.png", "conversations": asked(n), "source": "x", "width": 3}),
        ROWS, has_folder=True,
    ),
    "llava, text only": Layout(lines(lambda n: {"id": n, "conversations": asked(n, "")}), 0),
    "an empty image of text only": Layout(lines(lambda n: {"image": "", "conversations": asked(n, "")}), 0),
    "absolute paths": Layout(
        placed(lambda n, folder: {"image": f"{folder}/images/{n}.png", "messages": said(n)}), ROWS, has_folder=True
    ),
    "absolute paths through a link": Layout(
        placed(lambda n, folder: {"image": f"{folder}/linked/{n}.png", "messages": said(n)}), ROWS, has_folder=True
    ),
    "absolute paths elsewhere": Layout(
        placed(lambda n, folder: {"image": f"{folder}/{n}.png", "messages": said(n)}), refused="ref.unsafe_path",
        has_folder=True,
    ),
    "addresses of files": Layout(
        placed(lambda n, folder: {"image": f"file://{folder}/images/{n}.png", "messages": said(n)}), ROWS,
        has_folder=True,
    ),
    "addresses of files in quotes": Layout(
        placed(
            lambda n, folder: {"image": f"file://localhost{folder}/images/of%20{n % 2}/{n}.png", "messages": said(n)}
        ),
        ROWS, has_folder=True,
    ),
    "an empty list of images beside text": Layout(
        lines(lambda n: {"images": [], "image": None, "conversations": asked(n, "")}), 0
    ),
    "a folder that nothing names": Layout(
        lines(lambda n: {"id": n, "conversations": asked(n, "")}), refused="data.image_folder is ", has_folder=True
    ),
    "a key img": Layout(lines(lambda n: {"img": f"{n}.png", "messages": said(n, "")}), refused=MEDIA, has_folder=True),
    "a key img that is named": Layout(
        lines(lambda n: {"img": f"{n}.png", "messages": said(n)}), ROWS, has_folder=True,
        data={"columns": {"image": "img"}},
    ),
    "base64 alone": Layout(
        lines(lambda n: {"image": base64.b64encode(png(n)).decode(), "conversations": asked(n)}), ROWS
    ),
    "base64 alone under any name": Layout(
        lines(lambda n: {"pic": base64.b64encode(png(n)).decode(), "conversations": asked(n, "")}), refused=MEDIA
    ),
    "marks in capitals": Layout(
        lines(lambda n: {"conversations": conversation("<IMAGE>\nWhich?", "A.")}), refused="conv.no_media"
    ),
    "a path under any name": Layout(
        lines(lambda n: {"screenshot": f"a/{n}.jpg", "messages": said(n, "")}), refused=MEDIA
    ),
    "a misspelt list": Layout(lines(lambda n: {"imags": [f"{n}.png"], "messages": said(n, "")}), refused=MEDIA),
    "an image without a mark": Layout(
        lines(lambda n: {"image": f"{n}.png", "messages": said(n, "")}), refused="conv.image_count", has_folder=True
    ),
    "a mark without an image": Layout(lines(lambda n: {"messages": said(n)}), refused="conv.image_count"),
    "a video's mark without one": Layout(lines(lambda n: {"messages": said(n, "<video>")}), refused="conv.no_media"),
    "ms-swift's audio": Layout(
        lines(lambda n: {"messages": said(n, "<audio>"), "audios": [f"{n}.wav"]}), refused="conv.no_media"
    ),
    "audio under any mark": Layout(lines(lambda n: {"messages": said(n, ""), "audios": [f"{n}.wav"]}), refused=MEDIA),
    "ms-swift": Layout(lines(lambda n: {"messages": said(n), "images": [f"{n}.png"]}), ROWS, has_folder=True),
    "ms-swift's preferences": Layout(
        lines(lambda n: {"messages": said(n), "images": [f"{n}.png"], "rejected_response": "I do not know."}), ROWS,
        has_folder=True,
    ),
    "ms-swift's images as objects": Layout(
        lines(lambda n: {"messages": said(n), "images": [{"path": f"{n}.png", "bytes": None}]}), ROWS, has_folder=True
    ),
    "ms-swift's boxes": Layout(
        lines(
            lambda n: {
                "messages": said(n, "<image>Find <ref-object>: <bbox> "), "images": [f"{n}.png"],
                "objects": {"ref": ["a cat"], "bbox": [[1, 2, 3, 4]]},
            }
        ),
        ROWS, has_folder=True,
    ),
    "ms-swift's points in shares of the second image": Layout(
        rows(
            lambda n: {
                "messages": said(n, "<image><image><bbox>"), "images": [struct(n), struct(n)],
                "objects": {"ref": None, "bbox": [[0.5, 0.25]], "bbox_type": "norm1", "image_id": [1]},
            }
        ),
        2 * ROWS,
    ),
    "more marks than boxes": Layout(
        lines(
            lambda n: {
                "messages": said(n, "<image><bbox><bbox>"), "images": [f"{n}.png"], "objects": {"bbox": [[1, 2, 3, 4]]}
            }
        ),
        refused="conv.objects", has_folder=True,
    ),
    "marks of boxes without any": Layout(
        lines(lambda n: {"messages": said(n, "<image>Find <ref-object>."), "images": [f"{n}.png"]}),
        refused="conv.objects", has_folder=True,
    ),
    "objects of a detection set": Layout(
        rows(lambda n: {"image": struct(n), "caption": "A.", "objects": {"bbox": [[1, 2, 3, 4]], "category": ["cat"]}}),
        ROWS,
    ),
    "an image's own size in pixels": Layout(
        lines(lambda n: {"messages": parts(n, {"type": "image", "image": f"{n}.png", "max_pixels": 3136})}),
        refused="conv.labels", has_folder=True,
    ),
    "an image's own size in pixels, ignored": Layout(
        lines(lambda n: {"messages": parts(n, {"type": "image", "image": f"{n}.png", "max_pixels": 3136})}),
        ROWS, has_folder=True, data={"columns": {"ignored": ["max_pixels"]}},
    ),
    "OpenAI's weight of 0": Layout(
        lines(lambda n: {"image": f"{n}.png", "messages": said(n, weight=0)}), refused="conv.labels", has_folder=True
    ),
    "OpenAI's weight of 1": Layout(
        lines(lambda n: {"image": f"{n}.png", "messages": said(n, weight=1)}), ROWS, has_folder=True
    ),
    "an answer without loss": Layout(
        lines(lambda n: {"image": f"{n}.png", "messages": said(n, loss=False)}), refused="conv.labels", has_folder=True
    ),
    "OpenAI's weight of 0 in an earlier answer": Layout(
        lines(lambda n: {"image": f"{n}.png", "messages": [*said(n, weight=0), *said(n, "", weight=1)]}), ROWS,
        has_folder=True,
    ),
    "ms-swift's loss of earlier answers": Layout(
        lines(lambda n: {"images": [f"{n}.png"], "messages": [*said(n, loss=False), *said(n, "", loss=None)]}), ROWS,
        has_folder=True,
    ),
    "axolotl's messages to train": Layout(
        lines(
            lambda n: {
                "image": f"{n}.png",
                "conversations": [{**one, "train": place == 3} for place, one in enumerate([*asked(n), *asked(n, "")])],
            }
        ),
        ROWS, has_folder=True,
    ),
    "a question to train": Layout(
        lines(lambda n: {"conversations": [{**one, "train": True} for one in asked(n, "")]}), refused="conv.labels"
    ),
    "weight and loss that disagree": Layout(
        lines(lambda n: {"messages": said(n, "", weight=0, loss=True)}), refused="record.conflict"
    ),
    "a scale of the loss": Layout(
        lines(lambda n: {"image": f"{n}.png", "messages": said(n, loss_scale=0.5)}), refused="conv.labels",
        has_folder=True,
    ),
    "a call of a tool": Layout(
        lines(lambda n: {"messages": said(n, "", tool_calls=[{"id": "1", "function": {"name": "look"}}])}),
        0,
    ),
    "OpenAI's tools and their results": Layout(
        lines(
            lambda n: {
                "tools": [{"type": "function", "function": {"name": "look"}}],
                "messages": [
                    *said(n, "", content=None, tool_calls=[{"function": {"name": "look", "arguments": "{}"}}]),
                    {"role": "tool", "tool_call_id": "1", "content": "Found."},
                    {"role": "assistant", "content": f"Number {n}."},
                ],
            }
        ),
        0, 2 * ROWS,
    ),
    "ms-swift's tool_call and tool_response": Layout(
        lines(
            lambda n: {
                "images": [f"{n}.png"],
                "messages": [
                    said(n)[0],
                    {"role": "tool_call", "content": '{"name": "look", "arguments": {}}', "loss": False},
                    {"role": "tool_response", "content": "Found."},
                    said(n)[1],
                ],
            }
        ),
        ROWS, has_folder=True,
    ),
    "LLaMA-Factory's function_call": Layout(
        lines(
            lambda n: {
                "tools": '[{"name": "look"}]',
                "conversations": [
                    asked(n, "")[0],
                    {"from": "function_call", "value": '{"name": "look", "arguments": {}}'},
                    {"from": "observation", "value": "Found."},
                    asked(n, "")[1],
                ],
            }
        ),
        0, 2 * ROWS,
    ),
    "tools of a question and its answer": Layout(
        lines(lambda n: {"question": "Which?", "answer": f"{n}.", "tools": [{"name": "look"}]}), refused="conv.labels"
    ),
    "a call without a name": Layout(
        lines(lambda n: {"messages": said(n, "", tool_calls=[{"function": {}}])}), refused="record.form"
    ),
    "a result without a call": Layout(
        lines(lambda n: {"messages": [*said(n, ""), {"role": "tool", "content": "x"}, *said(n, "")[1:]]}),
        refused="conv.roles",
    ),
    "LLaMA-Factory's tools": Layout(
        lines(lambda n: {"conversations": asked(n, ""), "system": "Be brief.", "tools": '[{"name": "look"}]'}),
        0,
    ),
    "LLaMA-Factory without tools": Layout(
        lines(lambda n: {"conversations": asked(n, ""), "system": "Be brief.", "tools": ""}), 0
    ),
    "parts with addresses": Layout(
        lines(lambda n: {"messages": parts(n, {"type": "image", "image": f"{n}.png"})}), ROWS, has_folder=True
    ),
    "OpenAI's image_url": Layout(
        lines(lambda n: {"messages": parts(n, {"type": "image_url", "image_url": {"url": inline(n)}})}),
        ROWS,
    ),
    "OpenAI's input_image": Layout(
        lines(
            lambda n: {
                "messages": [
                    {"role": "user", "content": [
                        {"type": "input_image", "image_url": inline(n)}, {"type": "input_text", "text": "Which?"}]},
                    {"role": "assistant", "content": [{"type": "output_text", "text": f"Number {n}."}]},
                ]
            }
        ),
        ROWS,
    ),
    "DashScope's parts": Layout(
        lines(
            lambda n: {
                "messages": [
                    {"role": "user", "content": [{"image": f"{n}.png"}, {"text": "Which?"}]},
                    {"role": "assistant", "content": [{"text": f"Number {n}."}]},
                ]
            }
        ),
        ROWS, has_folder=True,
    ),
    "a part of sound": Layout(
        lines(lambda n: {"messages": parts(n, {"type": "input_audio", "input_audio": {"data": "UklGRg=="}})}),
        refused="record.form",
    ),
    "parts and a list that disagree": Layout(
        lines(lambda n: {"image": f"{n}.png", "messages": parts(n, {"type": "image", "image": "0.jpg"})}),
        refused="record.conflict", has_folder=True,
    ),
    "image and images that disagree": Layout(
        lines(lambda n: {"image": f"{n}.png", "images": ["x.png"], "messages": said(n)}), refused="record.conflict",
        has_folder=True,
    ),
    "a key that comes twice": Layout(twice, refused="comes twice"),
    "messages as a JSON text": Layout(
        lines(lambda n: {"image": f"{n}.png", "messages": json.dumps(said(n))}), ROWS, has_folder=True
    ),
    "MiniCPM-V": Layout(
        array(lambda n: {"id": n, "image": f"{n}.png", "conversations": said(n, "<image>\n")}), ROWS, has_folder=True
    ),
    "MiniCPM-V without a mark": Layout(
        array(lambda n: {"id": n, "image": f"{n}.png", "conversations": said(n, "")}), ROWS, has_folder=True
    ),
    "MiniCPM-V, several images": Layout(
        array(
            lambda n: {
                "image": {"<image_00>": f"{n}.png", "<image_01>": "0.png"},
                "conversations": said(n, "<image_01> and <image_00>: "),
            }
        ),
        2 * ROWS, has_folder=True,
    ),
    "the first Qwen-VL": Layout(
        array(lambda n: {"id": n, "conversations": asked(n, f"Picture 1: <img>{n}.png</img>\n")}), ROWS, has_folder=True
    ),
    "Gemini": Layout(
        lines(
            lambda n: {
                "system_instruction": {"role": "system", "parts": [{"text": "Be brief."}]},
                "contents": [
                    {"role": "user", "parts": [
                        {"file_data": {"file_uri": f"{n}.png", "mime_type": "image/png"}}, {"text": "Which?"}]},
                    {"role": "model", "parts": [{"text": f"Number {n}."}]},
                ],
            }
        ),
        ROWS, has_folder=True,
    ),
    "TRL's prompt and completion": Layout(
        lines(lambda n: {"images": [f"{n}.png"], "prompt": "Which?", "completion": f"Number {n}."}), ROWS,
        has_folder=True,
    ),
    "TRL's prompt and completion in messages": Layout(
        rows(
            lambda n: {
                "image": struct(n), "prompt": [*said(n), {"role": "user", "content": "And?"}],
                "completion": [{"role": "assistant", "content": f"{n}."}],
            }
        ),
        ROWS,  # of two answers only the completion is learned
    ),
    "a completion without a prompt": Layout(
        lines(lambda n: {"images": [f"{n}.png"], "completion": "A."}), refused="record.form", has_folder=True
    ),
    "ms-swift's query and response": Layout(
        lines(lambda n: {"images": [f"{n}.png"], "query": "Which?", "response": f"Number {n}.", "system": "Be brief."}),
        ROWS, has_folder=True,
    ),
    "ms-swift's history": Layout(
        lines(
            lambda n: {
                "images": [f"{n}.png"], "query": "And?", "response": "No.", "history": [["<image>Which?", f"{n}."]],
            }
        ),
        ROWS, 2 * ROWS, has_folder=True,
    ),
    "a history of other things": Layout(
        lines(lambda n: {"query": "And?", "response": "No.", "history": ["Which?"]}), refused="record.form"
    ),
    "questions and answers": Layout(
        lines(lambda n: {"image": f"{n}.png", "question": "Which?", "answer": n}), ROWS, has_folder=True
    ),
    "ImageFolder's metadata.jsonl": Layout(
        lines(lambda n: {"file_name": f"{n}.png", "text": f"Number {n}."}, name="metadata.jsonl"), ROWS, has_folder=True
    ),
    "a list of addresses": Layout(
        lines(lambda n: {"url": f"https://example.com/{n}", "caption": "A cat."}), refused="conv.no_media"
    ),
    "Label Studio": Layout(
        array(lambda n: task(n, f"/data/local-files/?d={n}.png")), ROWS, has_folder=True
    ),
    "Label Studio with signatures": Layout(
        array(lambda n: task(n, f"https://example.com/{n}.jpg?X-Amz-Signature=1")), refused="ref.missing"
    ),
    "Label Studio's HEIC": Layout(array(lambda n: task(n, f"/data/upload/{n}.heic")), refused=MEDIA),
    "Label Studio's keys of a bucket": Layout(array(lambda n: task(n, f"s3://bucket/{n}")), refused=MEDIA),
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
