"""The planner's figures beside what is measured: memory of every strategy, FLOPs, step time. `make bench-planner`

All on the CPU, all in this run. It checks what is counted and the proportions of step times, not a GPU.
"""

from __future__ import annotations

from benchmarks import step_times
from benchmarks.common import interleaved, options
from benchmarks.predictions import Predictions
from benchmarks.processes import under_torchrun
from tests.support.planner import planned_memory
from tests.support.trainer import flop_cases, memory_cases, pipeline_memory
from trainer.distributed.process import ProcessContext, start_worker

PROCESSES = 2
MIB = 2**20
QUICK_CASES = 2
PARTS = ("memory", "flops", "steps")
NOTES = {
    "memory": f"Memory: bytes on the first of {PROCESSES} processes (4 with tp and tp+pp+dp, 3 with pp), weighed "
    "storage by storage in a real step. What a GPU adds "
    "(CUDA context, NCCL buffers, holes between allocations) is not in it, and not measured by anything here.",
    "flops": "FLOPs: of one forward and backward pass, beside torch's FlopCounterMode.",
    "steps": "Step time: the rates of this processor are taken from one configuration, and the others are predicted "
    "from it by the planner's own functions. That checks whether time grows with width, depth, rows and passes as the "
    "planner says. It says nothing about the rate of a GPU, or about communication.",
}


def main() -> None:
    chosen = options(__doc__, PARTS)
    rounds = chosen.rounds or (2 if chosen.quick else 5)
    report = Predictions("The planner, predicted and measured", {"rounds of a step": rounds, "processes": PROCESSES})
    if "memory" in chosen.only:
        memory(report, quick=chosen.quick)
    if "flops" in chosen.only:
        flops(report, quick=chosen.quick)
    if "steps" in chosen.only:
        steps(report, start_worker(), rounds, quick=chosen.quick)
    report.notes += [NOTES[part] for part in PARTS if part in chosen.only]
    report.publish(chosen)


def memory(report: Predictions, *, quick: bool) -> None:
    """Each case in real processes: two, or four where layers are split; of pipelines every stage."""
    few = QUICK_CASES if quick else None
    found: dict[str, tuple[dict[str, int], dict[str, int]]] = {}  # predicted, measured
    for cases, processes in ((memory_cases.CASES, PROCESSES), (memory_cases.SPLIT_CASES, 2 * PROCESSES)):
        names = list(cases)[:few]
        weighed = under_torchrun("tests.support.trainer.measure_memory", ["--cases", *names], processes=processes)
        found |= {name: (planned_memory.predicted(cases[name], processes), weighed[name]) for name in names}
    staged = (
        (pipeline_memory.CASES, pipeline_memory.STAGES),
        (pipeline_memory.SPLIT_CASES, 2 * PROCESSES),
        (pipeline_memory.COPIED_CASES, 4 * PROCESSES),
    )
    for cases, processes in staged:
        names = list(cases)[:few]
        weighed = under_torchrun("tests.support.trainer.pipeline_memory", ["--cases", *names], processes=processes)
        for name in names:
            stages = zip(pipeline_memory.predicted(cases[name]), weighed[name], strict=True)
            found |= {f"{name}, stage {number}": both for number, both in enumerate(stages, start=1)}
    for part in ("weights", "optimizer", "on_disk", "peak"):
        what = f"memory, {part.replace('_', ' ')}"
        for name, (predicted, measured) in found.items():
            if measured[part]:
                report.add(what, name, "MiB", predicted[part] / MIB, measured[part] / MIB)


def flops(report: Predictions, *, quick: bool) -> None:
    """Models of every kind, with and without features and checkpointing."""
    cases = [*((name, False) for name in flop_cases.CASES), *flop_cases.CACHEABLE]
    for name, cached in cases[: QUICK_CASES if quick else None]:
        config = flop_cases.model_config(**flop_cases.CASES[name])
        for checkpointing in ("none", "full"):
            found, truth = (
                take(config, cached=cached, checkpointing=checkpointing)
                for take in (flop_cases.by_formula, flop_cases.counted)
            )
            label = name + (", cached" if cached else "") + (", checkpointing" if checkpointing == "full" else "")
            report.add("FLOPs", label, "MFLOP", found / 1e6, truth / 1e6)


def steps(report: Predictions, worker: ProcessContext, rounds: int, *, quick: bool) -> None:
    """One configuration gives the rates; the others are predicted from them. CPU time, sides in turn."""
    names = list(step_times.CASES)[: QUICK_CASES + 1 if quick else None]
    sides = {name: step_times.RealSteps(step_times.CASES[name], worker) for name in names}
    found = interleaved(sides, rounds)
    calibration = found[step_times.CALIBRATION]
    known = step_times.medians(calibration)
    device = step_times.device_like(known)
    for name in names:
        if name != step_times.CALIBRATION:
            planned = step_times.planned(step_times.CASES[name], device)
            measured_s = known.total * step_times.times_calibration(found[name], calibration)
            report.add("step time", name, "CPU ms", 1000 * planned.total, 1000 * measured_s)
    report.notes.append(
        f"Step times are calibrated by a step of {1000 * known.compute:.0f} CPU ms of computing and "
        f"{1000 * known.update:.0f} of updating; what was measured is the median of each round's ratio to it."
    )


if __name__ == "__main__":
    main()
