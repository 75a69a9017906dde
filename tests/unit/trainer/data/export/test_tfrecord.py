"""TFRecord files, read by TensorBoard's reader and protobuf's parser: neither is our code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from hypothesis import given
from hypothesis import strategies as st
from tensorboard.compat.tensorflow_stub.errors import DataLossError, OutOfRangeError
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import PyRecordReader_New

from tests.support.data.prepared import prepare_llava
from vlmpipe.trainer.data.export import writers
from vlmpipe.trainer.data.export.export import export_data
from vlmpipe.trainer.data.export.tfrecord import example, framed


def read_records(path: Path) -> list[bytes]:
    """Raises DataLossError where a checksum is wrong."""
    reader, found = PyRecordReader_New(str(path), 0, ""), []
    while True:
        try:
            reader.GetNext()
        except OutOfRangeError:
            return found
        found.append(reader.record())


def parse_example(data: bytes) -> dict[str, list[bytes]]:
    """By the messages of example.proto and feature.proto, as far as bytes go."""
    file = descriptor_pb2.FileDescriptorProto(name="example.proto", package="t", syntax="proto3")
    bytes_list = file.message_type.add(name="BytesList")
    bytes_list.field.add(name="value", number=1, type="TYPE_BYTES", label="LABEL_REPEATED")
    feature = file.message_type.add(name="Feature")
    feature.field.add(
        name="bytes_list", number=1, type="TYPE_MESSAGE", type_name=".t.BytesList", label="LABEL_OPTIONAL"
    )
    features = file.message_type.add(name="Features")
    entry = features.nested_type.add(name="FeatureEntry")
    entry.options.map_entry = True
    entry.field.add(name="key", number=1, type="TYPE_STRING", label="LABEL_OPTIONAL")
    entry.field.add(name="value", number=2, type="TYPE_MESSAGE", type_name=".t.Feature", label="LABEL_OPTIONAL")
    features.field.add(
        name="feature", number=1, type="TYPE_MESSAGE", type_name=".t.Features.FeatureEntry", label="LABEL_REPEATED"
    )
    whole = file.message_type.add(name="Example")
    whole.field.add(name="features", number=1, type="TYPE_MESSAGE", type_name=".t.Features", label="LABEL_OPTIONAL")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    parsed = message_factory.GetMessageClass(pool.FindMessageTypeByName("t.Example")).FromString(data)
    return {name: list(one.bytes_list.value) for name, one in parsed.features.feature.items()}


@given(features=st.dictionaries(st.text(max_size=20), st.lists(st.binary(max_size=300), max_size=4), max_size=4))
def test_examples_and_records_are_read_back(
    features: dict[str, list[bytes]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("records") / "file.tfrecord"
    path.write_bytes(framed(example(features)) + framed(b""))
    first, second = read_records(path)
    assert parse_example(first) == features and second == b""


def test_a_flipped_bit_is_found_by_the_checksum(tmp_path: Path) -> None:
    data = bytearray(framed(b"a record"))
    data[14] ^= 1
    (tmp_path / "file.tfrecord").write_bytes(data)
    with pytest.raises(DataLossError):
        read_records(tmp_path / "file.tfrecord")


def test_samples_are_divided_among_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writers, "FILE_SAMPLES", 5)
    _, prepared = prepare_llava(tmp_path, count=20)
    exported = export_data(prepared.uri, "tfrecord", tmp_path / "out")
    records = [read_records(tmp_path / "out" / name) for name in exported.files["train"]]
    assert [len(each) for each in records[:-1]] == [5] * (len(records) - 1)
    assert sum(map(len, records)) == exported.samples["train"]
    sample = parse_example(records[0][0])
    number = sample["id"][0].decode().removeprefix("sample-")
    assert sample["images"] == [(tmp_path / "images" / f"{number}.png").read_bytes()]
    assert json.loads(sample["messages"][0])[-1] == {"role": "assistant", "content": f"Number {number}."}
