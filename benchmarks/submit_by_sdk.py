"""Google's own submit of a compiled pipeline to a server on this machine, for `benchmarks.bench_commands`.

VLMPIPE_VERTEX_ENDPOINT=... python -m benchmarks.submit_by_sdk PIPELINE.yaml PROJECT
"""

from __future__ import annotations

import os
import sys

from google.auth.credentials import AnonymousCredentials
from google.cloud import aiplatform
from google.cloud.aiplatform.utils import gcs_utils

from vlmpipe.backends.vertex.client import ENDPOINT_VARIABLE


def main(pipeline: str, project: str) -> None:
    # It would look for the bucket at Google's, and make it; that takes minutes where Google is out of reach.
    gcs_utils.create_gcs_bucket_for_pipeline_artifacts_if_it_does_not_exist = lambda **options: None
    aiplatform.init(
        project=project,
        location="us-central1",
        api_endpoint=os.environ[ENDPOINT_VARIABLE],
        api_transport="rest",
        credentials=AnonymousCredentials(),
    )
    job = aiplatform.PipelineJob("by-sdk", pipeline, pipeline_root="gs://example-bucket/vlmpipe", failure_policy="fast")
    job.submit()


if __name__ == "__main__":
    main(*sys.argv[1:])
