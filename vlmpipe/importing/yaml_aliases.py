"""YAML with anchors and aliases, which files of other programs have and run files do not take, in a bounded size."""

from __future__ import annotations

from collections.abc import Hashable

import yaml

from vlmpipe.config.validation_errors import Problem, RunFileError
from vlmpipe.config.yaml_loader import RunFileLoader, parse_yaml
from vlmpipe.trainer.errors import ConfigError

MAX_NODES = 20_000  # with each alias in full: a kilobyte of them can stand for a gigabyte
MERGE = "tag:yaml.org,2002:merge"


class _Loader(RunFileLoader):
    """The loader of run files, with aliases and merged mappings."""

    takes_aliases = True
    yaml_implicit_resolvers = {  # noqa: RUF012 (PyYAML's form)
        **RunFileLoader.yaml_implicit_resolvers,
        "<": [(MERGE, yaml.resolver.Resolver.yaml_implicit_resolvers["<"][0][1])],
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, object]:
        keys = [key.value for key, _ in node.value if key.tag != MERGE]
        if len(set(map(str, keys))) == len(keys):  # else the run file's loader names the one that is given twice
            self.flatten_mapping(node)
            node.value = list({str(key.value): (key, value) for key, value in node.value}.values())
        return super().construct_mapping(node, deep)


def parse_with_aliases(text: str, source: str) -> object:
    """The value of a YAML text. Raises RunFileError as `parse_yaml`, and ConfigError for more than MAX_NODES."""
    try:
        return parse_yaml(text, source)
    except RunFileError:
        if "*" not in text:
            raise
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        sizes: dict[int, int] = {}
        if node is not None and _size(node, sizes, set()) > MAX_NODES:
            raise ConfigError(
                f"aliases of {source} stand for more than {MAX_NODES:,} values",
                expected="one configuration or job spec",
            )
        return None if node is None else loader.construct_document(node)
    except (yaml.YAMLError, RecursionError) as error:
        problem = getattr(error, "problem", "") or "nested too deeply"
        raise RunFileError(source, [Problem("", f"not valid YAML: {problem}")]) from error
    finally:
        loader.dispose()


def _size(node: yaml.Node, sizes: dict[int, int], open_nodes: set[int]) -> int:
    """Number of nodes with each alias in full. Raises MarkedYAMLError for a node inside of itself."""
    if id(node) in open_nodes:
        raise yaml.MarkedYAMLError(problem="an alias that stands for a part of itself", problem_mark=node.start_mark)
    if id(node) in sizes:
        return sizes[id(node)]
    open_nodes.add(id(node))
    parts = [part for pair in node.value for part in pair] if isinstance(node, yaml.MappingNode) else (
        node.value if isinstance(node, yaml.SequenceNode) else [])  # fmt: skip
    sizes[id(node)] = 1 + sum(_size(part, sizes, open_nodes) for part in parts)
    open_nodes.discard(id(node))
    return sizes[id(node)]
