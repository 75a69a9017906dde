"""`vlmpipe runs`: the list and its filters, tags, the page, and removals that ask first."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.command_line import Vlmpipe
from tests.support.runs_root import STOPPED, register, write_run
from vlmpipe.cli.runs import folder
from vlmpipe.inventory import removal
from vlmpipe.inventory.listing import newest_runs
from vlmpipe.planner.spending import approval
from vlmpipe.runs.submitted import RunRecord

LONG = "digits-20260101-000000"


@pytest.fixture
def root(tmp_path: Path) -> str:
    write_run(tmp_path, LONG, prepared="a", exact_match=0.94)
    write_run(tmp_path, "llava-20260102-000000", name="llava", started_s=2, exit_code=STOPPED)
    write_run(tmp_path, "digits-20260103-000000", started_s=3, prepared="b", exact_match=0.25)
    return str(tmp_path)


def test_runs_are_listed_in_80_columns(vlmpipe: Vlmpipe, root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    register(Path(root), LONG)
    monkeypatch.setattr("vlmpipe.runs.terminal.COLUMNS", 80)
    lines = vlmpipe("runs", "list", "--root", root).out.splitlines()
    assert [line.split()[0] for line in lines[1:4]] == [LONG, "llava-20260102-000000", "digits-20260103-000000"]
    assert lines[1].split()[4:8] == ["done", "94.0", "%", "champion"]
    assert lines[3].split()[4:8] == ["done", "25.0", "%", "rejected"]
    sizes = " ".join(lines[4:])
    sizes = " ".join(sizes.split())
    assert sizes.startswith(f"3 runs in {root}: runs ") and "prepared 2 kB" in sizes and "registry" in sizes


def test_filters_choose_and_bare_runs_lists_all(vlmpipe: Vlmpipe, root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert vlmpipe("runs", "tag", "@last:digits", "baseline", "v2", "--root", root).out == (
        "digits-20260103-000000: baseline, v2\n"
    )
    vlmpipe("runs", "tag", "@last", "v2", "--remove", "--root", root)

    def listed(*filters: str) -> list[str]:
        found = vlmpipe("runs", "list", *filters, "--root", root, "--json").json["runs"]
        return [run["run_id"].partition("-")[0] + str(run["tags"]) for run in found]

    assert listed("--name", "digits") == ["digits[]", "digits['baseline']"]
    assert listed("--outcome", "stopped") == ["llava[]"]
    assert listed("--tag", "baseline") == ["digits['baseline']"]
    assert "None of 3 runs" in vlmpipe("runs", "list", "--tag", "v2", "--root", root).out
    assert vlmpipe("runs", "tag", "@last", "two words", "--root", root).code == 64
    monkeypatch.chdir(root)
    Path("runs").rename("moved")
    Path("runs").mkdir()
    Path("moved").rename("runs/runs")
    assert vlmpipe("runs").code == 0


def test_options_of_the_list_follow_bare_runs_too(vlmpipe: Vlmpipe, root: str) -> None:
    assert vlmpipe("runs", "--root", root, "--name", "llava") == vlmpipe(
        "runs", "list", "--root", root, "--name", "llava"
    )
    assert "prune" in vlmpipe("runs", "--help").out
    assert vlmpipe("runs", "--nonsense").code == 2


def test_a_list_says_how_many_older_runs_it_leaves_out(vlmpipe: Vlmpipe, root: str) -> None:
    listed = vlmpipe("runs", "list", "--last", "1", "--root", root)
    assert listed.out.splitlines()[1].split()[0] == "digits-20260103-000000"
    said = " ".join(listed.out.split())
    assert "1 of 3 runs in" in said and "2 older ones are not listed: --last 0 lists all" in said
    found = vlmpipe("runs", "list", "--last", "1", "--root", root, "--json").json
    assert (len(found["runs"]), found["not_listed"], found["shared"], found["other_bytes"]) == (1, 2, None, None)
    digits = vlmpipe("runs", "list", "--last", "1", "--name", "digits", "--root", root, "--json").json
    assert ([run["run_id"] for run in digits["runs"]], digits["not_listed"]) == (["digits-20260103-000000"], 1)
    whole = vlmpipe("runs", "list", "--last", "0", "--root", root, "--json").json
    assert (len(whole["runs"]), whole["not_listed"], len(whole["shared"])) == (3, 0, 4)
    page = Path(root, "page.html")
    paged = vlmpipe("runs", "page", "--last", "1", "--output", str(page), "--root", root)
    assert paged.out == f"{page}, 1 of 3 runs\n"
    assert "The newest 1. Older ones are not on this page" in page.read_text()


def test_submitted_runs_are_listed_by_the_same_number(
    vlmpipe: Vlmpipe, root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for number in range(3):
        RunRecord("projects/p/locations/l/pipelineJobs/j", "gs://b/runs/j", float(number)).write(f"job-{number}")
    listed = " ".join(vlmpipe("runs", "list", "--last", "1", "--root", root).out.split())
    assert "job-2" in listed and "job-1" not in listed and listed.count("2 older ones are not listed") == 2


def test_sizes_beyond_a_number_of_runs_are_not_counted_and_that_is_said(
    tmp_path: Path, vlmpipe: Vlmpipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(6):
        write_run(tmp_path, f"r{number}", started_s=number + 1.0)
    monkeypatch.setattr(removal, "MAX_SIZED", 2)
    dry = vlmpipe("runs", "prune", "--keep", "1", "--dry-run", "--root", str(tmp_path))
    assert ", and 3 whose size is not counted" in dry.out and "remove  r4  –" in dry.out
    done = vlmpipe("runs", "prune", "--keep", "1", "--yes", "--root", str(tmp_path), "--json").json
    assert (done["not_sized"], len(done["runs"])) == (3, 5) and len(newest_runs(str(tmp_path)).runs) == 1


def test_a_removal_asks_says_and_removes(vlmpipe: Vlmpipe, root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    place = Path(root, "runs", LONG)
    dry = vlmpipe("runs", "prune", "--keep", "1", "--dry-run", "--root", root)
    assert f"remove  {LONG}" in dry.out and "remove  prepared/a" in dry.out and "would free" in dry.out
    assert "keep    digits-20260103-000000: it is the newest of digits" in dry.out
    unasked = vlmpipe("runs", "rm", "digits-20260101", "--root", root)
    assert unasked.code == 64 and "no terminal to ask in" in unasked.err
    monkeypatch.setattr(approval, "terminal_confirm", lambda: lambda _question: False)
    assert vlmpipe("runs", "rm", "digits-20260101", "--root", root).code == 130
    assert place.is_dir()
    monkeypatch.setattr(approval, "terminal_confirm", lambda: lambda _question: True)
    assert "freed" in vlmpipe("runs", "rm", "digits-20260101", "--root", root).out
    assert not place.exists() and Path(root, "prepared/a").is_dir()
    refused = vlmpipe("runs", "rm", "@last:llava", "--yes", "--root", root, "--json")
    assert refused.code == 64 and "the same command continues it" in refused.json["error"]["found"]
    assert vlmpipe("runs", "rm", "@last:llava", "--yes", "--unfinished", "--root", root, "--json").json["removed"]
    pruned = vlmpipe("runs", "prune", "--yes", "--root", root, "--json").json
    assert [Path(one["uri"]).parts[-2:] for one in pruned["shared"]] == [("prepared", "a"), ("features", "a")]
    assert vlmpipe("runs", "rm", "other", "--root", root).code == 66


def test_a_page_is_written_where_runs_are(vlmpipe: Vlmpipe, root: str, tmp_path: Path) -> None:
    assert vlmpipe("runs", "page", "--root", root).out == f"{root}/runs.html, 3 runs\n"
    assert LONG in Path(root, "runs.html").read_text()
    assert vlmpipe("runs", "page", "--root", str(tmp_path / "absent")).code == 66
    assert vlmpipe("runs", "list", "--root", "gs://bucket").code == 64
    assert folder.app.info.help


@pytest.mark.parametrize("name", ["CHAMPION", "versions/000001.json"])
def test_a_damaged_record_of_the_registry_is_named_and_no_run_is_removed(
    name: str, vlmpipe: Vlmpipe, root: str
) -> None:
    register(Path(root), LONG)
    path = Path(root, "registry/digits", name)
    path.write_bytes(path.read_bytes()[:-9])
    listed = vlmpipe("runs", "list", "--root", root)
    words = " ".join(listed.out.split())
    assert listed.code == 0 and words.count(f"{path} is damaged") == 1 and words.count("digits-2026") == 2
    assert str(path) in vlmpipe("runs", "list", "--root", root, "--json").json["problems"][0]
    assert "nothing to remove" in vlmpipe("runs", "prune", "--keep", "1", "--unfinished", "--yes", "--root", root).out
    refused = vlmpipe("runs", "rm", "digits-20260103-000000", "--yes", "--root", root)
    assert refused.code == 64 and f"whether the registry has a version of it is not known: {path}" in refused.err
