"""Variables that a local run's processes inherit from the environment of vlmpipe."""

from __future__ import annotations

import os

from vlmpipe.trainer.preflight.bought import VARIABLE as BOUGHT_VARIABLE

# Set by other jobs on this machine, by a platform whose container this is, or by the parent process: a container would
# not see them. kfp, for one, writes a step's outputs nowhere where CLUSTER_SPEC names another pool than workerpool0.
_FOREIGN_PREFIXES = ("TORCHELASTIC_", "AIP_", "CLOUD_ML_", "_KFP_", "VLMPIPE_LOCAL_RETRIES", "VLMPIPE_FAULTS")
_FOREIGN = {
    "CLUSTER_SPEC", "TF_CONFIG", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK",
    "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", BOUGHT_VARIABLE,
}  # fmt: skip

# Files are named in UTF-8 and pipes carry it, whatever the locale is (PEP 540); a name of other bytes, which Python
# holds as surrogates, is printed with replacements.
UTF8 = {"PYTHONUTF8": "1", "PYTHONIOENCODING": "utf-8:replace"}


def inherited_environment() -> dict[str, str]:
    """This process's variables without those of other jobs, with UTF-8 for Python and lines that appear at once."""
    variables = {
        name: value
        for name, value in os.environ.items()
        if name not in _FOREIGN and not name.startswith(_FOREIGN_PREFIXES)
    }
    return variables | UTF8 | {"PYTHONUNBUFFERED": "1"}
