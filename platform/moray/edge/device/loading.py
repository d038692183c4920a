"""A device that is ready to answer: tokenizer, drafter with the target's head, and a client."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from moray.decoding.request import Request
from moray.drafters.loading import build_drafters, fingerprints_of, num_head_layers
from moray.edge.config import EdgeRunConfig
from moray.edge.device.client import EdgeClient
from moray.edge.device.drafting import DeviceDrafter
from moray.edge.device.events import EdgeEvent
from moray.edge.device.local_spans import LocalSpans
from moray.edge.device.private import Redactor
from moray.edge.device.transport import WebSocketLink, check_url
from moray.edge.messages import Hello
from moray.errors import ConfigError
from moray.progress import Progress
from moray.targets.head import TargetHead
from moray.text import ChatTokenizer, Message


class Device:
    """One device of one server."""

    def __init__(self, config: EdgeRunConfig) -> None:
        """Load everything; the server is not asked yet.

        Raises:
            ConfigError: a file is missing or a setting does not fit.
            MismatchError: the drafter belongs to another target, tokenizer or template.
        """
        import torch

        check_url(config.url)
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        key = _read_key(config.key_file)
        with Progress("load the drafter"):
            self.tokenizer = ChatTokenizer.load(config.target.model, config.target.template)
            entries = (config.drafter,)
            head = TargetHead.load(config.target, num_head_layers(entries))
            ((name, drafter),) = build_drafters(entries, lambda _: head, self.tokenizer).items()
            hello = Hello(
                target=head.spec.fingerprint,
                text=self.tokenizer.fingerprint,
                drafter=config.drafter_name or name,
                drafter_fingerprint=next(iter(fingerprints_of(entries).values()), ""),
            )
        self._config = config
        self.redactor = Redactor()
        self._drafter = DeviceDrafter(drafter, hello.drafter, head.spec.max_positions)
        self.client = EdgeClient(
            self._drafter,
            hello,
            lambda: WebSocketLink(config.url, key, config.ca_file),
            config,
            self.tokenizer.eos_ids,
        )

    def answer(self, messages: Sequence[Message]) -> Iterator[EdgeEvent]:
        """Answer a chat (see `EdgeClient.answer`); what is marked private in it is replaced first.

        Raises:
            DataError: a mark is wrong (see `edge.device.private`).
        """
        chat = self.redactor.redact(messages)
        if self._config.private_answers == "drafter":
            chat = _with_request(chat, self._config.private_request)
        prompt = tuple(self.tokenizer.encode_prompt(chat))
        request = Request(prompt=prompt, params=self._config.sampling, max_new_tokens=self._config.max_new_tokens)
        if self._config.private_answers == "target":
            return self.client.answer(request)
        tokenizer = self.tokenizer
        return LocalSpans(
            self.client,
            self._drafter,
            lambda text: tokenizer.encode_text(text, adds_special=False),
            tokenizer.decode,
            self.redactor,
            max(1, self._config.max_offline_tokens),
            tokenizer.eos_ids,
        ).answer(request)


def _with_request(chat: Sequence[Message], request: str) -> list[Message]:
    """The chat with a request in its system message. It is added after redaction, which would take its marks for
    private text."""
    if chat and chat[0]["role"] == "system":
        return [{"role": "system", "content": f"{chat[0]['content']}\n{request}"}, *chat[1:]]
    return [{"role": "system", "content": request}, *chat]


def _read_key(path: str | None) -> str | None:
    """The first line of a file.

    Raises:
        ConfigError: it cannot be read, or is empty; the message never shows the key.
    """
    if path is None:
        return None
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").split()
    except (OSError, ValueError) as error:
        raise ConfigError(f"key_file is '{path}', which cannot be read: {type(error).__name__}") from None
    if not lines:
        raise ConfigError(f"key_file is '{path}', which is empty: write the server's key into it")
    return lines[0]
