"""Values of train.deepspeed, read by DeepSpeed's own classes before an engine is built.

python -m vlmpipe.trainer.strategies.deepspeed.values < TRAIN.json prints what they refuse as the last line, for
`vlmpipe check`, whose process imports no DeepSpeed.
"""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from vlmpipe.trainer.config.train import TrainConfig
from vlmpipe.trainer.errors import ConfigError
from vlmpipe.trainer.sizing.deepspeed_config import Sizes, engine_settings, laid_over

ANY = Sizes(trainable=10**9, layer=10**7, vector=10**4)  # values are judged without regard to a model's sizes


class Recorded(dict[str, Any]):
    """A section that remembers which of its keys were read."""

    def __init__(self, content: Mapping[str, object]) -> None:
        super().__init__(
            {name: Recorded(item) if isinstance(item, Mapping) else item for name, item in content.items()}
        )
        self.asked: set[str] = set()

    def get(self, key: str, default: object = None) -> Any:
        self.asked.add(key)
        return super().get(key, default)

    def __getitem__(self, key: str) -> Any:
        self.asked.add(key)
        return super().__getitem__(key)

    def __iter__(self) -> Iterator[str]:  # as ** and loops read all
        self.asked.update(super().keys())
        return super().__iter__()

    def keys(self) -> Any:
        self.asked.update(super().keys())
        return super().keys()

    def items(self) -> Any:
        self.asked.update(super().keys())
        return super().items()

    def __deepcopy__(self, memo: object) -> Recorded:
        return self

    def unread(self, name: str) -> Iterator[str]:
        """Dotted names of keys in this section that nothing read."""
        for key, value in dict.items(self):
            if key not in self.asked:
                yield f"{name}.{key}"
            elif isinstance(value, Recorded):
                yield from value.unread(f"{name}.{key}")


def value_problems(train: TrainConfig) -> list[str]:
    """List the values of train.deepspeed that DeepSpeed refuses, and the keys of sections that it would ignore."""
    settings = engine_settings(train, stage=int(train.strategy[-1]), micro_steps=1, sizes=ANY)
    problems: list[str] = []
    for name, value in train.deepspeed.items():
        refused = [f"{name}: {problem}" for problem in _refused(laid_over(settings, {name: value}))]
        problems += refused or _ignored(name, value)
    return problems or list(_refused(laid_over(settings, train.deepspeed)))


def require_values(settings: Mapping[str, object]) -> None:
    """Raise ConfigError where DeepSpeed refuses a configuration, with all that it says."""
    if refused := list(_refused(settings)):
        raise ConfigError(
            f"DeepSpeed refuses train.deepspeed: {'; '.join(refused)}",
            expected="values of https://www.deepspeed.ai/docs/config-json/",
            fix="correct them, or take them out: the run file's other fields decide what is needed",
        )


def _refused(settings: Mapping[str, object]) -> Iterator[str]:
    """Yield DeepSpeed's objections to a configuration.

    Without its batch size, which DeepSpeed would multiply by one rank: it knows none before the first engine.
    """
    from deepspeed.runtime.config import DeepSpeedConfig, DeepSpeedConfigError

    try:
        DeepSpeedConfig({name: copy.deepcopy(value) for name, value in settings.items() if name != "train_batch_size"})
    except ValidationError as error:
        for detail in error.errors():
            yield f"{'.'.join(map(str, detail['loc']))}: {detail['msg']}, found {detail['input']!r}"
    except (DeepSpeedConfigError, ValueError, TypeError, AttributeError, LookupError, AssertionError) as error:
        yield str(error)


def _ignored(name: str, value: object) -> Iterator[str]:
    """Keys inside of a section that DeepSpeed does not read. Its own classes refuse them in most sections."""
    from deepspeed.runtime.config import DeepSpeedConfig

    if isinstance(value, Mapping):
        section = Recorded(value)
        DeepSpeedConfig({"train_micro_batch_size_per_gpu": 1, name: section})
        for key in section.unread(name):
            yield f"{key} is not known to DeepSpeed, which would ignore it; take it out"


def main() -> int:
    config = TrainConfig.model_validate(json.load(sys.stdin))
    try:
        import deepspeed  # noqa: F401
    except ImportError as error:
        print("\n" + json.dumps({"missing": str(error)}))
        return 0
    print("\n" + json.dumps({"problems": value_problems(config)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
