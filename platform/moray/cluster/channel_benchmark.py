"""What one cycle of the token loop costs through each kind of channel, side by side.

An engine decodes real prompts at each batch size, and what it says to its drafter is recorded: messages with memory,
replies with trees. Then every channel carries the same recordings in turn, to a process of its own that answers each
message with its recorded reply: the channel alone. At last the drafter itself answers, from the beginning of the
conversation; what it says that drafting took is taken off: unpacking, packing and the other's cold caches remain.

A cycle here is one message and its reply, sent when the one before is answered. Bytes are those of the frames, without
what a channel puts around them. `cluster.channels` says what each kind can do besides.
"""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from statistics import mean, median
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from moray.bench.configs import ChannelName, ChannelsBenchmarkConfig
from moray.bench.conversations import Conversation, longest_of, record_conversation
from moray.bench.loading import first_prompts, load_drafters, load_target
from moray.bench.recording import record
from moray.bench.spread import quartiles
from moray.bench.wording import count, number
from moray.cluster.channels.replay import Cycle, RecordedDrafter, replay
from moray.cluster.channels.ways import Way, needs_serve, open_ways
from moray.cluster.configs import RayConfig
from moray.cluster.own_serve import check_own_ray
from moray.cluster.session import ray_session
from moray.decoding.remote.channel import Channel
from moray.decoding.remote.messages import unpack_reply
from moray.errors import DataError
from moray.progress import Progress

_WARM_UP_CYCLES = 20


def benchmark_channels(config: ChannelsBenchmarkConfig, console: Console) -> dict[str, Any]:
    """Measure every channel at every batch size.

    Raises:
        ConfigError: a channel is Serve's, and Ray is named by an address or has Serve running already.
        DataError: not one prompt fits into the target's context, or a channel changes replies.
    """
    if needs_serve(config.channels):
        check_own_ray(RayConfig())
    passes = 1 + config.rounds + config.drafted_rounds
    total = len(config.batches) * (1 + passes * len(config.channels))
    with Progress("record", total, unit="passes", console=console) as progress:
        conversations, longest = _record(config, progress.advance)
        replies = {size: conversation.replies for size, conversation in conversations.items()}
        make = partial(RecordedDrafter, config.model_dump_json(), replies, longest)
        progress.update(title="start")
        with ray_session(RayConfig()), open_ways(config.channels, make) as ways:
            progress.update(title="replay")
            rows = _measure(config, ways, conversations, progress.advance)
    return {"rows": rows, "tree": config.tree.name} | record(config)


def _record(config: ChannelsBenchmarkConfig, done: Callable[[], None]) -> tuple[dict[int, Conversation], int]:
    """A conversation for each batch size, and the most tokens of a sequence in them."""
    questions, tokenizer, target = load_target(config)
    _, drafter = load_drafters((config.drafter,), target, tokenizer).popitem()
    room = target.spec.max_positions - config.max_new_tokens
    prompts = first_prompts(questions, tokenizer, room, config.questions)
    eos_ids = {*target.eos_ids, *tokenizer.eos_ids}
    conversations = {}
    for size in config.batches:
        conversations[size] = record_conversation(config, target, drafter, prompts, eos_ids, size)
        done()
    return conversations, longest_of(prompts, config)


def _measure(
    config: ChannelsBenchmarkConfig,
    ways: Mapping[ChannelName, Way],
    conversations: Mapping[int, Conversation],
    done: Callable[[], None],
) -> list[dict[str, Any]]:
    """Every round each channel carries every conversation; whoever came first comes last in the next."""
    pairs: list[tuple[ChannelName, int]] = [(name, size) for size in conversations for name in ways]
    alone: dict[tuple[ChannelName, int], list[list[Cycle]]] = {pair: [] for pair in pairs}
    drafted: dict[tuple[ChannelName, int], list[list[Cycle]]] = {pair: [] for pair in pairs}
    with ExitStack() as stack:
        channels: dict[ChannelName, Channel] = {}
        for name, way in ways.items():
            channels[name] = way.connect()
            stack.callback(channels[name].close)
        for number in range(-1, config.rounds + config.drafted_rounds):
            is_drafted = number >= config.rounds
            for size, conversation in conversations.items():
                frames = conversation.frames if number >= 0 else conversation.frames[:_WARM_UP_CYCLES]
                for name in _turns(list(ways), number):
                    ways[name].prepare(None if is_drafted else size)
                    cycles = replay(channels[name], frames)
                    if not is_drafted:
                        _check_same(name, conversation, cycles)
                    if number >= 0:
                        (drafted if is_drafted else alone)[name, size].append(cycles)
                    done()
    return [_row(name, conversations[size], size, alone[name, size], drafted[name, size]) for name, size in pairs]


def _turns(names: list[ChannelName], number: int) -> list[ChannelName]:
    first = number % len(names)
    return names[first:] + names[:first]


def _check_same(name: str, conversation: Conversation, cycles: list[Cycle]) -> None:
    if any(cycle.reply != reply for cycle, reply in zip(cycles, conversation.replies, strict=False)):
        raise DataError(f"channel '{name}' has given another reply than its other side did")


def _row(
    name: ChannelName, conversation: Conversation, size: int, alone: list[list[Cycle]], drafted: list[list[Cycle]]
) -> dict[str, Any]:
    low, _, high = quartiles([median(_alone(cycles)) for cycles in alone])
    beside = [1e3 * cycle.seconds_beside_drafting for cycles in drafted for cycle in cycles]
    drafting = [1e3 * unpack_reply(cycle.reply).seconds for cycles in drafted for cycle in cycles]
    same = [
        unpack_reply(cycle.reply).trees == unpack_reply(reply).trees
        for cycles in drafted
        for cycle, reply in zip(cycles, conversation.replies, strict=True)
    ]
    sizes = [len(frame) for frame in conversation.frames]
    return {
        "channel": name,
        "batch": size,
        "num_cycles": sum(map(len, alone)),
        "milliseconds": _figures([value for cycles in alone for value in _alone(cycles)]),
        "round_quartiles": (low, high),
        "milliseconds_beside_drafting": _figures(beside) if beside else None,
        "milliseconds_drafting": _figures(drafting) if drafting else None,
        "equal_drafts_share": sum(same) / len(same) if same else None,
        "bytes_out": mean(sizes),
        "bytes_out_most": max(sizes),
        "bytes_in": mean(map(len, conversation.replies)),
        "messages_per_pass": len(sizes) / conversation.num_passes,
    }


def _alone(cycles: list[Cycle]) -> list[float]:
    return [1e3 * cycle.seconds for cycle in cycles]


def _figures(values: list[float]) -> dict[str, float]:
    middle, high = np.percentile(values, (50, 99))
    return {"median": float(middle), "p99": float(high)}


def print_channels_benchmark(result: dict[str, Any], console: Console) -> None:
    """The rows as a table, a section for each batch size."""
    title = f"One cycle through a channel, ms; {result['tree']}"
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", padding=(0, 1, 0, 0))
    for heading in ("at a time", "channel", "median", "p99", "beside\ndrafting", "p99", "bytes\nout", "bytes\nin"):
        table.add_column(heading, justify="left" if heading == "channel" else "right", no_wrap=heading == "channel")
    for before, row in zip([None, *result["rows"]], result["rows"], strict=False):
        if before is not None and before["batch"] != row["batch"]:
            table.add_section()
        beside = row["milliseconds_beside_drafting"] or {"median": None, "p99": None}
        table.add_row(
            str(row["batch"]),
            row["channel"],
            *(number(each[key]) for each in (row["milliseconds"], beside) for key in ("median", "p99")),
            count(round(row["bytes_out"])),
            count(round(row["bytes_in"])),
        )
    console.print(table)
    console.print("beside drafting: with the drafter at work, without the time that it says it needed")
    if any(row["channel"] == "handle tuned" for row in result["rows"]):
        console.print("handle tuned: gRPC, the replica in one loop, no log; the caller's router in a thread of its own")
