"""Answer prompts on this device: the drafter runs here, a server with the target verifies (docs/guide/edge.md).

    python -m pipelines.edge configs/edge/demo.yaml --prompt "What is a glacier?"

Without a prompt it is a chat on the terminal. The text is the target's own, whatever happens to the connection, except
what `private_answers: drafter` leaves to the drafter. Text that is not verified yet is dim on a terminal, and is not
written to a file or pipe.
"""

import sys
from contextlib import closing
from typing import TYPE_CHECKING

from moray.commands import Command
from moray.config import run_command
from moray.edge.config import EdgeRunConfig

if TYPE_CHECKING:
    from moray.chat_template import Message
    from moray.edge.device.loading import Device
    from moray.edge.device.terminal import Terminal


def main(config: EdgeRunConfig) -> None:
    """Answer prompts on this device: the drafter runs here, a server with the target verifies."""
    from moray.edge.device.loading import Device
    from moray.edge.device.terminal import Terminal

    device = Device(config)
    terminal = Terminal(sys.stdout, sys.stderr)
    messages: list[Message] = []
    if config.system is not None:
        messages.append({"role": "system", "content": config.system})
    with closing(device.client):
        if config.prompt is not None:
            _answer(device, terminal, [*messages, {"role": "user", "content": config.prompt}])
            return
        while (text := _read_prompt()) is not None:
            messages.append({"role": "user", "content": text})
            messages.append({"role": "assistant", "content": _answer(device, terminal, messages)})


def _answer(device: "Device", terminal: "Terminal", messages: "list[Message]") -> str:
    """Show the answer; return it as the server has it, for the next turn."""
    from moray.edge.device.terminal import AnswerView

    events = device.answer(messages)
    view = AnswerView(device.tokenizer.decode, device.redactor)
    terminal.begin()
    for event in events:
        terminal.show([event], view)
    print()
    note = ""
    if device.redactor.has_written:
        note = "; not lossless: the drafter wrote the private parts, unverified"
    elif device.redactor.is_used:
        note = "; lossless: redacted (the target's own text for the prompt without what is private)"
    print(device.client.stats.summary + note, file=sys.stderr)
    return view.redacted


def _read_prompt() -> str | None:
    """The next line; None at the end of the input."""
    while True:
        try:
            text = input("> ").strip()
        except EOFError:
            return None
        if text:
            return text


COMMAND = Command(EdgeRunConfig, main, flags=("prompt",))

if __name__ == "__main__":
    run_command(lambda: COMMAND.main(COMMAND.load(sys.argv[1:], description=__doc__ or "")))
