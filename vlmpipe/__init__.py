"""Fine-tune vision-language models as one pipeline: the tool, its command line and its Python API."""

import sys

if sys.version_info < (3, 11):  # noqa: UP036 (pip refuses such a Python, a copy on PYTHONPATH does not; every Python parses this)
    sys.stderr.write("error: this is Python %d.%d\n  expected: Python 3.11 or newer\n" % sys.version_info[:2])  # noqa: UP031
    raise SystemExit(69)

if sys.flags.optimize > 1:  # transformers builds its models' inputs from docstrings, and the reference is made of ours
    sys.stderr.write(
        "error: this Python drops docstrings (-OO or PYTHONOPTIMIZE=2)\n"
        "  expected: Python with docstrings, which transformers reads when it loads a model\n"
        "  to do:    unset PYTHONOPTIMIZE, and start Python without -OO\n"
    )
    raise SystemExit(64)

from vlmpipe.api import RunFailedError, check, compare, compile, load, plan, predict, run, status, submit
from vlmpipe.trainer import __version__

__all__ = [
    "RunFailedError",
    "__version__",
    "check",
    "compare",
    "compile",
    "load",
    "plan",
    "predict",
    "run",
    "status",
    "submit",
]

if "IPython" in sys.modules:
    from vlmpipe.cli.notebook.display import show_in_notebooks

    show_in_notebooks()
