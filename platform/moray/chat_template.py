"""Chat templates: a chat as one text, and which characters of it the target itself would write.

Templates are programs, so nothing about them is taken on trust: where the turns lie is learnt by rendering, from
markers in the template, from the text around the contents, or from prefixes. This module refuses to know token
ids (but for the end-of-turn token's), models and files. It imports transformers (which imports torch) only inside
functions.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypedDict

from moray.errors import ConfigError, DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

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
class TurnMarks:
    """What a template puts around the turns, learnt from two small renderings."""

    prompt_tail: str  # from the end of a user's content to where the target begins to write
    header: str  # the part of it that belongs to the answer: what add_generation_prompt adds
    turn_end: str  # from the end of an assistant's content to the end of the end-of-turn token; may be empty
    turn_end_id: int | None
    answer_lead: str = ""  # what the template itself writes between prompt_tail and an answer's content


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


class ChatTemplate:
    """A tokenizer's chat template, with what has been learnt about it.

    Attributes:
        source: the jinja text.
        marks: what stands around the turns.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", name: str) -> None:
        self._tokenizer: Any = tokenizer  # transformers' own annotations are unions too wide to use
        self._name = name
        self.source: str = self._tokenizer.get_chat_template()
        self._has_markers = _GENERATION_MARKER.search(self.source) is not None
        added = sorted((t.content for t in tokenizer.added_tokens_decoder.values() if t.content.strip()), key=len)
        self._added_tokens = re.compile("|".join(re.escape(text) for text in reversed(added)) or r"(?!)")
        self._scaffolds: dict[tuple[str, ...], _Scaffold] = {}
        self.marks = self._learn_marks()

    def render(self, messages: Sequence[Message], add_generation_prompt: bool = False) -> str:
        """A chat as the target reads it, special tokens included.

        Raises:
            DataError: if the template refuses the chat.
        """
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
            "chat_template": self.source,
            "return_assistant_tokens_mask": want_spans,
            "add_generation_prompt": add_generation_prompt,
            **self._tokenizer.special_tokens_map,
        }
        try:
            texts, spans = render_jinja_template(**arguments)
        except (jinja2.TemplateError, TypeError, ValueError, KeyError) as error:
            roles = ", ".join(str(message.get("role")) for message in messages[:8])
            reason = " ".join(str(error).split())
            raise DataError(
                f"the chat template of '{self._name}' refuses a chat with roles {roles}: {reason}"
            ) from None
        return texts[0], [(int(start), int(end)) for start, end in spans[0]] if want_spans else []

    def render_with_spans(self, messages: Sequence[Message]) -> tuple[str, list[Span]]:
        """A full rendering and the characters of it that the target would write."""
        if self._has_markers:
            text, spans = self._render_template(messages, add_generation_prompt=False, want_spans=True)
            return text, [self._tidy(text, start, end) for start, end in spans]
        text = self.render(messages)
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
            parts = _PLACEHOLDER.split(self.render(_placeholders(roles)))
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
        if after_user and before.startswith(self.marks.prompt_tail):
            start -= len(before) - len(self.marks.prompt_tail)
        elif self.marks.header and (found := before.rfind(self.marks.header)) >= 0:
            start -= len(before) - found - len(self.marks.header)
        return start, end + (len(self.marks.turn_end) if behind.startswith(self.marks.turn_end) else 0)

    def _spans_by_prefixes(self, text: str, messages: Sequence[Message]) -> Iterator[Span]:
        """Spans for templates that rewrite contents: what each assistant turn adds to the rendering before it."""
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            start = self._find_start(text, messages[:number])
            closed = self.render(messages[: number + 1])
            if text.startswith(closed):
                end = len(closed)
            elif self.marks.turn_end and (found := text.find(self.marks.turn_end, start)) >= 0:
                # Such as Qwen3, which drops the reasoning of an answer once a later question follows.
                end = found + len(self.marks.turn_end)
            else:
                raise DataError(self._explain_prefix(number, "the rendering up to it is no prefix of the whole chat's"))
            if end <= start:
                raise DataError(self._explain_prefix(number, "the template leaves it out"))
            yield self._tidy(text, start, end)

    def _find_start(self, text: str, earlier: Sequence[Message]) -> int:
        if not earlier:
            return 0
        for add_generation_prompt in (True, False):
            prompt = self.render(earlier, add_generation_prompt)
            if text.startswith(prompt):
                return len(prompt)
        raise DataError(
            self._explain_prefix(len(earlier), "the rendering of the turns before it is no prefix of the whole chat's")
        )

    def _explain_prefix(self, number: int, reason: str) -> str:
        return (
            f"the chat template of '{self._name}' does not show which tokens of message {number} the assistant wrote: "
            f"{reason}; give a template with {{% generation %}} markers"
        )

    def _tidy(self, text: str, start: int, end: int) -> Span:
        """Leave the role header and what follows the end of turn out of a span; take the end of turn in."""
        header, turn_end = self.marks.header, self.marks.turn_end
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

    def _learn_marks(self) -> TurnMarks:
        try:
            asked = self.render(_placeholders(("user",)))
            opened = self.render(_placeholders(("user",)), add_generation_prompt=True)
            answered = self.render(_placeholders(("user", "assistant")))
        except DataError as error:
            raise ConfigError(f"{error}; a template must accept one question and its answer") from None
        prompt_tail = _PLACEHOLDER.split(opened)[-1]
        header = opened[len(asked) :] if opened.startswith(asked) else ""
        parts = _PLACEHOLDER.split(answered)
        if len(parts) != 5:  # the template rewrites contents: nothing certain stands around them
            return TurnMarks(prompt_tail, header, "", None)
        between, tail = parts[2], parts[4]
        if not header and between.startswith(prompt_tail):
            # A template that ignores add_generation_prompt: text before the answer is a header all the same.
            header = between[len(prompt_tail) :].rstrip(" ")
            prompt_tail += header
        lead = between[len(prompt_tail) :] if between.startswith(prompt_tail) else ""
        found = self._added_tokens.search(tail)
        if found is None:
            return TurnMarks(prompt_tail, header, "", None, lead)
        turn_end_id = int(self._tokenizer.get_added_vocab()[found.group()])
        return TurnMarks(prompt_tail, header, tail[: found.end()], turn_end_id, lead)


def _placeholders(roles: Sequence[str]) -> list[Message]:
    return [Message(role=role, content=f"\ue000{number}\ue001") for number, role in enumerate(roles)]
