"""Values of train.deepspeed, read by DeepSpeed's own classes before an engine is built.

python -m vlmpipe.trainer.strategies.deepspeed.values < TRAIN.json prints what they refuse as the last line, for
`vlmpipe check`, whose process imports no DeepSpeed.
"""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Mapping

from pydantic import ValidationError

from vlmpipe.trainer.config.train import TrainConfig
from vlmpipe.trainer.errors import ConfigError
from vlmpipe.trainer.sizing.deepspeed_config import Sizes, engine_settings, laid_over

ANY = Sizes(trainable=10**9, layer=10**7, vector=10**4)  # values are judged without regard to a model's sizes


def require_values(settings: Mapping[str, object]) -> None:
    """Raise ConfigError where DeepSpeed refuses a configuration, with all that it says.

    Without its batch size, which DeepSpeed would multiply by one rank: it knows none before the first engine.
    """
    from deepspeed.runtime.config import DeepSpeedConfig, DeepSpeedConfigError

    judged = {name: copy.deepcopy(value) for name, value in settings.items() if name != "train_batch_size"}
    try:
        DeepSpeedConfig(judged)
    except ValidationError as error:
        messages = [
            f"{'.'.join(map(str, detail['loc']))}: {detail['msg']}, found {detail['input']!r}"
            for detail in error.errors()
        ]
        raise _refused("; ".join(messages)) from error
    except (DeepSpeedConfigError, ValueError, TypeError, AttributeError, LookupError, AssertionError) as error:
        raise _refused(str(error)) from error


def _refused(message: str) -> ConfigError:
    return ConfigError(
        f"DeepSpeed refuses train.deepspeed: {message}",
        expected="values of https://www.deepspeed.ai/docs/config-json/",
        fix="correct them, or take them out: the run file's other fields decide what is needed",
    )


def main() -> int:
    config = TrainConfig.model_validate(json.load(sys.stdin))
    settings = engine_settings(config, stage=int(config.strategy[-1]), micro_steps=1, sizes=ANY)
    try:
        require_values(laid_over(settings, config.deepspeed))
    except ConfigError as error:
        print("\n" + json.dumps(error.found))
    else:
        print("\n" + json.dumps(""))
    return 0


if __name__ == "__main__":
    sys.exit(main())
