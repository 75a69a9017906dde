"""A training program without torch, for tests: each step changes one number, which is its model.

python external_program.py MODE STEPS [RESUME]; what goes wrong is MODE.
"""

import json
import os
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

mode, steps = sys.argv[1], int(sys.argv[2])
folder = {name: Path(os.environ[f"VLMPIPE_{name}"]) for name in ("OUTPUT", "CHECKPOINTS", "METRICS")}
stop = []
signal.signal(signal.SIGTERM, lambda *_: None if mode == "deaf" else stop.append(1))


def weights(path: Path, number: float, kind: str = "F32") -> None:
    header = json.dumps({"w": {"dtype": kind, "shape": [1], "data_offsets": [0, 4]}}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + struct.pack("<f", number))


def save(step: int, number: int) -> None:
    checkpoint = folder["CHECKPOINTS"] / f"checkpoint-{step}"
    checkpoint.mkdir()
    weights(checkpoint / "model.safetensors", number)
    (checkpoint / "number").write_text(str(number))
    state = {"global_step": step, "max_steps": steps, "log_history": []}
    (checkpoint / "trainer_state.json").write_text(json.dumps(state))


done, number = 0, 1
if len(sys.argv) > 3:
    resume = Path(sys.argv[3])
    done, number = int(resume.name.rpartition("-")[2]), int((resume / "number").read_text())
if mode == "children":
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
if mode == "fails":
    raise SystemExit("ModuleNotFoundError: no such luck")
while done < steps and not (mode == "early" and done == steps // 2):
    done += 1
    number = (number * 31 + done) % 65521
    loss = float("nan") if mode == "nan-loss" else 1 / done
    with folder["METRICS"].open("a") as metrics:
        print(json.dumps({"step": done, "loss": loss, "total_steps": steps}), file=metrics)
    if done % 5 == 0:
        save(done, number)
    if mode in ("slow", "deaf"):
        time.sleep(0.1)
    if stop:
        save(done, number) if done % 5 else None
        break
if mode != "nothing":
    model_type = "other" if mode == "other-model" else "tiny"
    (folder["OUTPUT"] / "config.json").write_text(json.dumps({"model_type": model_type}))
    weights(folder["OUTPUT"] / "model.safetensors", float("inf") if mode == "infinite" else number)
    (folder["OUTPUT"] / "training_args.bin").write_bytes(b"a pickle")
if mode == "half":
    (folder["OUTPUT"] / "model.safetensors").write_bytes(b"\x40\0\0\0\0\0\0\0{")
