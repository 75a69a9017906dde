from vlmpipe.trainer.config.arr_coc.channels import CHANNELS, PRESETS, expand_channels


def test_presets_have_their_names_numbers() -> None:
    assert {name: len(channels) for name, channels in PRESETS.items()} == {
        "arr13": 13, "arr13_unique": 11, "rgb": 3, "rgb_lab": 6, "all": 22,
    }  # fmt: skip
    assert all(set(channels) <= set(CHANNELS) for channels in PRESETS.values())


def test_names_are_expanded_once_in_the_stored_order() -> None:
    assert expand_channels(["hue", "rgb", "red"]) == ("red", "green", "blue", "hue")
