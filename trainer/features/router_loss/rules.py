"""Rules of the loss that balances experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from vlmpipe.trainer.hooks.rules import FeatureRules, Use


class RouterLossRules(FeatureRules):
    obstacles: ClassVar[Mapping[Use, str]] = {
        "shared_prefix": "train.router_loss, which would count the tokens of a prefix once"
    }


RULES = RouterLossRules()
