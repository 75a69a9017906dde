"""A pipeline of your own around a training: your steps before and after it, our job in the middle.

    VLMPIPE_PIPELINE_IMAGE=... python examples/own_pipeline/pipeline.py

writes own-pipeline.yaml for Vertex AI Pipelines or Kubeflow Pipelines; docs/how-to/python-api.md#train-in-it
explains it.
"""

from kfp import compiler, dsl

from vlmpipe.kfp_components import open_run, prepare_data, run_job, sync_checkpoint


@dsl.component(base_image="python:3.12-slim")
def choose_rate(samples: int) -> str:
    """A step of your own: settings that depend on what came before."""
    import json

    return json.dumps({"train.optimizer.learning_rate": 2e-3 if samples < 10_000 else 1e-3})


@dsl.component(base_image="python:3.12-slim")
def publish(run_uri: str, model: str) -> str:
    """Another one: what becomes of the model."""
    return f"{model} is in {run_uri}/export"


@dsl.pipeline(name="own-pipeline")
def own_pipeline(run_file: str, root_uri: str, run_id: str, samples: int, target: str = "vertex") -> str:
    rate = choose_rate(samples=samples)
    run = open_run(run_file=run_file, root_uri=root_uri, run_id=run_id, overrides=rate.output, target=target)
    prepared = prepare_data(run_uri=run.output)
    encoded = run_job(run_uri=run.output, job="cache_features", target=target).after(prepared)
    trained = run_job(run_uri=encoded.outputs["run_uri"], job="train", target=target)
    exported = sync_checkpoint(run_uri=run.output, gcp_resources=trained.outputs["gcp_resources"])
    return publish(run_uri=exported.outputs["Output"], model=run_id).output


if __name__ == "__main__":
    compiler.Compiler().compile(own_pipeline, "own-pipeline.yaml")
