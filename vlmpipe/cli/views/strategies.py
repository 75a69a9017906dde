"""Table of strategies for `vlmpipe plan --strategies`, on a terminal and in Markdown."""

from __future__ import annotations

import functools
import shlex
from collections.abc import Iterator, Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from vlmpipe.cli.views.tables import show, standard_output
from vlmpipe.config.overrides import override_texts
from vlmpipe.config.run_config import RunConfig
from vlmpipe.planner.search.choice import ERROR
from vlmpipe.planner.search.strategies import COMPARED, Cell, Comparison
from vlmpipe.planner.spending.approval import dollars

NOT_POSSIBLE = "–"
READING = (
    "Hours of training, each strategy with the settings that are fastest among those that fit; dollars are those of "
    "the fastest. GiB: does not fit, and a GPU needs at least that. host: the machine's own memory is too small. "
    f"–: not possible, such as fewer sequences than ranks. Hours that differ by less than {ERROR:.0%} may be equal."
)


def print_strategies(comparison: Comparison, config: RunConfig, path: str, overrides: Sequence[str] = ()) -> None:
    """A row for each number of nodes, and the command that plans the fastest on as many as the run file has."""
    title = (
        f"{config.name} on {comparison.gpus_per_node} x {comparison.gpu} ({comparison.gpu_memory_gib:.0f} GiB) a node, "
        f"{comparison.nic_gbps:g} Gbit/s between nodes, {comparison.global_batch_size} sequences a step"
    )
    table = Table(title=title, title_justify="left", header_style="bold", box=SIMPLE_HEAD)
    table.padding, table.pad_edge = (0, 1, 0, 0), False
    for name in ("nodes", *COMPARED, "fastest"):
        table.add_column(name, justify="right", overflow="fold")
    rows = sorted({cell.nodes for cell in comparison.cells})
    for nodes in rows:
        table.add_row(str(nodes), *(_styled(comparison, nodes, name) for name in COMPARED), _cost(comparison, nodes))
    screen = standard_output()
    show(screen, table)
    nodes = config.cluster.replica_count if config.cluster.replica_count in rows else rows[-1]
    if (best := comparison.fastest(nodes)) and best.way:
        change = {name: value for name, value in best.way.change.items() if _field(config, name) != value}
        unchanged = [text for text in overrides if text.partition("=")[0] not in change]
        words = shlex.join(["vlmpipe", "plan", path, *unchanged, *override_texts(change)])
        screen.print(Text(f"The fastest on {nodes}: "), Text(words), soft_wrap=True)
    show(screen, Text(READING, style="dim"))


def markdown_rows(comparison: Comparison, size: str) -> Iterator[str]:
    """Rows of a table in Markdown, the fastest in bold."""
    for nodes in sorted({cell.nodes for cell in comparison.cells}):
        best = comparison.fastest(nodes)
        cells = (
            f"**{_text(cell)}**" if cell and cell is best else _text(cell)
            for cell in (comparison.row(nodes).get(name) for name in COMPARED)
        )
        where = f"{nodes} x {comparison.machine} | {comparison.nic_gbps:g}"
        yield f"| {size} | {where} | {' | '.join(cells)} | {_cost(comparison, nodes)} |"


def _field(config: RunConfig, name: str) -> object:
    return functools.reduce(getattr, name.split("."), config)


def _styled(comparison: Comparison, nodes: int, name: str) -> Text:
    cell = comparison.row(nodes).get(name)
    bold = cell is not None and cell is comparison.fastest(nodes)
    return Text(
        _text(cell), style="bold" if bold else "red" if cell and (cell.min_gib or cell.lacks_host_memory) else ""
    )


def _text(cell: Cell | None) -> str:
    if cell and cell.way:
        return f"{cell.way.hours:.1f}" if cell.way.hours < 100 else f"{cell.way.hours:.0f}"
    if cell and cell.lacks_host_memory:
        return "host"
    return f"{cell.min_gib:.0f} GiB" if cell and cell.min_gib else NOT_POSSIBLE


def _cost(comparison: Comparison, nodes: int) -> str:
    best = comparison.fastest(nodes)
    return dollars(best.way.usd) if best and best.way else "–"
