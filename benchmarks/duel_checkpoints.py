"""The same damage before everybody's checkpoints: who notices, and what is left to go on from. `make duel`

Real libraries and real files, on the CPU. Every side saves step 1 and step 2 of the same weights; then step 2 is damaged
and asked for again. A side that goes on from step 1 has lost one interval; one that loads the wrong bytes has lost the run.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import io
import json
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp

from benchmarks import duel_deepspeed
from trainer.checkpoint.commit import CommitRecord, checkpoint_name, commit, newest_good, upload_node_files
from trainer.storage import LocalStorage

ELEMENTS = 50_000
WRONG, NOTICED, FELL_BACK = "loads wrong bytes, says nothing", "refuses to load", "goes on from step 1"
