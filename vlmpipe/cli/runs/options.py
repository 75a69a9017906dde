"""Arguments of the commands about runs.

RUN is looked for on this machine, then among runs submitted from this folder, then on Vertex AI or, by a link, on
Kubeflow.
"""

from __future__ import annotations

from typing import Annotated

import typer

from vlmpipe.cli.arguments import run_ids

RUN_HELP = (
    "Run id, its beginning, @last or @last:NAME; folder, pipeline job or custom job, its resource name or its link to "
    "the console or to Kubeflow's page; or a search."
)
Run = Annotated[str, typer.Argument(metavar="RUN", help=RUN_HELP, autocompletion=run_ids)]
Root = Annotated[str, typer.Option(help="The local runs' output.root_uri.")]
Project = Annotated[
    str,
    typer.Option(envvar="VERTEX_PROJECT_ID", help="Google Cloud project of a run on Vertex AI.", show_default=False),
]
Location = Annotated[
    str, typer.Option(envvar="VERTEX_LOCATION", help="Region of a run on Vertex AI.", show_default=False)
]
Plain = Annotated[bool, typer.Option("--plain", help="Print lines instead of a live table.")]
