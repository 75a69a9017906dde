"""Part `compiling`: what a process that compiles all shipped run files takes, step by step, beside `import kfp`.

The steps run one after another over all run files, in a process of their own for each round:
python -m benchmarks.planner.compiling prints them as JSON.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.support.report import Side
from benchmarks.support.suite import Bench

ROOT = Path(__file__).parents[2]
RUN_FILES = sorted((ROOT / "configs").glob("*.yaml"))
KFP = "import kfp"
OF_KFP = "graphs, by kfp"
STEPS = {
    KFP: "importing kfp, with Python's own start",
    "imports": "importing what else compiles: the run file's models, command line, planner",
    "load": "run files read and checked",
    OF_KFP: "graphs, of which most is kfp's",
    "dump": "graphs written as YAML",
    "check": "YAML read again and compared",
    "rules": "job specs and sizes of steps' inputs checked",
}


def compiling(bench: Bench) -> None:
    """Every step as CPU seconds, and their sum as a multiple of the first."""
    found = bench.take_turns("compiling", {"steps": steps})["steps"]
    for name, what in STEPS.items():
        bench.report.figure(what, f"{len(RUN_FILES)} run files", "CPU s", Side(name, [one[name] for one in found]))
    for what, names in (
        ("compiling all shipped run files", list(STEPS)),
        ("with nothing but imports and kfp's graphs", [KFP, "imports", OF_KFP]),
    ):
        times = [sum(one[name] for name in names) / one[KFP] for one in found]
        bench.report.figure(what, f"{len(RUN_FILES)} run files", "x import kfp", Side("all", times))


def steps() -> dict[str, float]:
    """CPU seconds by step, of one process."""
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.planner.compiling"]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, encoding="utf-8")
    return dict(json.loads(done.stdout))


def main() -> None:
    begun = [0.0]  # of the process

    def ended() -> float:
        begun.append(time.process_time())
        return begun[-1] - begun[-2]

    import kfp  # noqa: F401

    found = {KFP: ended()}
    from vlmpipe.trainer.gc_control import collector_off

    with collector_off():  # as the command: a search among all of kfp's objects is a seventh of our imports
        import vlmpipe.cli.app  # noqa: F401
        import vlmpipe.pipelines.compile as pipelines
        from vlmpipe.config.run_config import load_run_file
        from vlmpipe.job_spec.check import check_jobs
        from vlmpipe.pipelines.step_metadata import check_step_metadata
        from vlmpipe.platforms.table import platform_of

        found["imports"] = ended()
        configs = [load_run_file(file) for file in RUN_FILES]
        found["load"] = ended()
        graphs = [pipelines.build(config, "vertex") for config in configs]
        contents = [pipelines.contents_of(graph) for graph in graphs]
        found[OF_KFP] = ended()
        texts = [pipelines.yaml_of(content, "") for content in contents]
        found["dump"] = ended()
        for text, content in zip(texts, contents, strict=True):
            pipelines.check_file(text, content, documents=1)
        found["check"] = ended()
        for config in configs:
            for run in config.stage_runs().values():
                check_jobs(run, "gs://bucket/root/runs/run")
            check_step_metadata(config, platform_of("vertex"))
        found["rules"] = ended()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
