"""Layouts of JSON and JSON lines: images, marks, parts and shapes of conversations."""

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
    twice,
)
from tests.support.data.prepared import conversation, png

MEDIA = "has media that nothing reads"

JSON_LAYOUTS: dict[str, Layout] = {
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
    "marks within a line, and elements of code": Layout(
        lines(lambda n: {"conversations": conversation("Which?", "Use <Image> here:\n<Image>\n  <video>\n</Image>")}), 0
    ),
    "an element of code without its end": Layout(
        lines(lambda n: {"conversations": conversation("What is <Image> for?", "The component <Image> loads files.")}),
        0,
    ),
    "Phi-3's marks": Layout(
        lines(lambda n: {"messages": said(n, "<|image_1|>\n"), "image": f"{n}.png"}), ROWS, has_folder=True
    ),
    "numbered marks of two images": Layout(
        lines(lambda n: {"messages": said(n, "<image 1> or <image 2>? "), "images": [f"{n}.png", "0.png"]}), 2 * ROWS,
        has_folder=True,
    ),
    "numbered marks in another order": Layout(
        lines(lambda n: {"messages": said(n, "<image 2> or <image 1>? "), "images": [f"{n}.png", "0.png"]}),
        refused="conv.image_count", has_folder=True,
    ),
    "images of a message": Layout(
        lines(lambda n: {"messages": [{**said(n)[0], "images": [f"{n}.png"]}, said(n)[1]]}), refused=MEDIA,
        has_folder=True,
    ),
    "M4-Instruct": Layout(
        array(lambda n: {"sample_id": n, "image": [f"{n}.png", "0.png"], "choice_list": None,
                         "conversations": asked(n, "<image><image>"), "metadata": {"dataset": "x"}}),
        2 * ROWS, has_folder=True,
    ),
    "InternVL, several images": Layout(
        lines(lambda n: {"image": [f"{n}.png", "0.png"], "width_list": [3, 3], "height_list": [3, 3],
                         "conversations": asked(n, "Image-1: <image>\nImage-2: <image>\n")}),
        2 * ROWS, has_folder=True,
    ),
    "Label Studio's short export": Layout(
        array(lambda n: {"image": f"/data/local-files/?d={n}.png", "id": n, "choice": "Cat", "annotator": 1}),
        refused="not in LLaVA's format", has_folder=True,
    ),
    "Visual Genome's questions": Layout(
        array(lambda n: {"id": n, "qas": [{"question": "A?", "answer": "B.", "image_id": n}]}),
        refused="not in LLaVA's format", has_folder=True,
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
    "Label Studio": Layout(  # which examples/sources reads
        array(lambda n: {"id": n, "data": {"image": f"{n}.png"}, "annotations": []}),
        refused="not in LLaVA's format", has_folder=True,
    ),
}  # fmt: skip
