"""The command by which a step starts."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

from vlmpipe.components.decide import decide
from vlmpipe.pipelines.targets import component_of

PROGRAM = """#!/usr/bin/env bash
trap 'exit 75' TERM
echo ready
while true; do sleep 0.05; done
"""


def test_a_step_that_is_stopped_hears_it_although_a_shell_started_it(tmp_path: Path) -> None:
    python = tmp_path / "python3"
    python.write_text(PROGRAM)
    python.chmod(0o755)
    command = component_of(decide, "image").component_spec.implementation.container.command
    path = os.pathsep.join([str(tmp_path), os.environ["PATH"]])
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={"PATH": path}) as step:
        assert step.stdout and step.stdout.readline() == "ready\n"
        step.send_signal(signal.SIGTERM)  # to the process that the service has started, and to no other
        assert step.wait(timeout=30) == 75
