"""TFRecord files of `tf.train.Example`, written without TensorFlow.

A record is its length (8 bytes), the length's masked CRC32C, the bytes, and their masked CRC32C, all little-endian.
Formats: tensorflow/core/lib/io/record_writer.h and tensorflow/core/example/{example,feature}.proto.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence

from vlmpipe.trainer.storage.base import crc32c_of

MASK_DELTA = 0xA282EAD8
LENGTH_DELIMITED = 2  # protobuf's wire type of bytes and messages


def framed(data: bytes) -> bytes:
    """One record of a file."""
    length = struct.pack("<Q", len(data))
    return b"".join((length, _masked_sum(length), data, _masked_sum(data)))


def example(features: Mapping[str, Sequence[bytes]]) -> bytes:
    """A serialized `tf.train.Example` of lists of bytes."""
    entries = (
        _field(1, _field(1, name.encode()) + _field(2, _field(1, b"".join(_field(1, value) for value in values))))
        for name, values in sorted(features.items())
    )
    return _field(1, b"".join(entries))


def _masked_sum(data: bytes) -> bytes:
    checksum = crc32c_of(data)
    return struct.pack("<I", (((checksum >> 15) | (checksum << 17)) + MASK_DELTA) & 0xFFFFFFFF)


def _field(number: int, data: bytes) -> bytes:
    return _varint(number << 3 | LENGTH_DELIMITED) + _varint(len(data)) + data


def _varint(value: int) -> bytes:
    digits = bytearray()
    while value > 0x7F:
        digits.append(value & 0x7F | 0x80)
        value >>= 7
    digits.append(value)
    return bytes(digits)
