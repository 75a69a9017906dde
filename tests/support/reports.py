"""A finished run folder for tests of the report: real digit scans in real shards, predictions of a real classifier.

Two scans side by side make a picture; a logistic regression that learned from few scans answers the questions, so that
right and wrong answers, the confusion of digits and the controls are measured, not invented.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st

from tests.support.data.index import write_collected
from tests.support.data.prepared import seal
from tests.support.digit_answers import NUM_EVAL, digit_pairs, evaluation_of, predictions_of, sample_of
from tests.support.planner.plans import red
from vlmpipe.config.sections.output import GateConfig
from vlmpipe.records.decision import Champion
from vlmpipe.registry.gate import AgainstChampion, decide
from vlmpipe.trainer.data.sample import Turn, sample_digest
from vlmpipe.trainer.data.shards.index_lines import IndexLines
from vlmpipe.trainer.data.shards.tar import ShardWriter, key_of, sample_json
from vlmpipe.trainer.evaluation.significance.paired import PairedCounts
from vlmpipe.trainer.records.evaluation import Evaluation
from vlmpipe.trainer.storage import open_storage
from vlmpipe.trainer.storage.export_manifest import write_description
from vlmpipe.trainer.storage.file_sums import FileSum

RUN_ID = "digits-20261120-101500"


def write_json(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content), encoding="utf-8")


def make_run(root: Path) -> Path:
    """Write a finished, accepted run and its prepared data under `root`; returns the run's folder."""
    run, prepared = root / "runs" / RUN_ID, root / "prepared" / "f3a9c1d2"
    pairs, left_guess, right_guess = digit_pairs()
    samples = [sample_of(number, left, right) for number, (left, right, _) in enumerate(pairs)]
    pictures = [picture for _, _, picture in pairs]
    _write_prepared(prepared, samples, pictures)
    predictions = predictions_of(samples, left_guess, right_guess)
    shuffled = predictions_of(samples, np.roll(left_guess, 7), np.roll(right_guess, 7))
    nothing = predictions_of(samples, np.full(NUM_EVAL, 3), np.full(NUM_EVAL, 3))
    evaluation = evaluation_of(predictions, shuffled, nothing)
    (run / "steps").mkdir(parents=True)
    (run / "predictions.jsonl").write_text("".join(json.dumps(line) + "\n" for line in predictions))
    write_json(run / "evaluate.json", evaluation)
    write_json(run / "run.json", run_settings(root))
    write_json(run / "plan.json", red())
    write_json(
        run / "prepared.json",
        {
            "prepared_uri": str(prepared),
            "features_uri": str(root / "features" / "k"),
            "features": "reuse",
        },
    )
    changes = {"before": "0a1b2c3d4e5f", "new": 1200, "changed": 3, "gone": 0, "same": 4100, "moved": 0}
    write_json(run / "data_changes.json", {"fingerprint": "f3a9c1d2", "changes": changes})
    _write_training(run)
    _write_profile(run)
    _write_steps(run)
    write_json(run / "decision.json", _decision(evaluation))
    model_uri = str(root / "registry/digits/versions/000004/model")
    registered = {"model": "digits", "version": 4, "uri": model_uri, "alias": "champion"}
    write_json(run / "registered.json", registered)
    return run


def run_settings(root: Path) -> dict[str, Any]:
    """An effective run file."""
    return {
        "version": 1,
        "name": "digits",
        "run": {"run_id": RUN_ID, "root_uri": str(root)},
        "model": {
            "tower": {"config": {"model_type": "siglip_vision_model", "hidden_size": 64, "num_hidden_layers": 2}},
            "language_model": {"config": {"model_type": "qwen2", "hidden_size": 96, "num_hidden_layers": 3}},
            "tokenizer": "train:512",
            "image_size": 56,
        },
        "data": {"source": "builtin:digits", "sequence_length": 512, "max_images_per_sequence": 16},
        "features": {"cache": "auto"},
        "train": {"epochs": 6, "global_batch_size": 16, "optimizer": {"learning_rate": 0.002}},
        "evaluate": {},
        "output": {"root_uri": str(root)},
        "cluster": {"replica_count": 2},
        "gate": {"min_exact_match": 0.5, "min_margin_over_chance": 0.2},
        "register": {"model_name": "digits", "alias": "champion"},
        "schedule": None,
        "gcp": {},
    }


def _decision(evaluation: dict[str, Any]) -> dict[str, object]:
    gate = GateConfig(min_exact_match=0.5, min_margin_over_chance=0.2, min_margin_over_shuffled_image=0.2)
    champion = Champion(version=3, run_id="digits-20261119-090000", exact_match=0.71)
    answers = PairedCounts(questions=480, only_model=104, only_other=18, images=NUM_EVAL, design_effect=1.4)
    decision = decide(Evaluation.model_validate(evaluation), gate, AgainstChampion(champion, answers))
    return decision.content()


def _write_prepared(prepared: Path, samples: list[dict[str, Any]], pictures: list[bytes]) -> None:
    prepared.mkdir(parents=True)
    (prepared / "tokenizer").mkdir()
    (prepared / "tokenizer/chat.json").write_text('{"as_text": true}')
    shards, index = ShardWriter(prepared, "eval", shard_samples=70), IndexLines()
    for sample, picture in zip(samples, pictures, strict=True):
        key, turns = key_of(sample["id"]), [Turn(**turn) for turn in sample["turns"]]
        place = shards.add(key, sample_json(sample["id"], turns), [("png", picture)])
        index.add(
            id=sample["id"],
            key=key,
            split="eval",
            **{name: value for name, value in asdict(place).items() if name != "are_videos"},  # known of the image
            image_sha256=[hashlib.sha256(picture).hexdigest()],
            image_widths=[72],
            image_heights=[32],
            image_token_counts=[16],
            image_tokens=16,
            tokens=64,
            label_tokens=12,
            turns=len(turns),
            slices=[turn.slice for turn in turns],
            content=sample_digest(tuple(turns), [hashlib.sha256(picture).hexdigest()]),
        )
    shards.close()
    write_collected(prepared, index)
    splits = {
        name: {
            "samples": samples,
            "turns": 4 * samples,
            "images": samples,
            "tokens": 64 * samples,
            "label_tokens": 12 * samples,
            "packed_fill": 0.98,
            "sample_tokens_percentiles": {"50": 64, "95": 64, "100": 64},
            "sample_tokens_histogram": {"edges": [0, 32, 64], "samples": [0, samples]},
        }
        for name, samples in (("train", 1080), ("eval", NUM_EVAL))
    }
    stats = {"splits": splits, "slices": {}, "duplicates": {"images": 7, "samples": 0, "samples_dropped": 0}}
    write_json(prepared / "stats.json", stats | {"eval_images_also_in_train": 3, "eval_samples_also_in_train": 0})
    (prepared / "small.png").write_bytes(pictures[0])
    shown = {"id": samples[0]["id"], "split": "eval", "turns": samples[0]["turns"], "pictures": ["small.png"]}
    write_json(prepared / "contact_sheet.json", {"samples": [shown]})
    write_json(
        prepared / "rejects_summary.json",
        {
            "read": 1203,
            "accepted": 1200,
            "rejected": 3,
            "repaired": 4,
            "by_code": {"image.truncated": 2, "text.empty": 1},
            "repairs": {"exif_transposed": 4},
            "examples": {
                "image.truncated": ["line 17: ends after 812 of 1,204 bytes"],
                "text.empty": ["line 40: answer 1"],
            },
            "pictures": {"image.truncated": ["", ""], "text.empty": ["small.png"]},
        },
    )
    seal(prepared)


def write_export(run: Path) -> None:
    """The least that passes for a whole export."""
    (run / "export").mkdir(parents=True)
    (run / "export/config.json").write_text("{}")
    sums = FileSum.of(run / "export/config.json")
    described = {"checkpoint": "0005-00000400-9f3c2a", "files": {"config.json": asdict(sums)}}
    write_description(open_storage(str(run)), described)


def _write_training(run: Path) -> None:
    random = np.random.default_rng(0)
    lines = []
    for step in range(5, 405, 5):
        loss = 0.31 + 3.1 * math.exp(-step / 70) + random.normal(0, 0.05)
        warm, progress = min(1.0, step / 20), step / 400
        lines.append(
            {
                "step": step,
                "epoch": step // 67,
                "loss": loss,
                "learning_rate": 0.002 * warm * 0.5 * (1 + math.cos(math.pi * progress)),
                "grad_norm": 0.6 + 2 * math.exp(-step / 40) + abs(random.normal(0, 0.1)),
                "tokens_per_s": (9000 if step % 100 else 6500) + random.normal(0, 250),
                "label_tokens": 3100,
                "rows": 16,
                "fill": 0.98,
                "images": 230,
                "data_wait_s": 0.004,
                "step_s": 0.31,
                "checkpoint_stall_s": 0.0 if step % 100 else 0.62,
                "elapsed_s": step * 0.31,
            }
        )
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    write_json(
        run / "summary.json",
        {
            "steps": 400,
            "final_loss": lines[-1]["loss"],
            "first_loss": lines[0]["loss"],
            "tokens": 3_270_000,
            "label_tokens": 1_240_000,
            "starts": 2,
            "steps_made": 420,
            "steps_repeated": 20,
            "wall_s": 124.0,
            "world_size": 2,
            "nodes": 2,
            "strategy": "ddp",
            "precision": "fp32",
            "compile": "off",
            "float8": "none",
            "resumed_from_step": 100,
            "parameters": 312_448,
            "trainable_parameters": 231_040,
            "features": "cached",
            "checkpoint": "0005-00000400-9f3c2a",
            "checkpoint_stall_s": 2.5,
            "versions": {"python": "3.11.7", "torch": "2.13.0", "transformers": "5.23.0"},
        },
    )


def _write_profile(run: Path) -> None:
    spans = {
        "forward and backward": [[0.0, 0.2], [0.3, 0.5]],
        "computing": [[0.01, 0.19], [0.31, 0.49]],
        "communication": [[0.1, 0.25]],
    }
    write_json(
        run / "profile/rank-1.json",
        {
            "rank": 1,
            "node": 0,
            "device": "cpu",
            "trace": "rank-1.pt.trace.json.gz",
            "first_step": 20,
            "last_step": 21,
            "seconds": 0.5,
            "on_gpu": False,
            "computing_s": 0.36,
            "communication_s": 0.15,
            "exposed_communication_s": 0.06,
            "spans": spans,
            "operations": [{"name": "aten::mm", "calls": 12, "seconds": 0.25}],
            "collectives": [{"name": "gloo:all_reduce", "calls": 2, "seconds": 0.15}],
        },
    )


def _write_steps(run: Path) -> None:
    start = 1_795_169_700.0
    plan = [
        ("resolve-run", 1.2, "done", "12 checks passed"),
        ("prepare-data", 0.4, "reused", "1,200 samples were prepared before"),
        ("cache-features", 0.1, "reused", "all 1,200 pictures were encoded before"),
        ("train", 128.6, "done", "400 steps, loss 0.31"),
        ("sync-checkpoint", 2.3, "done", "export of 0005-00000400-9f3c2a"),
        ("evaluate", 9.4, "done", "480 questions"),
        ("decide", 0.2, "done", "accepted"),
        ("register-model", 0.5, "done", "digits version 4"),
        ("notify", 0.0, "running", ""),
    ]
    for step, took, state, message in plan:
        ended = 0.0 if state == "running" else start + took
        write_json(
            run / "steps" / f"{step}.json",
            {
                "step": step,
                "state": state,
                "started_s": start,
                "ended_s": ended,
                "done": 0,
                "total": 0,
                "unit": "",
                "message": message,
                "detail": {},
            },
        )
        start += took + 0.6


def edit(path: Path, **changes: Any) -> None:
    write_json(path, {**json.loads(path.read_text(encoding="utf-8")), **changes})


predictions = st.lists(
    st.builds(
        lambda number, answer, given: {
            "id": f"s{number}", "slice": f"slice {number % 3}", "answer": answer, "prediction": given,
            "correct": answer == given,
        },
        st.integers(0, 20), st.sampled_from(["0", "2", "10", "yes"]), st.sampled_from(["0", "2", "10", "?", ""]),
    ),
    max_size=80,
)  # fmt: skip
