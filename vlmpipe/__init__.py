"""Fine-tune vision-language models as one pipeline: the tool, its command line and its Python API."""

from trainer import __version__
from vlmpipe.api import RunFailedError, check, compile, load, plan, run, status, submit

__all__ = ["RunFailedError", "__version__", "check", "compile", "load", "plan", "run", "status", "submit"]
