"""Which folders are finished checkpoints: torn ones never are."""

from __future__ import annotations

import io
import json
import os
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.numpy import save
from torch.distributed import checkpoint as dcp

from vlmpipe.trainer.external.checkpoints.forms import (
    Candidate,
    Place,
    Unfit,
    candidates_in,
    cut_off,
    problem,
    processes_of,
)


def archive() -> bytes:
    """What torch.save writes."""
    file = io.BytesIO()
    torch.save({"weight": torch.ones(100)}, file)
    return file.getvalue()


ARCHIVE = archive()


@dataclass
class Written:
    """A checkpoint of two processes in `root`."""

    root: Path
    step: int
    shards: tuple[Path, ...]  # without any of which it is not whole


def deepspeed(root: Path, *, step: int = 5, world: int = 2, stage: int = 2, latest: str = "") -> Written:
    (tag := root / f"global_step{step}").mkdir(parents=True)
    shards = [tag / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(world)]
    if stage == 3:
        shards += [tag / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" for rank in range(world)]
    else:
        shards.append(tag / "mp_rank_00_model_states.pt")
    for path in shards:
        path.write_bytes(ARCHIVE)
    (root / "latest").write_text(latest or tag.name)
    return Written(root, step, tuple(shards))


def distributed(root: Path, *, step: int = 5) -> Written:
    folder = root / f"step-{step}" / "model"
    dcp.save({"weight": torch.ones(100)}, checkpoint_id=str(folder), no_dist=True)
    (shard,) = folder.glob("*.distcp")
    return Written(root, step, (shard,))


def state(root: Path, *, step: int = 5) -> Written:
    (folder := root / f"checkpoint-{step}").mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(save({"weight": torch.ones(100).numpy()}))
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    return Written(root, step, ())


def whole(root: Path, world: int = 2) -> list[int]:
    """Steps of the checkpoints below it that may be committed."""
    return [
        found.step
        for found in candidates_in([root])
        if isinstance(found, Candidate)
        and not problem(files := found.place.files([root]), files, world)
        and not cut_off(files)
    ]


def reasons(root: Path, world: int = 2) -> str:
    said = []
    for found in candidates_in([root]):
        files = found.place.files([root]) if isinstance(found, Candidate) else {}
        said.append(problem(files, files, world) if isinstance(found, Candidate) else found[1])
    return "; ".join(said)


FORMS: dict[str, Callable[..., Written]] = {
    "zero2": deepspeed,
    "zero3": lambda root, **more: deepspeed(root, stage=3, **more),
    "dcp": distributed,
    "transformers": state,
}


@pytest.mark.parametrize("form", FORMS)
def test_a_whole_checkpoint_is_found_with_its_step(form: str, tmp_path: Path) -> None:
    FORMS[form](tmp_path, step=12)
    assert whole(tmp_path) == [12], reasons(tmp_path)


@pytest.mark.parametrize(
    ("form", "how"),  # .metadata of dcp is written after every rank's file was synced to disk
    [("zero2", "absent"), ("zero2", "cut off"), ("zero3", "absent"), ("zero3", "cut off"), ("dcp", "absent")],
)
def test_without_any_one_shard_it_is_torn_though_what_is_written_last_is_there(
    form: str, how: str, tmp_path: Path
) -> None:
    """DeepSpeed's rank 0 writes `latest` after its own files, and no one else's."""
    written = FORMS[form](tmp_path)
    for shard in written.shards:
        data = shard.read_bytes()
        shard.unlink()
        if how == "cut off":
            shard.write_bytes(data[: len(data) // 2])
        assert whole(tmp_path) == [] and reasons(tmp_path), shard.name
        shard.write_bytes(data)
    assert whole(tmp_path) == [5]


def test_shards_of_another_number_of_processes_are_torn(tmp_path: Path) -> None:
    deepspeed(tmp_path, world=3)
    assert "shards of the optimizer of 3 of 4 processes" in reasons(tmp_path, 4)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        ("latest", "names it"),
        ("step-5/model/.metadata", "no .metadata"),
        ("checkpoint-5/trainer_state.json", "no trainer_state.json"),
    ],
)
def test_before_what_is_written_last_it_is_unfinished(damage: str, reason: str, tmp_path: Path) -> None:
    form = {"latest": "zero2", "step-5": "dcp", "checkpoint-5": "transformers"}[damage.partition("/")[0]]
    FORMS[form](tmp_path)
    (tmp_path / damage).unlink()
    assert whole(tmp_path) == []
    assert reason in reasons(tmp_path)


def test_of_two_tags_the_one_that_latest_names_is_taken_and_the_newer_one_is_unfinished(tmp_path: Path) -> None:
    deepspeed(tmp_path, step=5)
    deepspeed(tmp_path, step=10, latest="global_step5")
    assert whole(tmp_path) == [5] and "names global_step5 still" in reasons(tmp_path)
    (found,) = (one for one in candidates_in([tmp_path]) if isinstance(one, Candidate))
    assert {name.partition("/")[0] for name in found.place.files([tmp_path])} == {"global_step5"}


@pytest.mark.parametrize("latest", ["../secrets", "global_step7", "", "x" * 5000])
def test_a_latest_that_names_no_tag_is_another_programs_file(latest: str, tmp_path: Path) -> None:
    deepspeed(tmp_path, latest=latest or "\n")
    assert whole(tmp_path) == []


def test_a_tag_inside_a_transformers_checkpoint_belongs_to_it(tmp_path: Path) -> None:
    deepspeed(state(tmp_path, step=5).root / "checkpoint-5")
    assert whole(tmp_path) == [5] and whole(tmp_path, world=4) == []
    (tmp_path / "checkpoint-5/trainer_state.json").unlink()
    assert whole(tmp_path) == []


@pytest.mark.parametrize("kind", ["folder", "nothing", "pipe"])
def test_links_and_special_files_are_named_and_not_left_out_silently(kind: str, tmp_path: Path) -> None:
    place = tmp_path / "global_step5/extra"
    deepspeed(tmp_path)
    os.mkfifo(place) if kind == "pipe" else place.symlink_to(tmp_path if kind == "folder" else tmp_path / "absent")
    with pytest.raises(Unfit, match="extra is"):
        Place(0, ".", "global_step5").files([tmp_path])


def test_a_link_to_a_file_is_copied_as_the_file(tmp_path: Path) -> None:
    deepspeed(tmp_path)
    (tmp_path / "global_step5/extra").symlink_to(tmp_path / "latest")
    assert "global_step5/extra" in Place(0, ".", "global_step5").files([tmp_path])


def test_metadata_is_read_and_never_loaded(tmp_path: Path) -> None:
    """It is a pickle."""

    class Harm:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.mkdir, (str(tmp_path / "harm"),)

    distributed(tmp_path)
    (tmp_path / "step-5/model/.metadata").write_bytes(pickle.dumps([Harm(), "__9_0.distcp"]))
    assert "__9_0.distcp" in reasons(tmp_path)
    assert not (tmp_path / "harm").exists()


def test_files_of_any_content_end_no_launcher(tmp_path: Path) -> None:
    metadata, weights = tmp_path / ".metadata", tmp_path / "a.safetensors"
    for content in (b"", b"\x80\x04half"):
        metadata.write_bytes(content)
        assert problem({".metadata"}, {".metadata": metadata}, 1) == ".metadata is cut off"
    forms = (b'{"a": 1}', b'{"a": {}}', b'{"a": {"data_offsets": []}}', b'{"a": {"data_offsets": [0, "x"]}}')
    for header in forms:
        weights.write_bytes(len(header).to_bytes(8, "little") + header)
        assert problem({weights.name}, {weights.name: weights}, 1) == ""
    nested = b'{"a":' * 50_000
    weights.write_bytes(len(nested).to_bytes(8, "little") + nested)
    assert problem({weights.name}, {weights.name: weights}, 1) == "a.safetensors is cut off"


def test_only_zero_ties_a_checkpoint_to_its_number_of_processes(tmp_path: Path) -> None:
    for form, processes in {"zero2": 2, "zero3": 2, "dcp": 0, "transformers": 0}.items():
        FORMS[form](root := tmp_path / form)
        (found,) = candidates_in([root])
        assert isinstance(found, Candidate)
        assert processes_of(found.place.files([root])) == processes, form
