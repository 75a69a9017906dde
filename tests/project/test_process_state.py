"""What one part of the program sets for the whole process is set in one place.

A reader that raised the longest CSV cell for its own file decided what readers after it accepted: the same file passed
or failed by what the process had read before.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from tests.support.paths import ROOT, files_of_repository

PACKAGES = ("vlmpipe", "trainer", "pipelines", "components")
LINKS = ("vlmpipe/trainer/", "vlmpipe/pipelines/", "vlmpipe/components/")
# The calls and assignments that change a library for everybody in the process, and the one module that may make each.
ONLY_IN = {
    "csv.field_size_limit": ("trainer/data/text_files/csv_rows.py",),
    "csv.DictReader": ("trainer/data/text_files/csv_rows.py",),
    "csv.reader": (),
    "csv.register_dialect": (),
    "socket.setdefaulttimeout": (),
    "locale.setlocale": (),
    "sys.setrecursionlimit": (),
    "sys.set_int_max_str_digits": (),
    "random.seed": (),
    "np.random.seed": (),
    "logging.disable": (),
    "os.chdir": (),
    "os.umask": (),
    "mimetypes.add_type": (),
    "decimal.setcontext": (),
    "ssl._create_default_https_context": (),
    "Image.MAX_IMAGE_PIXELS": (),
    "ImageFile.LOAD_TRUNCATED_IMAGES": (),
    "pa.set_cpu_count": (),
    "torch.set_default_dtype": (),
    "torch.set_default_device": (),
}


ENDS = {name.rpartition(".")[2] for name in ONLY_IN}
MAY_SET = re.compile(rf"\b({'|'.join(sorted(ENDS))})\b")


def set_for_all(text: str) -> Iterator[str]:
    """The names in ONLY_IN that a module calls or assigns."""
    if not MAY_SET.search(text):
        return
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call):
            named: list[ast.expr] = [node.func]
        else:
            named = node.targets if isinstance(node, ast.Assign) else []
        ending = (each for each in named if isinstance(each, ast.Attribute) and each.attr in ENDS)
        yield from (name for each in ending if (name := ast.unparse(each)) in ONLY_IN)


@pytest.mark.parametrize("package", PACKAGES)
def test_state_of_the_whole_process_is_set_in_one_place(package: str) -> None:
    paths = [str(path.relative_to(ROOT)) for path in (ROOT / package).rglob("*.py")]
    shipped = [path for path in paths if not path.startswith(LINKS)]
    assert len(shipped) > 10
    found = {(path, name) for path in shipped for name in set_for_all((ROOT / path).read_text(encoding="utf-8"))}
    assert {each for each in found if each[0] not in ONLY_IN[each[1]]} == set()


def test_calls_and_assignments_are_found() -> None:
    assert list(set_for_all("import csv\ncsv.field_size_limit(1)\n")) == ["csv.field_size_limit"]
    assert list(set_for_all("Image.MAX_IMAGE_PIXELS = None\n")) == ["Image.MAX_IMAGE_PIXELS"]
    assert list(set_for_all("limit = Image.MAX_IMAGE_PIXELS\nrandom.Random(1).seed(2)\n")) == []


def test_no_test_replaces_a_function_of_time_for_all_threads() -> None:
    """Threads of servers in the same process would get it too: use `tests.support.clock.replace_time`."""
    replaced = re.compile(r'setattr\([^\n]*\btime(?:\.|", "|, ")(?:sleep|monotonic|time|time_ns|perf_counter)"')
    assert [path for path in files_of_repository("tests/*.py") if replaced.search(path.read_text("utf-8"))] == []
