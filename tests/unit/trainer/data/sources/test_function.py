"""Functions of users as sources: their records become samples, and each fault of theirs is named."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.gcs.server import FakeGcs
from tests.support.data.prepared import conversation, job_config, llava_folder, png, prepare_llava, run_prepare
from tests.support.paths import ROOT
from tests.support.short_form import WHOLE
from vlmpipe.trainer.config.data import DataConfig
from vlmpipe.trainer.config.sources.data_source import function_named
from vlmpipe.trainer.data.export.export import export_data
from vlmpipe.trainer.data.rejects import Reject
from vlmpipe.trainer.data.sample import Sample, Turn
from vlmpipe.trainer.data.sources import open_source
from vlmpipe.trainer.errors import ExitCode, UserError
from vlmpipe.trainer.storage import open_storage

EXAMPLES = ROOT / "examples/sources"
ANSWER = {"id": "1", "question": "What?", "answer": "A cat."}


def write(folder: Path, body: str, name: str = "mine.py") -> str:
    """A file with the function `records`; its address as a source."""
    (folder / name).write_text(f"def records(count=1):\n    {body}\n")
    return f"{folder / name}:records"


def read(source: str, **data: Any) -> list[Sample]:
    samples = list(open_source(DataConfig(source=source, sequence_length=100, **data)))
    assert all(isinstance(sample, Sample) for sample in samples), samples
    return [sample for sample in samples if isinstance(sample, Sample)]


def test_images_are_bytes_or_paths(tmp_path: Path) -> None:
    images, _ = llava_folder(tmp_path, 2)
    in_record, by_path = write(tmp_path, f"yield {ANSWER} | {{'image': {png(1)!r}}}", "a.py"), "images/1.png"
    named = write(tmp_path, f"yield {ANSWER} | {{'images': ['{by_path}']}}", "b.py")
    for source in (in_record, named):
        (sample,) = read(source)
        assert sample.turns == (Turn("<image>\nWhat?", "A cat."),)
        assert [image.read() for image in sample.images] == [(images / "1.png").read_bytes()]


def test_a_module_is_imported_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, f"yield {ANSWER}", "module_of_a_user.py")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert [sample.id for sample in read("module_of_a_user:records")] == ["1"]


def test_a_file_of_a_bucket_is_read_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = "for number in range(count):\n        yield {'id': number, 'image': f'{number}.png', 'question': 'What?', "
    source = write(tmp_path, f"{body}'answer': 'A cat.'}}")
    monkeypatch.setenv("VLMPIPE_CACHE_DIR", str(tmp_path / "cache"))
    with FakeGcs(buckets=["bucket"]) as server:
        client = server.client()
        monkeypatch.setattr("vlmpipe.trainer.storage.gcs._default_client", lambda: client)
        bucket = open_storage("gs://bucket/sources")
        bucket.write("mine.py", Path(source.removesuffix(":records")).read_bytes())
        for number in (0, 1):
            bucket.write(f"{number}.png", png(number))
        samples = read("gs://bucket/sources/mine.py:records", source_arguments={"count": 2})
        assert [sample.images[0].read() for sample in samples] == [png(0), png(1)]


def test_the_fingerprint_follows_records_and_images_alone(tmp_path: Path) -> None:
    llava_folder(tmp_path, 2)
    body = f"return [{ANSWER} | {{'image': f'images/{{number}}.png'}} for number in range(count)]"

    def fingerprint(source: str, count: int = 1) -> str:
        arguments = {"count": count}
        data = DataConfig(source=source, source_arguments=arguments, sequence_length=100)
        return open_source(data).fingerprint()

    first = fingerprint(write(tmp_path, body))
    assert fingerprint(write(tmp_path, f"# the same records\n    {body}")) == first
    assert fingerprint(write(tmp_path, body.replace("A cat.", "A dog."))) != first
    assert fingerprint(write(tmp_path, body), count=2) != first
    os.utime(tmp_path / "images/0.png", ns=(1, 1))
    assert fingerprint(write(tmp_path, body)) != first


def test_prepared_data_is_reused_and_records_that_change_meanwhile_end_the_step(tmp_path: Path) -> None:
    llava_folder(tmp_path, 6)
    record = "{'id': number, 'image': f'images/{number}.png', 'question': f'Which {number}?', 'answer': 'A cat.', "
    record += "'split': 'train' if number else 'eval'}"
    source = write(tmp_path, f"for number in range(count):\n        yield {record}")
    # The whole form has chunks, which processes of their own prepare.
    data = {"source": source, "source_arguments": {"count": 6}, **({"chunk_samples": 2, "workers": 2} if WHOLE else {})}
    config = job_config(tmp_path / "root", **data)
    first, again = run_prepare(config), run_prepare(config)
    assert (first.counts["read"], first.reused, again.reused) == (6, False, True)
    clock = write(
        tmp_path, f"import time\n    for number in range(6):\n        yield {record} | {{'x': time.time_ns()}}"
    )
    with pytest.raises(UserError) as error:
        run_prepare(job_config(tmp_path / "root", **data | {"source": clock, "source_arguments": {}}))
    assert error.value.code == ExitCode.DATA


CONFIG, DATA = ExitCode.CONFIG, ExitCode.DATA
FAULTS = {
    "raises": ("yield {}\n    raise KeyError('x')", DATA, "KeyError after record 1"),
    "raises at the call": ("return 1 / 0", DATA, "ZeroDivisionError when it is called"),
    "a wrong type": (f"yield {ANSWER}\n    yield 3", DATA, "a number as record 2"),
    "no generator": ("pass", DATA, "returns nothing"),
    "no records": ("return []", DATA, "yields no records"),
    "an object": ("yield {'image': object()}", DATA, "type object in record 1"),
    "no such function": ("pass\ndef others(): pass\ndel records", CONFIG, "has no records"),
    "no function": ("pass\nrecords = 3", CONFIG, "a number as records"),
    "a parameter": ("pass\ndef records(path): pass", CONFIG, "'path'"),
    "its import": ("pass\nimport no_such_module_here", CONFIG, "no_such_module_here"),
    "an end of the program": ("yield {}\n    raise SystemExit(0)", DATA, "SystemExit after record 1"),
    "an end at the import": ("pass\nraise SystemExit(0)", CONFIG, "SystemExit"),
    "a key": (f"yield {ANSWER} | {{1: 2}}", DATA, "a number as a key"),
    "its syntax": ("return (", CONFIG, "SyntaxError"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_of_a_function_are_named(fault: str, tmp_path: Path) -> None:
    body, code, named = FAULTS[fault]
    with pytest.raises(UserError) as error:
        open_source(DataConfig(source=write(tmp_path, body), sequence_length=100)).fingerprint()
    assert error.value.code == code and named in error.value.found and "mine.py:records" in error.value.found


@pytest.mark.parametrize(
    ("value", "converted"),
    [("np.int64(7)", "np.int64(7).item()"), ("np.arange(2)", "np.arange(2).tolist()"), ("day", "str(day)")],
)
def test_a_value_of_another_type_is_converted_as_the_error_says(value: str, converted: str, tmp_path: Path) -> None:
    imports = "import numpy as np, datetime; day = datetime.date(2026, 1, 2)"
    wrong, right = (write(tmp_path, f"{imports}; yield {{**{ANSWER}, 'slice': {one}}}", f"{name}.py")
                    for name, one in (("wrong", value), ("right", converted)))  # fmt: skip
    with pytest.raises(UserError, match="yields a value of type") as refused:
        open_source(DataConfig(source=wrong, sequence_length=100)).fingerprint()
    assert converted.rpartition(".")[2] in refused.value.fix or "str()" in refused.value.fix
    open_source(DataConfig(source=right, sequence_length=100)).fingerprint()


@pytest.mark.parametrize("source", ["no/such.py:records", "no_such_module.at_all:records"])
def test_a_missing_module_is_an_error_of_the_run_file(source: str) -> None:
    with pytest.raises(UserError) as error:
        open_source(DataConfig(source=source, sequence_length=100))
    assert error.value.code == CONFIG and source in error.value.found


def test_a_module_that_an_installed_one_lacks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "package_of_a_user").mkdir()
    (tmp_path / "package_of_a_user/__init__.py").write_text("import no_such_module_here")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(UserError) as error:
        open_source(DataConfig(source="package_of_a_user.below:records", sequence_length=100))
    assert error.value.code == CONFIG and "no_such_module_here" in error.value.found


def test_a_file_is_compiled_as_by_python_itself(tmp_path: Path) -> None:
    source = write(
        tmp_path, f"yield {ANSWER} | {{'slice': given.__annotations__['a'].__name__}}\ndef given(a: int): pass"
    )
    (sample,) = read(source)
    assert sample.turns[0].slice == "int"


@pytest.mark.parametrize("uri", ["builtin:digits", "bq://my-project.d.t", "gs://b/set.json", "set.json", "a:b/c.json"])
def test_other_sources_are_no_functions(uri: str) -> None:
    assert function_named(uri) is None


def result(name: str, **value: Any) -> dict[str, Any]:
    return {"from_name": name, "to_name": "image", "type": "textarea", "value": value}


def task(number: int, *annotations: dict[str, Any], **data: Any) -> dict[str, Any]:
    content = {"image": f"/data/local-files/?d=images/{number}.png"} | data
    return {"id": number, "annotations": list(annotations), "predictions": [], "data": content}


def test_the_example_reads_a_label_studio_export(tmp_path: Path) -> None:
    images, _ = llava_folder(tmp_path, 3)
    answer = {"result": [result("answer", text=["A cat."]), result("kind", choices=["photo", "dark"])]}
    cancelled, truth = answer | {"was_cancelled": True}, {"ground_truth": True, "result": [result("n", number=3)]}
    pages = ["/data/local-files/?d=images/0.png", "/data/local-files/?d=images/1.png"]
    tasks = [
        task(1, answer, question="What is it?", slice="cats"),
        task(0, cancelled, answer, truth),
        task(2, answer, pages=pages, image=None),
    ]
    (tmp_path / "export.json").write_text(json.dumps(tasks))
    arguments = {"path": str(tmp_path / "export.json")}
    one, two, three = read(
        f"{EXAMPLES}/label_studio.py:records", source_arguments=arguments, image_folder=str(tmp_path)
    )
    assert one.turns == (
        Turn("<image>\nWhat is it?", "A cat.", slice="cats"),
        Turn("kind", "photo, dark", slice="cats"),
    )
    assert [image.read() for image in one.images] == [(images / "1.png").read_bytes()]
    assert two.turns == (Turn("<image>\nDescribe this image.", "3"),)
    assert len(three.images) == 2


def test_the_example_reads_the_tfrecords_that_are_exported(tmp_path: Path) -> None:
    _, prepared = prepare_llava(tmp_path, count=20)
    export_data(prepared.uri, "tfrecord", tmp_path / "out")
    source = f"{EXAMPLES}/tfrecord.py:records"
    samples = read(source, source_arguments={"folder": str(tmp_path / "out")})
    assert len(samples) == prepared.counts["accepted"] and {sample.split for sample in samples} == {"train", "eval"}
    assert all(sample.images[0].read() for sample in samples)
    file = next((tmp_path / "out").glob("train*.tfrecord"))
    file.write_bytes(file.read_bytes()[:-3])
    with pytest.raises(UserError) as error:
        read(source, source_arguments={"folder": str(tmp_path / "out")})
    assert error.value.code == DATA and "damaged" in error.value.found


def test_the_example_makes_slices_of_languages(tmp_path: Path) -> None:
    texts = ("Was ist auf dem Bild?", "What is in the picture?", "이 사진에 무엇이 있습니까?", "3 + 4")
    records = [{"id": str(n), "conversations": conversation(text, "42")} for n, text in enumerate(texts)]
    (tmp_path / "all.json").write_text(json.dumps(records))
    source, path = f"{EXAMPLES}/by_language.py:records", str(tmp_path / "all.json")
    found = {sample.turns[0].slice for sample in read(source, source_arguments={"path": path})}
    assert found == {"German", "English", "Korean", "no letters"}
    (german,) = read(source, source_arguments={"path": path, "only": "German"})
    assert german.id == "0"


def test_records_that_cannot_be_read_are_rejected_by_themselves(tmp_path: Path) -> None:
    source = write(tmp_path, f"yield {ANSWER}\n    yield {{'question': 'What?'}}")
    first, second = open_source(DataConfig(source=source, sequence_length=100))
    assert isinstance(first, Sample) and isinstance(second, Reject) and second.where.endswith("record 2")
