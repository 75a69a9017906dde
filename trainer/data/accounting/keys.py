"""Keys of a record: read, known to change nothing, and left unread.

A reader takes values out of a `Record`, which notes their keys. What is left when the sample is made is unread: media
that no reader took ends the step, other keys are counted and reported.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import PurePosixPath
from typing import Any

from vlmpipe.trainer.config.sources.data_source import Columns
from vlmpipe.trainer.data.media import PDF
from vlmpipe.trainer.data.rejects import RejectCode, RejectedError
from vlmpipe.trainer.data.sample import IMAGE_SUFFIXES, Unread
from vlmpipe.trainer.data.video import VIDEOS

# Suffixes of media, of which only images, videos and PDFs can be read.
UNREADABLE_SUFFIXES = frozenset(
    {
        ".avif", ".heic", ".heif", ".jp2", ".j2k", ".jxl", ".svg", ".psd", ".dcm", ".nii", ".npy", ".npz", ".img",
        ".mp3", ".wav", ".flac", ".ogg", ".opus", ".m4a", ".aac", ".mpg", ".mpeg", ".wmv", ".flv", ".ts", ".pth",
    }
)  # fmt: skip
MEDIA_SUFFIXES = IMAGE_SUFFIXES | VIDEOS | UNREADABLE_SUFFIXES | {PDF}
MEDIA_NAME = re.compile(r"image|img|picture|photo|video|audio", re.IGNORECASE)  # at its beginning
NO_COLUMNS = Columns()
CONVERSATIONS = (
    "conversations",
    "messages",
    "chosen",
    "texts",
    "turns",
    "question",
    "caption",
    "text",
    "completion",
    "response",
)
AN_ADDRESS, BYTES, ITS_NAME = "an address", "bytes", "its name"
VECTOR = (0.0,)  # in place of a column of numbers, which no reader takes
# Of a record without an image: pixels and features of one that was prepared elsewhere, and the number of one.
VECTOR_NAME = re.compile(rf"{MEDIA_NAME.pattern}|pixel", re.IGNORECASE)
IMAGE_IDS = frozenset({"image_id", "img_id", "image_ids", "img_ids", "video_id"})
# Base64 of how JPEG, PNG, WebP and GIF begin. No path has such a beginning of this length.
ENCODED = re.compile(r"(/9j/|iVBORw0KGgo|UklGR|R0lGOD)[A-Za-z0-9+/\s]{48}")
ADDRESS = re.compile(r"(https?|gs|s3|file)://\S+$")
LONGEST_ADDRESS_CHARS = 4096
DEPTH, ITEMS = 3, 8  # of a nested value that are looked at

# Metadata of samples, of their images and of their making. They change neither input nor label.
HARMLESS = frozenset(
    {
        "source", "dataset", "dataset_name", "ds_name", "origin_dataset", "origin_split", "subset", "task", "task_type",
        "task_name", "type", "category", "topic", "domain", "subject", "subfield", "language", "lang", "license",
        "licence", "author", "created_at", "updated_at", "timestamp", "date", "year", "model", "model_name", "version",
        "index", "idx", "uid", "uuid", "key", "__key__", "__url__", "hash", "sha256", "md5", "status", "error_message",
        "width", "height", "original_width", "original_height", "size", "exif", "similarity", "clip_similarity",
        "clip_score", "aesthetic", "aesthetic_score", "punsafe", "pwatermark", "nsfw", "score", "quality", "rating",
        "num_tokens", "length", "comment", "comments", "notes", "metadata", "meta", "info", "tags",
        "image_id", "img_id", "image_ids", "image_width", "image_height", "image_size", "image_sizes", "image_source",
        "image_hash", "image_index", "image_token_num", "video_id", "video_duration", "question_id", "answer_id",
        "question_type", "answer_type", "annotation_id", "caption_id", "url_hash",
    }
)  # fmt: skip
# Of messages and their parts.
HARMLESS_IN_MESSAGES = frozenset({"id", "name", "type", "detail", "cache_control", "annotations", "refusal", "index"})
# Where an image that was read comes from. Without one they name the image itself.
PROVENANCE = re.compile(r"(\w+_)?(url|uri|link|page)s?|source|origin|license|licence|metadata|meta", re.IGNORECASE)

# Keys that change what is a label or an input, with the values at which they change nothing. Those of LOSS_FLAGS are
# read in messages, and refused elsewhere.
LABEL_KEYS: dict[str, tuple[object, ...]] = {
    "weight": (1,), "loss": (1,), "loss_scale": (1,), "loss_weight": (1,), "loss_mask": (), "train": (1,),
    "training": (1,), "train_on": (1,), "train_on_turn": (1,), "train_detail": (), "train_on_details": (),
    "tool_calls": (), "function_call": (), "tools": (), "functions": (),
}  # fmt: skip


# Of messages, where some tools hide answers from the loss by 1 and others by 0.
MASKS = ("mask", "masked")

# Of parts of messages: what Qwen's and Gemini's tools do with one image or video. This project prepares all equally.
PART_SETTINGS = {
    **dict.fromkeys(("max_pixels", "min_pixels", "total_pixels", "resized_height", "resized_width",
                     "mediaResolution", "media_resolution"), "model.min_pixels and model.max_pixels"),
    **dict.fromkeys(("fps", "nframes", "min_frames", "max_frames", "video_start", "video_end", "sample_fps",
                     "videoMetadata", "video_metadata"), "data.video_fps and data.video_frames"),
}  # fmt: skip


class Record(dict[str, Any]):
    """A record that notes the keys whose values are taken. `in` and iteration take none."""

    def __init__(self, content: Mapping[str, object], ignored: Iterable[str] = ()) -> None:
        """`ignored`: keys of messages and parts, too, that are known not to be needed."""
        super().__init__(content)
        self.used: set[str] = set()
        self.noted: set[Unread] = set()  # what is unread below the record's own keys
        self.ignored = frozenset(ignored)

    @classmethod
    def of(cls, content: Mapping[str, object], columns: Columns) -> Record:
        """The record under the names that readers know. Ignored keys are left out."""
        if columns == NO_COLUMNS:
            return cls(content)
        renamed = {name: value for name, value in content.items() if name not in columns.ignored}
        record = cls(renamed, columns.ignored)
        for key in (*columns.named().values(), *columns.image):
            if dict.get(record, key) is None:
                record.noted.add(Unread(key, "", absent=True))
        for name, key in columns.named().items():
            record._rename(key, name if name != "answer" or columns.question else "caption")
        if columns.question or columns.messages:  # the run file says which of several conversations counts
            record._only("question" if columns.question else "messages")
        images = [dict.pop(record, key, None) for key in columns.image]
        if columns.image:
            many = [image for value in images for image in (value if isinstance(value, list) else [value])]
            dict.pop(record, "images", None)
            dict.__setitem__(record, "image", [image for image in many if not _is_empty(image)])
        return record

    def _rename(self, key: str, name: str) -> None:
        if key != name and dict.get(self, key) is not None:
            dict.__setitem__(self, name, dict.pop(self, key))

    def _only(self, key: str) -> None:
        for name in CONVERSATIONS:
            if name not in (key, "answer") and dict.get(self, name) is not None:
                self.noted.add(Unread(name, ""))
                dict.pop(self, name)

    def __getitem__(self, key: str) -> Any:
        self.used.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: object = None) -> Any:
        """Get a value as from a dictionary, and count the key as read."""
        self.used.add(key)
        return super().get(key, default)

    def has(self, key: str) -> bool:
        """Return whether there is a value under the key, which does not count as read by that."""
        return super().get(key) is not None

    def peek(self, key: str) -> Any:
        """The value, which does not count as read."""
        return super().get(key)

    def holding(self, **more: object) -> Record:
        """The record with further values, and one account for both."""
        record = Record({**self, **more}, self.ignored)
        record.used, record.noted = self.used, self.noted
        return record

    def took(self, *names: str) -> Record:
        """The record, with these keys read."""
        self.used.update(names)
        return self

    def note(self, names: Iterable[str], holder: Mapping[str, object], key: str, place: str) -> None:
        """Count these keys of a message or a part under `key` as unread, unless they are harmless or empty.

        Raises RejectedError, which names `place`, for one that changes what is a label.
        """
        for name in names:
            if name in self.ignored:
                continue
            require_neutral(name, holder[name], place)
            if name in MASKS and isinstance(holder[name], bool | int | float):
                message = f"{place} has {name!r}, which changes what is learned; write weight: 0 or 1, which is read"
                raise RejectedError(RejectCode.CONV_LABELS, message)
            if name in PART_SETTINGS and not _is_empty(holder[name]):
                message = f"{place} has {name!r}, which is not read: {PART_SETTINGS[name]} are of all images and videos"
                raise RejectedError(RejectCode.CONV_LABELS, f"{message}, or name it in data.columns.ignored")
            if name not in HARMLESS_IN_MESSAGES | HARMLESS | LABEL_KEYS.keys() and not _is_empty(holder[name]):
                self.noted.add(Unread(f"{key}.{name}", media_of(name, holder[name])))

    def unread(self, *, has_media: bool) -> tuple[Unread, ...]:
        """Keys that were not taken, sorted. `has_media`: the sample has images, which an address may only credit.

        Raises RejectedError for a key that changes what is a label.
        """
        left = self.keys() - self.used
        if not left and not self.noted:
            return ()
        keys = set(self.noted)
        for name in left:
            value = self.peek(name)
            if _is_empty(value):
                continue
            require_neutral(name, value, "the record")
            if name in LABEL_KEYS:
                continue
            media = media_of(name, value) if value is not VECTOR else ITS_NAME if VECTOR_NAME.match(name) else ""
            if has_media and value is VECTOR:
                media = ""
            elif not has_media and name in IMAGE_IDS:
                media = ITS_NAME
            is_known = name in HARMLESS or PROVENANCE.fullmatch(name)
            if has_media and media != BYTES and (is_known or (media == AN_ADDRESS and not MEDIA_NAME.match(name))):
                media = ""  # where the image that was read comes from
            elif not media and not has_media and name not in HARMLESS and _is_address(value):
                media = AN_ADDRESS
            if media or name not in HARMLESS:
                keys.add(Unread(name, media))
        return tuple(sorted(keys))


def require_neutral(name: str, value: object, holder: str) -> None:
    """Raise RejectedError for an unread key that changes labels."""
    if name not in LABEL_KEYS or _is_empty(value):
        return
    neutral = LABEL_KEYS[name]
    if any(value == neutral_value and isinstance(value, bool | int | float) for neutral_value in neutral):
        return
    shown = f": {value}" if isinstance(value, bool | int | float) else ""
    message = f"{holder} has {name!r}{shown}, which changes what is learned and is not read"
    raise RejectedError(RejectCode.CONV_LABELS, message)


def media_of(name: str, value: object) -> str:
    """Why an unread value is taken for media, or ""."""
    if isinstance(value, bool | int | float):
        return ""
    if why := _media_value(value, DEPTH):
        return why
    is_prose = isinstance(value, str) and " " in value.strip()
    return ITS_NAME if MEDIA_NAME.match(name) and name not in HARMLESS and not is_prose else ""


def _is_address(value: object) -> bool:
    return isinstance(value, str) and bool(ADDRESS.match(value))


def _media_value(value: object, depth: int) -> str:
    if isinstance(value, bytes):
        return BYTES
    if isinstance(value, str):
        return _media_text(value)
    if depth and isinstance(value, Mapping):
        if isinstance(value.get("bytes"), bytes):
            return BYTES
        return next((why for item in list(value.values())[:ITEMS] if (why := _media_value(item, depth - 1))), "")
    if depth and isinstance(value, list):
        return next((why for item in value[:ITEMS] if (why := _media_value(item, depth - 1))), "")
    return ""


def is_encoded(value: str) -> bool:
    """Return whether the text is an image in base64, without a `data:` address."""
    return bool(ENCODED.match(value))


def _media_text(value: str) -> str:
    if is_encoded(value):
        return "an image in base64"
    if len(value) > LONGEST_ADDRESS_CHARS or "\n" in value:
        return "a data: address" if value.startswith("data:image/") else ""
    if value.startswith(("data:image/", "data:video/", "data:audio/")):
        return "a data: address"
    if suffix := media_suffix(value):
        return AN_ADDRESS if ADDRESS.match(value) else f"a name that ends in {suffix}"
    return ""


def media_suffix(path: str) -> str:
    """The suffix of a path or an address, if it is one of media; of an address without its query."""
    if ADDRESS.match(path):
        path = path.partition("?")[0].partition("#")[0]
    if " " in path and "/" not in path:  # a sentence that ends in such a word
        return ""
    suffix = PurePosixPath(path).suffix.lower()
    return suffix if suffix in MEDIA_SUFFIXES else ""


def _is_empty(value: object) -> bool:
    if value is None or value == "" or value == [] or value == {}:
        return True
    # Parquet has every member of a struct in every row, with null where there is nothing.
    if isinstance(value, Mapping):
        return all(_is_empty(item) for item in value.values())
    return isinstance(value, list) and len(value) <= ITEMS and all(item is None for item in value)
