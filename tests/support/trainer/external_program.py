"""A training program without torch, for tests: each step changes one number, which is its model.

python external_program.py MODE STEPS [RESUME]; what goes wrong is MODE. A second SIGTERM ends it at once.
python external_program.py self MODE STEPS [RESUME] starts that as launchers do which know nothing of signals, such as
llamafactory-cli: it waits for its child, in a session of its own as torchrun's workers are, and dies of SIGTERM.
"""

import json
import os
import signal
import struct
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

if sys.argv[1] == "self":
    told = ("NNODES", "NODE_RANK", "NPROC_PER_NODE", "MASTER_ADDR", "MASTER_PORT")
    print("told", json.dumps([os.environ[name] for name in told[:3]]), int(os.environ["MASTER_PORT"]) > 0, flush=True)
    if others := sorted({"RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_RUN_ID"} & set(os.environ)):
        raise SystemExit(f"torchrun's variables: {others}")
    child = subprocess.Popen([sys.executable, __file__, *sys.argv[2:]], start_new_session=True)
    raise SystemExit(child.wait())
mode, steps = sys.argv[1], int(sys.argv[2])
folder = {name: Path(os.environ[f"VLMPIPE_{name}"]) for name in ("OUTPUT", "CHECKPOINTS", "METRICS")}
if mode == "as-on-vertex":  # a program that knows nothing of vlmpipe
    folder |= {"OUTPUT": Path(os.environ["AIP_MODEL_DIR"]), "CHECKPOINTS": Path(os.environ["AIP_CHECKPOINT_DIR"])}
    for path in (folder["CHECKPOINTS"], folder["OUTPUT"]):
        path.mkdir(parents=True, exist_ok=True)
stop = []


def on_stop(*_: object) -> None:
    if stop:
        os._exit(9)
    if mode != "deaf":
        stop.append(1)


signal.signal(signal.SIGTERM, on_stop)


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


def post_that_all_is_done() -> None:
    """As transformers does at the end, also where that comes too early."""
    token = Path(os.environ["KUBEFLOW_TRAINER_SERVER_TOKEN"]).read_text(encoding="utf-8")
    metrics = [{"name": "current_step", "value": str(steps)}, {"name": "total_steps", "value": str(steps)}]
    body = json.dumps({"trainerStatus": {"progressPercentage": 100, "metrics": metrics}}).encode()
    headers = {"Authorization": f"Bearer {token}"}
    urllib.request.urlopen(urllib.request.Request(os.environ["KUBEFLOW_TRAINER_SERVER_URL"], body, headers), timeout=9)


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
    if mode in ("slow", "slow-saving", "deaf"):
        time.sleep(0.1)
    if stop:
        time.sleep(1.5 if mode == "slow-saving" else 0)
        save(done, number) if done % 5 else None
        break
if mode in ("plain", "early"):
    post_that_all_is_done()
if mode != "nothing":
    model_type = "other" if mode == "other-model" else "tiny"
    (folder["OUTPUT"] / "config.json").write_text(json.dumps({"model_type": model_type}))
    weights(folder["OUTPUT"] / "model.safetensors", float("inf") if mode == "infinite" else number)
    (folder["OUTPUT"] / "training_args.bin").write_bytes(b"a pickle")
if mode == "half":
    (folder["OUTPUT"] / "model.safetensors").write_bytes(b"\x40\0\0\0\0\0\0\0{")
