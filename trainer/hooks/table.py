"""The table of features, by the name that their run-file fields carry (`OfFeature`)."""

# Name -> module with its `FEATURE`, imported on use: most import torch, and runs do not pay for what they do not ask.
# Without its line and its room, the rest imports, type-checks and trains (tests/project/test_features.py).
FEATURES = {
    "ema": "vlmpipe.trainer.features.ema.average",
    "float8": "vlmpipe.trainer.features.float8.products",
    "native_video": "vlmpipe.trainer.features.native_video.feature",
    "preferences": "vlmpipe.trainer.features.preferences.feature",
    "quantized_base": "vlmpipe.trainer.features.quantized_base.nf4",
    "router_loss": "vlmpipe.trainer.features.router_loss.balance",
    "relevance": "vlmpipe.trainer.features.relevance.feature",
}
