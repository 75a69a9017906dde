"""Records that a user's own function yields: `data.source: module:function`, or `FILE.py:function`."""

from __future__ import annotations

import hashlib
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from types import ModuleType

from vlmpipe.trainer.config.data import DataConfig
from vlmpipe.trainer.config.sources.data_source import function_named
from vlmpipe.trainer.confinement.limits import require_own_code
from vlmpipe.trainer.data.accounting.keys import Record
from vlmpipe.trainer.data.conversations.layouts import media_values
from vlmpipe.trainer.data.conversations.message_parts import kind_of
from vlmpipe.trainer.data.rejects import Reject
from vlmpipe.trainer.data.sample import Sample
from vlmpipe.trainer.data.sources.base import Records, Source
from vlmpipe.trainer.data.sources.image_files import open_image_files
from vlmpipe.trainer.data.sources.llava import LlavaSource
from vlmpipe.trainer.data.sources.parquet import row_sample
from vlmpipe.trainer.errors import ConfigError, DataError, UserError
from vlmpipe.trainer.storage import open_storage
from vlmpipe.trainer.storage.base import Storage
from vlmpipe.trainer.storage.local import LocalStorage

EXAMPLE = """def records():
    yield {"id": "1", "image": "cats/1.jpg", "question": "What is this?", "answer": "A cat."}"""
MAX_MODULE_BYTES = 4 << 20  # of a file with a user's function
PLAIN = (str, bytes, bool, int, float, type(None))


class FunctionSource(LlavaSource):
    """Samples of the records that one call of a function yields, in their order.

    Each pass calls the function again. It must yield the same records each time; `fingerprint` covers all of them, so
    that a change of the data, the arguments or the code that changes a record is another set.
    """

    format = "function"

    def __init__(self, config: DataConfig) -> None:
        """Raises ConfigError for a function that cannot be called, and what opening the image folder raises."""
        self.config, self._uri = config, config.source
        self.splits, self._empty = {}, {}  # no file's name states a split, and no file is empty
        self._function, folder = load_function(config.source)
        try:
            inspect.signature(self._function).bind(**config.source_arguments)
        except TypeError as error:
            raise ConfigError(
                f"data.source {self._uri} cannot be called with {config.source_arguments}: {error}",
                expected="a value in data.source_arguments for each parameter without a default",
            ) from error
        # Without a folder, images are next to the file of the function; an installed module has none.
        self.image_files = open_image_files(config, config.image_folder, folder)

    def fingerprint(self) -> str:
        """Covers every record, and name, size and checksum (in a folder: modification time) of every image it names."""
        digest = hashlib.sha256()
        names = self._hash_and_name(digest)
        first = next(names, None)  # without one, no folder is listed
        named = self.image_files.fingerprint(chain([first], names)) if first else ""
        return f"{self.format} {digest.hexdigest()} {named}"

    def _hash_and_name(self, digest: hashlib._Hash) -> Iterator[str]:
        """The images that are not in the records, while `digest` takes in the records."""
        for number, record in self._yielded():
            digest.update(repr(_hashed(record, self._uri, number)).encode("utf-8", "surrogatepass"))
            sample = self.checked(self._uri, record)
            if isinstance(sample, Sample) and not _has_stored(Record.of(record, self.config.columns)):
                yield from (image.name for image in sample.images)

    def recall(self, earlier: Source) -> None:
        """Take over nothing: only another pass shows whether the records changed."""

    def parts(self) -> list[Records]:
        return [self]

    def __iter__(self) -> Iterator[Sample | Reject]:
        return self.read(self._uri)

    def read(self, name: str) -> Iterator[Sample | Reject]:
        for number, record in self._yielded():
            yield self.checked(f"{name} record {number}", record)

    def sample(self, where: str, record: object) -> Sample:
        if isinstance(record, Record) and _has_stored(record):
            return row_sample(self, where, record)
        return super().sample(where, record)

    def _yielded(self) -> Iterator[tuple[int, dict[str, object]]]:
        """Numbered records. Raises DataError for a function that fails or yields anything but objects, or nothing."""
        number = 0
        try:
            for number, record in enumerate(self._called(), 1):
                if not isinstance(record, dict):
                    raise DataError(
                        f"data.source {self._uri} yields {kind_of(record)} as record {number}",
                        expected=f"a dict for each sample, such as\n{EXAMPLE}",
                    )
                if unnamed := [key for key in record if not isinstance(key, str)]:
                    raise DataError(
                        f"data.source {self._uri} yields a record with {kind_of(unnamed[0])} as a key: record {number}",
                        expected="texts as keys",
                    )
                yield number, record
        except UserError:
            raise
        except (Exception, SystemExit) as error:
            raise self._failed(error, f"after record {number}") from error
        if not number:
            raise DataError(f"data.source {self._uri} yields no records", expected=f"at least one, such as\n{EXAMPLE}")

    def _called(self) -> Iterable[object]:
        try:
            result = self._function(**self.config.source_arguments)
        except UserError:
            raise
        except (Exception, SystemExit) as error:
            raise self._failed(error, "when it is called") from error
        if not isinstance(result, Iterable) or isinstance(result, (str, bytes, dict)):
            raise DataError(
                f"data.source {self._uri} returns {kind_of(result)}", expected=f"a generator of records:\n{EXAMPLE}"
            )
        return result

    def _failed(self, error: BaseException, when: str) -> DataError:
        return DataError(
            f"data.source {self._uri} raises {type(error).__name__} {when}: {error}{_place(error, self._function)}",
            expected="a function that yields every record",
        )


def load_function(uri: str) -> tuple[Callable[..., object], Storage]:
    """The function, and the storage of the folder that its file is in (an empty one for an installed module).

    Raises ConfigError where there is no such module, file or function, or importing the module fails.
    """
    named = function_named(uri)
    assert named, uri
    require_own_code(f"data.source {uri}")
    module_name, name = named
    if module_name.endswith(".py"):
        parent, _, file = module_name.rpartition("/")
        folder = open_storage(parent or ("/" if module_name.startswith("/") else "."))
        module = _of_file(uri, module_name, folder, file)
    else:
        folder = LocalStorage(os.devnull)
        module = _installed(uri, module_name)
    function = getattr(module, name, None)
    if not callable(function):
        known = [key for key, value in vars(module).items() if inspect.isfunction(value) and not key.startswith("_")]
        what = f"has no {name}" if function is None else f"has {kind_of(function)} as {name}"
        expected = f"one of its functions: {', '.join(known)}" if known else f"a function, such as\n{EXAMPLE}"
        raise ConfigError(f"data.source {uri}: {module_name} {what}", expected=expected)
    return function, folder


def _of_file(uri: str, address: str, folder: Storage, file: str) -> ModuleType:
    if folder.stat(file) is None:
        raise ConfigError(f"data.source {uri}: {folder.uri(file)} does not exist", expected="a Python file")
    code = folder.read(file, MAX_MODULE_BYTES)
    name = f"vlmpipe_source_{hashlib.sha256(code).hexdigest()[:16]}"
    module = ModuleType(name)
    module.__file__ = address
    sys.modules[name] = module  # dataclasses and pickle look a class's module up
    with _importing(uri):
        exec(compile(code, address, "exec", dont_inherit=True), vars(module))  # without this module's __future__
    return module


def _installed(uri: str, name: str) -> ModuleType:
    with _importing(uri):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if not f"{name}.".startswith(f"{error.name}."):  # a module that it imports
                raise
    raise ConfigError(
        f"data.source {uri}: {sys.executable} finds no module {name}",
        expected="a module of an installed package, or the address of a file: FILE.py:function",
        fix="install the package here and in gcp.pipeline_image, or name the file",
    )


@contextmanager
def _importing(uri: str) -> Iterator[None]:
    try:
        yield
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"data.source {uri}: importing it raises {type(error).__name__}: {error}",
            expected="a module that can be imported where data is prepared, with all that it imports",
        ) from error


def _has_stored(record: Record) -> bool:
    """Return whether the bytes of an image are in the record. Raises RejectedError."""
    return any(
        isinstance(image, bytes) or (isinstance(image, dict) and isinstance(image.get("bytes"), bytes))
        for image in media_values(record, "image")
    )


def _hashed(value: object, uri: str, number: int) -> object:
    """`value` with digests in place of bytes. Raises DataError for a type whose text differs between processes."""
    if isinstance(value, bytes):
        return hashlib.sha256(value).hexdigest()
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, (list, tuple)):
        return [_hashed(item, uri, number) for item in value]
    if isinstance(value, dict):
        return [(_hashed(key, uri, number), _hashed(content, uri, number)) for key, content in value.items()]
    raise DataError(
        f"data.source {uri} yields a value of type {type(value).__name__} in record {number}",
        expected="texts, numbers, bytes, lists and dicts; an image is its path, or the bytes of its file",
        fix="convert it in the function: a NumPy value by .item() or .tolist(), a date by str()",
    )


def _place(error: BaseException, function: Callable[..., object]) -> str:
    """The last line of the user's file that the error passed, such as " (line 12)"."""
    file = getattr(inspect.unwrap(function), "__code__", None)
    lines = []
    trace = error.__traceback__
    while trace:
        if file and trace.tb_frame.f_code.co_filename == file.co_filename:
            lines.append(trace.tb_lineno)
        trace = trace.tb_next
    return f" (line {lines[-1]})" if lines else ""
