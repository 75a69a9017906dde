"""NCCL's network between nodes, by machine."""

from __future__ import annotations

from datetime import date

import pytest

from tests.support.generated_files import NCCL_PAGE, nccl_page
from tests.support.planner.configs import run_config
from vlmpipe.catalog.machines import load_catalog
from vlmpipe.catalog.nccl import Misfit, Network, expected, load_misfits, load_networks
from vlmpipe.job_spec.rules import RULES

NODES = {"cluster__machine_type": "a2-ultragpu-8g", "cluster__replica_count": 2}
GPUS = {"cluster__accelerator_type": "NVIDIA_A100_80GB", "cluster__accelerator_count": 8}


def test_machines_that_may_have_gpus_have_a_network_and_no_others() -> None:
    machines = load_catalog().machines.values()
    assert [one.machine_type for one in machines if bool(one.network) != bool(one.accelerators)] == []
    assert {one.network for one in machines if one.network} == set(load_networks())


@pytest.mark.parametrize("entry", [*load_networks().values(), *load_misfits()])
def test_every_entry_has_a_reason_and_a_dated_source(entry: Network | Misfit) -> None:
    assert entry.why and entry.sources
    for source in entry.sources:
        assert source.title and source.url.startswith("https://")
        assert date.fromisoformat(source.date) <= date(2026, 11, 23)


@pytest.mark.parametrize("misfit", load_misfits(), ids=lambda misfit: f"{misfit.of} {misfit.names}")
def test_a_misfit_has_a_rule_and_suits_known_networks(misfit: Misfit) -> None:
    assert misfit.rule in RULES and (misfit.names or misfit.net)
    assert set(misfit.suits) < set(load_networks())


@pytest.mark.parametrize(
    ("machine_type", "accelerator_type", "sentence"),
    [
        ("a2-ultragpu-8g", "NVIDIA_A100_80GB", "none (plain TCP sockets); no variable is needed"),
        (
            "a3-highgpu-8g",
            "NVIDIA_H100_80GB",
            "GPUDirect-TCPX (TCP from GPU memory, over 4 cards of their own); no var",
        ),
        (
            "a3-megagpu-8g",
            "NVIDIA_H100_MEGA_80GB",
            "GPUDirect-TCPXO (TCP from GPU memory, over 8 cards of their own); ",
        ),
        ("a3-ultragpu-8g", "NVIDIA_H200_141GB", "gIB (GPUDirect RDMA over Ethernet (RoCE), a card for each GPU); no "),
    ],
)
def test_a_plan_of_several_nodes_says_which_plugin_to_expect(
    machine_type: str, accelerator_type: str, sentence: str
) -> None:
    machine = load_catalog().machines[machine_type]
    config = run_config(
        **NODES | GPUS | {"cluster__machine_type": machine_type, "cluster__accelerator_type": accelerator_type}
    )
    said = expected(config, machine)
    assert said.startswith(sentence)
    assert ("Not confirmed: that Vertex AI brings the plugin" in said) == (machine.network != "sockets")


def test_one_node_needs_no_plugin_and_reducers_need_their_own() -> None:
    machine = load_catalog().machines["a2-ultragpu-8g"]
    assert expected(run_config(**GPUS | NODES | {"cluster__replica_count": 1}), machine) == ""
    reduced = run_config(**NODES, **GPUS, cluster__reduction_server={"replica_count": 7})
    assert expected(reduced, machine).startswith("the Reduction Server's, in an image that was built with")


def test_the_reference_page_is_what_the_catalogue_says() -> None:
    assert NCCL_PAGE.read_text(encoding="utf-8") == nccl_page()
