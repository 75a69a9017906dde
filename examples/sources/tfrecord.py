"""Records of TFRecord files, read without TensorFlow.

`messages` is read from the feature of that name (JSON), as `vlmpipe data export --format tfrecord` writes it; change
`record_of` for the features of your own files. In the run file:

    data:
      source: examples/sources/tfrecord.py:records
      source_arguments: {folder: exported}

Formats: tensorflow/core/lib/io/record_writer.h, tensorflow/core/example/{example,feature}.proto.
"""

import json
import struct
from pathlib import Path

import google_crc32c


def records(folder):
    """Yield a record for each example, with its images as the bytes of their files."""
    for path in sorted(Path(folder).glob("*.tfrecord")):
        split = "eval" if path.name.startswith("validation") else "train"
        for example in examples(path):
            yield record_of(features_of(example)) | {"split": split}


def record_of(features):
    """Return the record of an example's features."""
    record = {"id": features["id"][0].decode(), "messages": json.loads(features["messages"][0])}
    return record | {"images": list(features.get("images", []))}


def examples(path):
    """Yield the serialized examples of a file. Raises ValueError where its end is missing or a checksum is wrong."""
    with path.open("rb") as file:
        while head := file.read(12):
            length = int.from_bytes(head[:8], "little")
            data, checksum = file.read(length), file.read(4)
            if len(checksum) < 4 or checksum_of(data) != checksum or checksum_of(head[:8]) != head[8:]:
                raise ValueError(f"{path} is damaged before byte {file.tell()}")
            yield data


def checksum_of(data):
    """Return the masked CRC32C of TFRecord files."""
    value = google_crc32c.value(data)
    return struct.pack("<I", (((value >> 15) | (value << 17)) + 0xA282EAD8) & 0xFFFFFFFF)


def features_of(example):
    """Return the lists of bytes of a `tf.train.Example` by their names; lists of numbers are left out."""
    features = {}
    for _, content in fields(example):  # Example.features
        for _, entry in fields(content):  # Features.feature, a map
            pair = dict(fields(entry))
            kinds = dict(fields(pair.get(2, b"")))  # Feature: bytes_list is 1
            features[pair[1].decode()] = [value for _, value in fields(kinds.get(1, b""))]
    return features


def fields(message):
    """Yield number and bytes of the length-delimited fields of a protobuf message."""
    at = 0
    while at < len(message):
        tag, at = varint(message, at)
        if tag & 7 != 2:
            raise ValueError(f"a field of wire type {tag & 7}, expected length-delimited ones")
        length, at = varint(message, at)
        yield tag >> 3, message[at : at + length]
        at += length


def varint(message, at):
    """Return a number of variable length, and the position after it."""
    value = shift = 0
    while True:
        byte = message[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at
