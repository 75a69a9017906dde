"""Tuning jobs in the forms of the service's own documentation: gcloud's file, the SDK, and the API's client."""

from __future__ import annotations

from tests.support.guides.listings import NEW_IMAGE

SEARCHES = {
    "tuning.yaml": """
displayName: qwen-search
studySpec:
  metrics:
  - {metricId: val_loss, goal: minimize}
  - {metricId: latency, goal: MINIMIZE}
  parameters:
  - {parameterId: learning_rate, doubleValueSpec: {minValue: 1e-6, maxValue: 1e-4, defaultValue: 1e-5}, scaleType: log}
  - {parameterId: batch_size, discreteValueSpec: {values: [8, 4, 16, 16]}, scaleType: UNIT_LINEAR_SCALE}
  - {parameterId: lora_r, integerValueSpec: {minValue: "4", maxValue: "64"}}
  - {parameterId: lr_scheduler, categoricalValueSpec: {values: [cosine, linear, polynomial]}}
  - {parameterId: warmup_ratio, doubleValueSpec: {minValue: 0.0, maxValue: 3.0}}
  - parameterId: optimizer
    categoricalValueSpec: {values: [adam, sgd]}
    conditionalParameterSpecs:
    - parameterSpec: {parameterId: momentum, doubleValueSpec: {minValue: 0.1, maxValue: 0.9}}
      parentCategoricalValues: {values: [sgd]}
  algorithm: GRID_SEARCH
  measurementSelectionType: BEST_MEASUREMENT
  medianAutomatedStoppingSpec: {useElapsedDuration: true}
maxTrialCount: 20
parallelTrialCount: 40
maxFailedTrialCount: 5
trialJobSpec:
  workerPoolSpecs:
  - machineSpec: {machineType: a2-highgpu-8g, acceleratorType: NVIDIA_TESLA_A100, acceleratorCount: 8}
    replicaCount: 2
    containerSpec:
      imageUri: us-central1-docker.pkg.dev/my-project/vlm/trainer:1
      command: [bash, -c, torchrun --nproc_per_node=8 train.py]
      args: [--model_name_or_path, Qwen/Qwen2.5-VL-7B-Instruct, --epochs, "3", "--lr=${learning_rate}"]
""",
    "tuning.py": """
from google.cloud import aiplatform
from google.cloud.aiplatform import hyperparameter_tuning as hpt
pools = [{"machine_spec": {"machine_type": "n1-standard-8", "accelerator_type": "NVIDIA_TESLA_T4",
                           "accelerator_count": 1},
          "replica_count": 1,
          "container_spec": {"image_uri": IMAGE, "args": ["--epochs", "3"]}}]
job = aiplatform.CustomJob(display_name="trial", worker_pool_specs=pools)
search = aiplatform.HyperparameterTuningJob(
    display_name="hp-test", custom_job=job, metric_spec={"accuracy": "maximize"},
    parameter_spec={"lr": hpt.DoubleParameterSpec(min=1e-5, max=1e-3, scale="log"),
                    "units": hpt.IntegerParameterSpec(min=4, max=128, scale="linear"),
                    "batch_size": hpt.DiscreteParameterSpec([16, 32], "linear")},
    max_trial_count=12, parallel_trial_count=3, search_algorithm="random")
search.run()
""",
    "tuning_request.py": """
from google.cloud import aiplatform
hyperparameter_tuning_job = {
    "display_name": "request", "max_trial_count": 4, "parallel_trial_count": 2,
    "study_spec": {
        "metrics": [{"metric_id": "accuracy", "goal": aiplatform.gapic.StudySpec.MetricSpec.GoalType.MAXIMIZE}],
        "parameters": [{"parameter_id": "hidden_units", "integer_value_spec": {"min_value": 8, "max_value": 64}}]},
    "trial_job_spec": {"worker_pool_specs": [{
        "machine_spec": {"machine_type": "n1-standard-8",
                         "accelerator_type": aiplatform.gapic.AcceleratorType.NVIDIA_TESLA_T4, "accelerator_count": 1},
        "replica_count": 1,
        "python_package_spec": {"executor_image_uri": IMAGE, "package_uris": ["gs://my-bucket/trainer.tar.gz"],
                                "python_module": "trainer.task", "args": ["--epochs=3"]}}]}}
""",
}
for _name in ("tuning.py", "tuning_request.py"):
    SEARCHES[_name] = SEARCHES[_name].replace("IMAGE", f'"{NEW_IMAGE}"')
