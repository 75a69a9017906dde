"""Run the pipeline that is compiled for Kubeflow with its steps as processes here, through kfp.local.

    python -m tests.support.pipelines.kubeflow_graph RUN_FILE RUN_ID [FIELD=VALUE ...]

Job steps create TrainJobs in the cluster of KUBECONFIG, and variables and volumes of pods are for the caller to give.
"""

from __future__ import annotations

import sys
import tempfile

from kfp import local

from tests.support.pipelines.example_project import load_shipped
from vlmpipe.pipelines.training import build
from vlmpipe.platforms.kubeflow.graph import KubeflowGraph
from vlmpipe.platforms.kubeflow.platform import Kubeflow
from vlmpipe.platforms.table import PLATFORMS, Line


class HereGraph(KubeflowGraph):
    """kfp.local knows no name of a workflow, by which a run without a name of its own is called."""

    def run_name(self) -> str:
        return "unnamed"


class HereKubeflow(Kubeflow):
    """The platform with that graph."""

    def graph(self) -> KubeflowGraph:
        return HereGraph()


def main(run_file: str, run_id: str, *overrides: str) -> None:
    PLATFORMS["kubeflow"] = Line(f"{__name__}:HereKubeflow")
    with tempfile.TemporaryDirectory() as artifacts:
        local.init(local.SubprocessRunner(use_venv=False), pipeline_root=artifacts)
        build(load_shipped(run_file, overrides), "kubeflow")(run_id=run_id)


if __name__ == "__main__":
    main(*sys.argv[1:])
