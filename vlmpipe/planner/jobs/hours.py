"""Time of the feature encoding and evaluation jobs, in bf16 where training computes so and in fp32 otherwise."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from vlmpipe.catalog.machines import Gpu, load_catalog
from vlmpipe.config.rules.baseline import asks_start
from vlmpipe.config.run_config import RunConfig
from vlmpipe.job_spec.build import Job
from vlmpipe.planner.jobs.memory import as_replayed
from vlmpipe.planner.jobs.question_time import prompt_seconds, weights_seconds
from vlmpipe.planner.jobs.shared_prompts import MeanPrompt, mean_prompt
from vlmpipe.planner.scenario import Scenario
from vlmpipe.planner.steps.needs import all_samples
from vlmpipe.planner.time.feature_cache import CacheAdvice
from vlmpipe.planner.workload import Workload
from vlmpipe.trainer.data.replay.part_size import busiest_rank
from vlmpipe.trainer.evaluation.questions_at_once import questions_at_once

AUDIT_PASSES = 3  # an early checkpoint, a late one, and the late one without images
CAPTIONS = "coco-captions"  # the format of benchmarks that the retention probe leaves out


def hours_beside_training(
    case: Scenario, cache: CacheAdvice, *, is_later_stage: bool = False
) -> dict[str, float | None]:
    """Hours of the other GPU jobs. 0: there is no such job. None: not known.

    The features job is taken to encode all images: how many have features already is not known here.
    """
    encode_hours = cache.encode_gpu_hours
    if encode_hours is not None:
        encode_hours /= case.config.cluster.of_job("cache_features").world_size
    return {
        "cache_features": encode_hours if case.cached else 0.0,
        "replay": replay_hours(case),
        "evaluate": evaluate_hours(case, asks=asks_start(case.config, is_later_stage=is_later_stage)),
        "benchmark": None if case.config.evaluate.lmms_eval else 0.0,  # its questions are known to lmms-eval only
        "audit": audit_hours(case),
    }


def evaluation_gpu(config: RunConfig, gpu: Gpu | None) -> Gpu | None:
    """The GPU of the evaluation job, which is training's, `gpu`, where cluster.evaluate_machine names no other."""
    machine = config.cluster.evaluate_machine
    return load_catalog().gpus.get(machine.accelerator_type) if machine else gpu


def start_note(case: Scenario, *, is_later_stage: bool) -> str:
    """Return a sentence on the time of asking the start weights; empty where they are not asked, or it is unknown."""
    if not asks_start(case.config, is_later_stage=is_later_stage):
        return ""
    whole, alone = (evaluate_hours(case, asks=asks) for asks in (True, False))
    if whole is None or alone is None or whole <= 0:
        return ""
    return (
        f"The start weights are asked, too: {(whole - alone) / whole:.0%} of the time of job evaluate, once for all "
        "runs with the same start, data and settings; evaluate.baseline off asks none."
    )


def evaluate_hours(case: Scenario, *, asks: bool) -> float | None:
    """One question a sample, for its own image, for each control, by each quantized export and by the champion, and the
    validation loss.
    Where prepared data has several questions about an image, what prompts begin with counts once for those of a batch.
    asks: the start weights, too, and the prompts of the retention probe. How many questions benchmarks have is not
    known.

    The prompt is a forward pass over the sample. Then each token of an answer reads all weights of the language model
    once for a batch of questions, which memory bandwidth bounds.
    """
    config = case.config
    samples = validation_samples(config, case.load)
    if samples is None:
        return None
    evaluate = config.evaluate
    asked = min(samples, evaluate.max_samples or samples)
    asks_champion = config.gate.bounds == "required" and config.gate.max_regression is not None
    quantized = len(evaluate.quantize.formats) if evaluate.quantize else 0  # taken to be as fast as the export
    rounds = 1 + len(evaluate.controls) + quantized + asks_champion + asks  # a first run's champion is assumed as large
    probe = evaluate.retention
    asks_prompts = asks and probe.probe == "auto" and all(file.format == CAPTIONS for file in evaluate.benchmarks)
    prompts = len(probe.prompts) * min(asked, probe.max_images) if asks_prompts else 0
    alone = [asked] * ("shuffled_image" in evaluate.controls)  # questions about an image are shown different ones
    together = [asked] * (rounds - len(alone))
    return _asking_hours(
        case, [*alone, prompts, prompts], forward_only=samples, together=together, asked_share=asked / max(samples, 1)
    )


def replay_hours(case: Scenario) -> float | None:
    """Each chosen image is asked about once; all answers are taken as long as they may be. 0: they are there.

    Ranks take whole files of questions, so that the job lasts as long as the rank with the most of them.
    """
    if case.config.data.replay is None or case.load.replayed is not None:
        return 0.0
    questions = replay_questions(case.config, case.load)
    if questions is None:
        return None
    ranks = case.config.cluster.of_job("evaluate").world_size
    as_many = ranks * busiest_rank(questions, ranks)
    return _asking_hours(dataclasses.replace(case, config=as_replayed(case.config)), [as_many])


def audit_hours(case: Scenario) -> float | None:
    """Forward passes over the audited samples of both splits, under two checkpoints and once without images.

    0: the run has no audit. Comparing images, by rank 0 on the CPU, is not in it."""
    config, samples = case.config, all_samples(case.load.samples, case.config.data.validation_fraction)
    if config.evaluate.audit is None:
        return 0.0
    if samples is None:
        return None
    audited = min(samples, config.evaluate.audit.max_samples or samples)
    return _asking_hours(case, [], forward_only=AUDIT_PASSES * audited, job="audit")


def replay_questions(config: RunConfig, load: Workload) -> int | None:
    """Questions for the start model: their share of the other sources' training images, each sample with images of its
    own; an upper bound where samples share them. The answers are samples of the workload, too."""
    if config.data.replay is None or load.samples is None:
        return None
    asked = config.data.replay.replay_images * load.sample_images  # of a sample
    return math.ceil(load.samples * asked / (1 + asked))


def _asking_hours(
    case: Scenario,
    rounds: Sequence[int],
    *,
    forward_only: int = 0,
    job: Job = "evaluate",
    together: Sequence[int] = (),
    asked_share: float = 1.0,
) -> float | None:
    """Hours of a job on the evaluation's machines with these rounds of questions, and further forward passes.

    together: rounds whose questions about an image are answered together. asked_share: of the validation questions.
    """
    config, load, gpu = case.config, case.load, evaluation_gpu(case.config, case.gpu)
    if gpu is None:
        return None
    evaluate = config.evaluate
    at_once = questions_at_once(
        evaluate.batch_questions,
        evaluate.batch_tokens,
        load.sample_tokens + evaluate.max_new_tokens,
        load.sample_images,
    )
    whole = MeanPrompt(load.sample_tokens, load.sample_images, load.sample_tokens**2)
    shared = mean_prompt(load, case.shape.image_tokens, asked_share, at_once)
    whole_s, shared_s = (prompt_seconds(case, gpu, prompt, cached=case.cached) for prompt in (whole, shared))
    forward_s = (sum(rounds) + forward_only) * whole_s + sum(together) * shared_s
    ranks = config.cluster.of_job(job).world_size
    batches = sum(math.ceil(questions / ranks / at_once) for questions in (*rounds, *together))
    token_s = weights_seconds(case.shape, config.train.precision, gpu)
    return (forward_s / ranks + batches * evaluate.max_new_tokens * token_s) / 3600


def validation_samples(config: RunConfig, load: Workload) -> int | None:
    """Samples of the validation split, estimated from the training split."""
    share = config.data.validation_fraction
    if load.samples is not None and share < 1:
        return round(load.samples * share / (1 - share))
    return config.evaluate.max_samples or None
