from __future__ import annotations

from pathlib import Path

import pytest

from vlmpipe.importing.listings.python_listing import read_listing
from vlmpipe.trainer.errors import ConfigError

POOL = '{"machine_spec": {"machine_type": MACHINE}, "replica_count": 1, "container_spec": {"image_uri": IMAGE}}'


def test_names_functions_and_texts_of_the_listing_are_followed() -> None:
    listing = read_listing(
        f"""
MACHINE = "g2-standard-8"
PROJECT = "p"
IMAGE = f"us-docker.pkg.dev/{{PROJECT}}/r/" + "image:1"
def pools():
    return [{POOL}]
specs = []
job = aiplatform.CustomJob(display_name="a", worker_pool_specs=pools(), labels={{**{{"a": "b"}}}})
job.run(timeout=60, scheduling_strategy=gapic.Scheduling.Strategy.SPOT, sync=False)
""",
        "a.py",
    )
    spec = listing.content["job_spec"]
    (pool,) = spec["worker_pool_specs"]
    assert (pool["machine_spec"], pool["container_spec"]) == (
        {"machine_type": "g2-standard-8"}, {"image_uri": "us-docker.pkg.dev/p/r/image:1"}
    )  # fmt: skip
    assert spec["scheduling"] == {"timeout": 60, "strategy": "SPOT"}
    assert listing.content["labels"] == {"a": "b"}
    assert listing.not_literal == {}


def test_the_sdks_single_arguments_are_pools() -> None:
    text = """
job = aiplatform.CustomContainerTrainingJob(display_name="a", container_uri="us-docker.pkg.dev/p/r/i:1")
job.run(replica_count=4, machine_type="a2-highgpu-8g", reduction_server_replica_count=2,
        reduction_server_machine_type="n1-highcpu-16")
"""
    pools = read_listing(text, "a.py").content["job_spec"]["worker_pool_specs"]
    assert [pool["replica_count"] for pool in pools] == [1, 3, 2]
    assert pools[2]["container_spec"]["image_uri"].endswith("reductionserver:latest")


def test_what_is_no_plain_value_is_named_and_a_word_keeps_its_place() -> None:
    text = """
worker_pools = [{"replica_count": int(x), "container_spec": {"args": ["--lr", str(lr), "--n=1"], "image_uri": y}}]
"""
    listing = read_listing(text, "a.py")
    assert listing.content == [{"container_spec": {"args": ["--lr", "<str(lr)>", "--n=1"]}}]
    assert listing.not_literal == {
        "worker_pool_specs[0].replica_count": "int(x)",
        "worker_pool_specs[0].container_spec.args[1]": "str(lr)",
        "worker_pool_specs[0].container_spec.image_uri": "y",
    }


def test_nothing_of_a_listing_is_run(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    text = f"""
import pathlib
pathlib.Path({str(trace)!r}).write_text("run")
worker_pool_specs = [{{"replica_count": pathlib.Path({str(trace)!r}).write_text("run")}}]
"""
    assert "write_text" in next(iter(read_listing(text, "a.py").not_literal.values()))
    assert not trace.exists()


def bomb() -> str:
    doubling = "".join(f"x{n} = [x{n - 1}, x{n - 1}]\n" for n in range(1, 60))
    return f"x0 = 'a'\n{doubling}worker_pool_specs = [{{'env': x59}}]\n"


def test_names_that_stand_for_themselves_or_for_too_much_are_not_followed() -> None:
    for text in (bomb(), "a = b\nb = a\nworker_pool_specs = [{'env': a}]\n"):
        listing = read_listing(text, "a.py")
        assert listing.not_literal
        assert len(str(listing.content)) < 1_000_000


@pytest.mark.parametrize(
    "text",
    ["def f(:\n  import x", "import torch\n", "worker_pool_specs = " + "[" * 5000 + "]" * 5000 + "\n", "x = '\\0'"],
)
def test_other_python_is_an_error(text: str) -> None:
    with pytest.raises(ConfigError):
        read_listing(text, "a.py")
