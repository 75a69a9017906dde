"""Three sources to a report with their scores: pictures with messages, text alone, and short videos.

Three real commands: a run that is left alone, the same killed in training, and the second one started again.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from PIL import Image, ImageDraw

from tests.support.terminal import Answer, Terminal
from tests.support.trainer.tiny_runs import TINY, merged

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800), pytest.mark.slow]

COLOURS = ("red", "green", "blue")
LICENCES = {"pictures": "CC-BY-4.0", "text": "Apache-2.0", "clips": "CC0-1.0"}
WIDTH, HEIGHT, FRAMES = 64, 48, 12


IMAGE = "us-central1-docker.pkg.dev/my-project/vlmpipe/{}@sha256:" + 64 * "0"
IN_CLOUD = (
    "gcp.project=my-project",
    "gcp.service_account=vlmpipe@my-project.iam.gserviceaccount.com",
    "gcp.pipeline_root=gs://my-bucket/vlmpipe",
    f"gcp.pipeline_image={IMAGE.format('pipeline')}",
    f"cluster.image_uri={IMAGE.format('trainer')}",
)


def messages(question: list[dict[str, Any]], answer: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def write_pictures(folder: Path) -> list[dict[str, Any]]:
    records = []
    for number in range(60):
        colour = COLOURS[number % 3]
        picture = Image.new("RGB", (32, 32), colour)
        picture.putpixel((number % 32, number // 32), (255, 255, 255))  # no two alike
        picture.save(folder / f"{number}.png")
        asked = {"type": "image_url", "image_url": {"url": f"{number}.png"}}, {"type": "text", "text": "Which colour?"}
        records.append(messages(list(asked), colour))
    return records


def write_clips(folder: Path) -> list[dict[str, Any]]:
    """A ball that moves to the left or to the right."""
    records = []
    for number in range(24):
        with av.open(str(folder / f"{number}.mp4"), "w") as container:
            stream: Any = container.add_stream("mpeg4", rate=6)
            stream.width, stream.height, stream.pix_fmt = WIDTH, HEIGHT, "yuv420p"
            for frame in range(FRAMES):
                picture = Image.new("RGB", (WIDTH, HEIGHT), "navy")
                at = frame * 4 if number % 2 else WIDTH - 16 - frame * 4
                ImageDraw.Draw(picture).ellipse((at, number, at + 16, number + 16), fill="orange")
                container.mux(stream.encode(av.VideoFrame.from_ndarray(np.asarray(picture), format="rgb24")))
            container.mux(stream.encode())
        asked = [{"type": "video", "video": f"{number}.mp4"}, {"type": "text", "text": "Which way?"}]
        records.append(messages(asked, "right" if number % 2 else "left"))
    return records


def write_run_file(folder: Path) -> None:
    texts = [
        messages([{"type": "text", "text": f"What is {a} plus {b}?"}], str(a + b)) for a in range(9) for b in range(9)
    ]
    sources = []
    for (name, license), weight in zip(LICENCES.items(), (0.5, 0.3, 0.2), strict=True):
        (folder / name).mkdir()
        records = {"pictures": write_pictures, "clips": write_clips, "text": lambda _: texts}[name](folder / name)
        (folder / name / "data.jsonl").write_text("\n".join(map(json.dumps, records)))
        sources.append({"name": name, "uri": f"{name}/data.jsonl", "weight": weight, "license": license})
    data = {"sources": sources, "sequence_length": 256, "video_frames": 3, "validation_fraction": 0.2, "tasks": 3}
    changes = {
        "data": data,
        "train.epochs": 1000,
        "train.max_steps": 60,
        "train.checkpoint_every_steps": 20,
        "evaluate.controls": [],
        "gate": {"bounds": "none"},  # 41 questions are too few for any bound
    }
    (folder / "run.yaml").write_text(json.dumps(merged(TINY, changes)))


def run(folder: Path, name: str) -> Answer:
    with Terminal(folder, "run", "run.yaml", "--run-id", name) as terminal:
        return terminal.answer(deadline_s=900)


def test_three_sources_reach_the_report_and_resume_exactly(tmp_path: Path) -> None:
    write_run_file(tmp_path)
    answer = run(tmp_path, "whole")
    assert answer.code == 0, answer.said
    assert len(list((tmp_path / "runs/chunks").iterdir())) >= 3, "prepared in the loop of three tasks"

    stopped = tmp_path / "runs/runs/stopped"
    with Terminal(tmp_path, "run", "run.yaml", "--run-id", "stopped") as terminal:
        terminal.when(lambda: list(stopped.glob("checkpoints/*/COMMIT")), deadline_s=600)
        terminal.process.kill()
        terminal.answer()
    assert not (stopped / "decision.json").exists()
    answer = run(tmp_path, "stopped")
    assert answer.code == 0, answer.said

    whole = tmp_path / "runs/runs/whole"
    assert json.loads((stopped / "summary.json").read_text())["resumed_from_step"] > 0
    weights = [(one / "export/model.safetensors").read_bytes() for one in (whole, stopped)]
    assert weights[0] == weights[1]
    predictions = [(one / "predictions.jsonl").read_text() for one in (whole, stopped)]
    assert predictions[0] == predictions[1]

    scores = json.loads((whole / "evaluate.json").read_text())["slices"]
    assert scores.keys() == LICENCES.keys() and all(one["questions"] for one in scores.values())
    report = (whole / "report.html").read_text()
    assert all(f">{name}<" in report for name in LICENCES)
    card = next((tmp_path / "runs").glob("**/README.md")).read_text()
    assert all(license in card for license in LICENCES.values())


@pytest.mark.parametrize("target", ["vertex", "kubeflow", "local"])
def test_its_pipeline_compiles_and_passes_the_checks(tmp_path: Path, target: str) -> None:
    write_run_file(tmp_path)
    with Terminal(tmp_path, "compile", "run.yaml", *IN_CLOUD, "--target", target, "--output", "build") as terminal:
        answer = terminal.answer(deadline_s=300)
    assert answer.code == 0, answer.said
    assert (tmp_path / f"build/tiny.{target}.yaml").stat().st_size > 10_000
