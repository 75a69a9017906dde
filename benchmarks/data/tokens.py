"""Part `tokens`: tokens and labels of conversations in a chat template, beside tokenizing the same text alone."""

from __future__ import annotations

from functools import partial

from benchmarks.support.report import Side
from benchmarks.support.suite import Bench
from benchmarks.support.workloads import data_workloads
from vlmpipe.trainer.data.chat.encode import Chat
from vlmpipe.trainer.data.chat.messages import as_chat
from vlmpipe.trainer.data.sample import Turn

SAMPLES = 500


def tokens(bench: Bench) -> None:
    """Encoded with labels and images; only tokenized; and rendered by the template, which layouts save."""
    loads = data_workloads(bench)
    bench.expect(2 * len(loads))
    for load in loads:
        split, reader = load.split(), load.reader()
        count = min(len(split), SAMPLES // 5 if bench.quick else SAMPLES)
        turns = [reader.turns(split.sample_location(number)) for number in range(count)]
        counts = [split.image_token_counts(number) for number in range(count)]
        works = {
            "ours": partial(encoded, load.chat, turns, counts),
            "tokenizer": partial(tokenized, load.chat, rendered(load.chat, turns)),
            "template": partial(count_rendered, load.chat, turns),
        }
        found = bench.take_timed_turns(f"tokens, {load.name}", works)
        ours = ("tokens and labels", found["ours"])
        for name, what in (("tokenizer", "tokenizing alone"), ("template", "rendering the template alone")):
            bench.report.compare_rates(
                f"tokens and labels, beside {what}", load.name, "samples", ours, (what, found[name])
            )
        pairs = zip(found["ours"], found["tokenizer"], strict=True)
        beyond = [1000 * (mine.cpu_per_unit - theirs.cpu_per_unit) for mine, theirs in pairs]
        bench.report.figure("tokens and labels beyond tokenizing", load.name, "CPU ms a sample", Side("ours", beyond))


def encoded(chat: Chat, turns: list[tuple[Turn, ...]], counts: list[list[int]]) -> float:
    for conversation, images in zip(turns, counts, strict=True):
        chat.encode(conversation, images)
    return float(len(turns))


def rendered(chat: Chat, turns: list[tuple[Turn, ...]]) -> list[str]:
    return [chat.template.render(as_chat(chat.messages(conversation))) for conversation in turns]


def count_rendered(chat: Chat, turns: list[tuple[Turn, ...]]) -> float:
    return float(len(rendered(chat, turns)))


def tokenized(chat: Chat, texts: list[str]) -> float:
    for text in texts:
        chat.tokenizer.backend_tokenizer.encode(text, add_special_tokens=False)
    return float(len(texts))
