"""Text to token ids and back: chat templates, and which tokens of a chat the target itself would write.

A drafter learns from the assistant's tokens only, so the response mask decides what training sees. It is found in
the characters of one full rendering and carried over to the tokens by their offsets; the tokens are therefore always
exactly those of the full text. This module refuses to know models, files of chats and drafters. It imports
transformers (which imports torch) only inside functions.
"""

import difflib
import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np

from moray.errors import ConfigError, DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# For base models: contents alone behind BOS; an answer runs to EOS.
_PLAIN_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] }}{{ eos_token }}{% endgeneration %}"
    "{% else %}{{ message['content'] }}{% endif %}{% endfor %}"
)
_GENERATION_MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")
# Stands in for a message's content; private-use characters, so that no template trims, tests or produces it.
_PLACEHOLDER = re.compile("\ue000(\\d+)\ue001")
_MAX_SCAFFOLDS = 256  # one per sequence of roles; chats of one data set share a few

Span = tuple[int, int]  # characters [start, end) of a rendered chat


class Message(TypedDict):
    """One turn of a chat."""

    role: str
    content: str


@dataclass(frozen=True)
class TokenisedChat:
    """A chat as the target sees it.

    Attributes:
        tokens: int32 [seq].
        response_mask: bool [seq], True where the token is one the target itself would write in an assistant turn:
            the end-of-turn token counts, the role header does not.
    """

    tokens: np.ndarray
    response_mask: np.ndarray


@dataclass(frozen=True)
class _Marks:
    """What a template puts around the turns, learnt from two small renderings."""

    prompt_tail: str  # from the end of a user's content to where the target begins to write
    header: str  # the part of it that belongs to the answer: what add_generation_prompt adds
    turn_end: str  # from the end of an assistant's content to the end of the end-of-turn token; may be empty
    turn_end_id: int | None


@dataclass(frozen=True)
class _Scaffold:
    """A rendering with the contents taken out.

    pieces[0] <content of messages[slots[0]]> pieces[1] <content of messages[slots[1]]> ... pieces[-1]
    """

    pieces: tuple[str, ...]
    slots: tuple[int, ...]

    def locate(self, text: str, messages: Sequence[Message]) -> list[Span] | None:
        """Where each slot's content stands in `text`; None if the template changes contents by more than trimming."""
        if not text.startswith(self.pieces[0]):
            return None
        spans: list[Span] = []
        position = len(self.pieces[0])
        for number, slot in enumerate(self.slots):
            content = messages[slot]["content"]
            behind = self.pieces[number + 1]
            must_end = number + 1 == len(self.slots)
            for variant in (content, content.strip(), content.lstrip(), content.rstrip()):
                end = position + len(variant)
                if (
                    text.startswith(variant, position)
                    and text.startswith(behind, end)
                    and (not must_end or end + len(behind) == len(text))
                ):
                    break
            else:
                return None
            spans.append((position, end))
            position = end + len(behind)
        return spans if position == len(text) else None


class ChatTokenizer:
    """Turns chats into tokens with a response mask, prompts into token ids, and token ids into text."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", name: str) -> None:
        if not tokenizer.is_fast:
            raise ConfigError(
                f"tokenizer '{name}' has no tokenizer.json, which the response mask needs; "
                "save a fast version of it with AutoTokenizer.from_pretrained(...).save_pretrained(...)"
            )
        if not tokenizer.chat_template:
            raise ConfigError(
                f"tokenizer '{name}' has no chat template; set template to 'plain' (contents alone, for base models) "
                "or to the path of a jinja file"
            )
        self.name = name
        self.tokenizer: Any = tokenizer  # transformers' own annotations are unions too wide to use
        self._template: str = self.tokenizer.get_chat_template()
        self._has_markers = _GENERATION_MARKER.search(self._template) is not None
        added = sorted((t.content for t in tokenizer.added_tokens_decoder.values() if t.content.strip()), key=len)
        self._added_tokens = re.compile("|".join(re.escape(text) for text in reversed(added)) or r"(?!)")
        self._scaffolds: dict[tuple[str, ...], _Scaffold] = {}
        self._marks = self._learn_marks()

    @classmethod
    def load(cls, path_or_name: str, template: str | None = None) -> "ChatTokenizer":
        """Load a tokenizer from a folder or by its hub name.

        Args:
            path_or_name: a folder with tokenizer.json, or OWNER/NAME.
            template: None for the tokenizer's own chat template, "plain" for contents alone behind BOS with every
                answer running to EOS, otherwise the path of a jinja file.

        Raises:
            ConfigError: for a missing tokenizer or template, or a template that cannot be rendered.
        """
        source = None if template is None else _PLAIN_TEMPLATE if template == "plain" else _read_template(template)
        tokenizer = _load_tokenizer(path_or_name)
        if source is not None:
            tokenizer.chat_template = source
        return cls(tokenizer, path_or_name)

    def encode_chat(self, messages: Sequence[Message], max_length: int) -> TokenisedChat:
        """Tokenise a chat and mark the assistant's tokens; what lies past `max_length` tokens is cut.

        Raises:
            DataError: if the template refuses the chat or the assistant's turns cannot be told apart in it.
        """
        if max_length < 1:
            raise ConfigError(f"max_length is {max_length}; it must be at least 1")
        text, spans = self._render_with_spans(messages)
        ids, offsets = self._tokenise(text)
        mask = _mask_tokens(text, offsets, spans)
        return TokenisedChat(np.asarray(ids[:max_length], dtype=np.int32), mask[:max_length])

    def encode_prompt(self, messages: Sequence[Message]) -> list[int]:
        """Tokenise a chat up to where the target begins its answer."""
        return self._tokenise(self._render(messages, add_generation_prompt=True))[0]

    def decode(self, ids: Sequence[int] | np.ndarray, skip_special_tokens: bool = True) -> str:
        """Text of token ids, with no spaces tidied away."""
        text = self.tokenizer.decode(
            [int(token) for token in ids],
            skip_special_tokens=skip_special_tokens,
            clean_up_tokenization_spaces=False,
        )
        assert isinstance(text, str)  # transformers answers a list only to a batch
        return text

    @cached_property
    def eos_ids(self) -> tuple[int, ...]:
        """Every id that ends a turn: the template's end-of-turn token first, then the tokenizer's EOS.

        A model's generation_config may name more; the caller adds those.
        """
        candidates = (self._marks.turn_end_id, self.tokenizer.eos_token_id)
        return tuple(dict.fromkeys(int(token) for token in candidates if token is not None))

    @cached_property
    def fingerprint(self) -> str:
        """Sha256 of whatever decides the tokens of a chat: tokenizer, special tokens and chat template."""
        parts = json.loads(self.tokenizer.backend_tokenizer.to_str())
        for passing in ("truncation", "padding"):  # how it was last called, not what it is
            parts.pop(passing, None)
        parts["chat_template"] = self._template
        parts["special_tokens"] = self.tokenizer.special_tokens_map
        canonical = json.dumps(parts, sort_keys=True, ensure_ascii=False, default=str)
        return hashlib.sha256(canonical.encode("utf-8", "surrogatepass")).hexdigest()

    @cached_property
    def vocab_size(self) -> int:
        """How many ids the tokenizer knows, added tokens included."""
        return len(self.tokenizer)

    def _tokenise(self, text: str) -> tuple[list[int], np.ndarray]:
        """Ids of a rendered chat and their character offsets [seq, 2]; the template wrote the special tokens."""
        try:
            encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        except (TypeError, UnicodeError) as error:
            raise DataError(f"tokenizer '{self.name}' cannot read a chat: {error} (a lone surrogate?)") from None
        return encoded["input_ids"], np.asarray(encoded["offset_mapping"], dtype=np.int64).reshape(-1, 2)

    def _render(self, messages: Sequence[Message], add_generation_prompt: bool = False) -> str:
        return self._render_template(messages, add_generation_prompt, want_spans=False)[0]

    def _render_template(
        self, messages: Sequence[Message], add_generation_prompt: bool, want_spans: bool
    ) -> tuple[str, list[Span]]:
        """One rendering, and the spans of its generation markers if they are wanted."""
        import jinja2
        from transformers.utils.chat_template_utils import render_jinja_template

        if not messages:
            raise DataError("a chat without messages cannot be rendered; it needs at least one")
        arguments: dict[str, Any] = {
            "conversations": [list(messages)],
            "chat_template": self._template,
            "return_assistant_tokens_mask": want_spans,
            "add_generation_prompt": add_generation_prompt,
            **self.tokenizer.special_tokens_map,
        }
        try:
            texts, spans = render_jinja_template(**arguments)
        except (jinja2.TemplateError, TypeError, ValueError, KeyError) as error:
            roles = ", ".join(str(message.get("role")) for message in messages[:8])
            reason = " ".join(str(error).split())
            raise DataError(f"the chat template of '{self.name}' refuses a chat with roles {roles}: {reason}") from None
        return texts[0], [(int(start), int(end)) for start, end in spans[0]] if want_spans else []

    def _render_with_spans(self, messages: Sequence[Message]) -> tuple[str, list[Span]]:
        """A full rendering and the characters of it that the target would write."""
        if self._has_markers:
            text, spans = self._render_template(messages, add_generation_prompt=False, want_spans=True)
            return text, [self._tidy(text, start, end) for start, end in spans]
        text = self._render(messages)
        if all(message["role"] != "assistant" for message in messages):
            return text, []
        scaffold = self._scaffold(tuple(message["role"] for message in messages))
        contents = scaffold.locate(text, messages)
        if contents is None or not self._holds_every_answer(scaffold, messages):
            return text, list(self._spans_by_prefixes(text, messages))
        return text, [
            self._widen(scaffold, number, messages, content)
            for number, content in enumerate(contents)
            if messages[scaffold.slots[number]]["role"] == "assistant"
        ]

    def _scaffold(self, roles: tuple[str, ...]) -> _Scaffold:
        """The rendering of a sequence of roles with placeholders for contents."""
        if roles not in self._scaffolds:
            if len(self._scaffolds) >= _MAX_SCAFFOLDS:
                self._scaffolds.clear()
            # re.split with a group gives text, number, text, number, ..., text.
            parts = _PLACEHOLDER.split(self._render(_placeholders(roles)))
            self._scaffolds[roles] = _Scaffold(tuple(parts[::2]), tuple(int(number) for number in parts[1::2]))
        return self._scaffolds[roles]

    @staticmethod
    def _holds_every_answer(scaffold: _Scaffold, messages: Sequence[Message]) -> bool:
        answers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        return sorted(slot for slot in scaffold.slots if messages[slot]["role"] == "assistant") == answers

    def _widen(self, scaffold: _Scaffold, number: int, messages: Sequence[Message], content: Span) -> Span:
        """From an answer's content to all that the target writes: what follows the header, and the end of turn."""
        start, end = content
        before, behind = scaffold.pieces[number], scaffold.pieces[number + 1]
        after_user = number > 0 and messages[scaffold.slots[number - 1]]["role"] == "user"
        if after_user and before.startswith(self._marks.prompt_tail):
            start -= len(before) - len(self._marks.prompt_tail)
        elif self._marks.header and (found := before.rfind(self._marks.header)) >= 0:
            start -= len(before) - found - len(self._marks.header)
        return start, end + (len(self._marks.turn_end) if behind.startswith(self._marks.turn_end) else 0)

    def _spans_by_prefixes(self, text: str, messages: Sequence[Message]) -> Iterator[Span]:
        """Spans for templates that rewrite contents: what each assistant turn adds to the rendering before it."""
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            start = self._find_start(text, messages[:number])
            closed = self._render(messages[: number + 1])
            if text.startswith(closed):
                end = len(closed)
            elif self._marks.turn_end and (found := text.find(self._marks.turn_end, start)) >= 0:
                # Such as Qwen3, which drops the reasoning of an answer once a later question follows.
                end = found + len(self._marks.turn_end)
            else:
                raise DataError(self._explain_prefix(number, "the rendering up to it is no prefix of the whole chat's"))
            if end <= start:
                raise DataError(self._explain_prefix(number, "the template leaves it out"))
            yield self._tidy(text, start, end)

    def _find_start(self, text: str, earlier: Sequence[Message]) -> int:
        if not earlier:
            return 0
        for add_generation_prompt in (True, False):
            prompt = self._render(earlier, add_generation_prompt)
            if text.startswith(prompt):
                return len(prompt)
        raise DataError(
            self._explain_prefix(len(earlier), "the rendering of the turns before it is no prefix of the whole chat's")
        )

    def _explain_prefix(self, number: int, reason: str) -> str:
        return (
            f"the chat template of '{self.name}' does not show which tokens of message {number} the assistant wrote: "
            f"{reason}; give a template with {{% generation %}} markers"
        )

    def _tidy(self, text: str, start: int, end: int) -> Span:
        """Leave the role header and what follows the end of turn out of a span; take the end of turn in."""
        header, turn_end = self._marks.header, self._marks.turn_end
        if header and text.startswith(header, start, end):
            start += len(header)
        else:  # a header that ends otherwise when prompting, such as one that opens the reasoning
            tokens = (token.end() for token in self._added_tokens.finditer(header))
            start += max((length for length in tokens if text.startswith(header[:length], start, end)), default=0)
        if turn_end:
            last = text.rfind(turn_end, start, end)
            if last >= 0 and not text[last + len(turn_end) : end].strip():
                end = last + len(turn_end)
            elif text.startswith(turn_end, end):
                end += len(turn_end)
        return start, end

    def _learn_marks(self) -> _Marks:
        try:
            asked = self._render(_placeholders(("user",)))
            opened = self._render(_placeholders(("user",)), add_generation_prompt=True)
            answered = self._render(_placeholders(("user", "assistant")))
        except DataError as error:
            raise ConfigError(f"{error}; a template must accept one question and its answer") from None
        prompt_tail = _PLACEHOLDER.split(opened)[-1]
        header = opened[len(asked) :] if opened.startswith(asked) else ""
        parts = _PLACEHOLDER.split(answered)
        if len(parts) != 5:  # the template rewrites contents: nothing certain stands around them
            return _Marks(prompt_tail, header, "", None)
        between, tail = parts[2], parts[4]
        if not header and between.startswith(prompt_tail):
            # A template that ignores add_generation_prompt: text before the answer is a header all the same.
            header = between[len(prompt_tail) :].rstrip(" ")
            prompt_tail += header
        found = self._added_tokens.search(tail)
        if found is None:
            return _Marks(prompt_tail, header, "", None)
        turn_end_id = int(self.tokenizer.get_added_vocab()[found.group()])
        return _Marks(prompt_tail, header, tail[: found.end()], turn_end_id)


def _mask_tokens(text: str, offsets: np.ndarray, spans: Sequence[Span]) -> np.ndarray:
    """Which tokens belong to the spans.

    A token belongs if it holds a character of the span and nothing else but white space: byte-level tokenizers glue
    a header's trailing space to the answer's first word.
    """
    mask = np.zeros(len(offsets), dtype=np.bool_)
    if not len(offsets):
        return mask
    ends = np.maximum.accumulate(offsets[:, 1])
    # Some tokenizers trim white space off the offsets: a token begins where the one before it ended.
    starts = np.maximum.accumulate(np.minimum(offsets[:, 0], np.concatenate(([0], ends[:-1]))))
    for start, end in spans:
        first = int(np.searchsorted(ends, start, side="right"))
        last = int(np.searchsorted(starts, end, side="left"))
        while first < last and text[starts[first] : start].strip():
            first += 1
        while first < last and text[end : ends[last - 1]].strip():
            last -= 1
        mask[first:last] = True
    return mask


def _placeholders(roles: Sequence[str]) -> list[Message]:
    return [Message(role=role, content=f"\ue000{number}\ue001") for number, role in enumerate(roles)]


def _read_template(path: str) -> str:
    file = Path(path)
    if file.is_file():
        return file.read_text(encoding="utf-8")
    raise ConfigError(
        f"template is '{path}', which is no file{_nearest(file)}; "
        "give null (the tokenizer's own), 'plain' or the path of a jinja file"
    )


def _load_tokenizer(path_or_name: str) -> "PreTrainedTokenizerBase":
    path = Path(path_or_name)
    is_path = path.is_absolute() or path_or_name.startswith((".", "~")) or path_or_name.count("/") > 1
    if is_path and not path.is_dir():
        raise ConfigError(
            f"tokenizer '{path_or_name}' is no folder{_nearest(path)}; give a folder with tokenizer.json or OWNER/NAME"
        )
    import transformers

    loader: Any = transformers.AutoTokenizer
    try:
        return loader.from_pretrained(path_or_name)
    except (OSError, ValueError, KeyError) as error:
        reason = " ".join(str(error).split())[:300]
        raise ConfigError(
            f"tokenizer '{path_or_name}' cannot be loaded: {reason}; give a folder with tokenizer.json or OWNER/NAME"
        ) from None


def _nearest(path: Path) -> str:
    names = sorted(other.name for other in path.parent.iterdir()) if path.parent.is_dir() else []
    match = difflib.get_close_matches(path.name, names, n=1, cutoff=0.4)
    return f"; did you mean '{path.parent / match[0]}'?" if match else ""
