"""Text to token ids and back: chat templates, and which tokens of a chat the target itself would write.

A drafter learns from the assistant's tokens only, so the response mask decides what training sees. It is found in
the characters of one full rendering and carried over to the tokens by their offsets; the tokens are therefore always
exactly those of the full text, in which contents are text even where they spell special tokens. This module refuses to
know models, files of chats and drafters. It imports transformers (which imports torch) only inside functions.
"""

import difflib
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from moray.chat_template import ChatTemplate, Message, Span
from moray.errors import ConfigError, DataError
from moray.models import folder_of
from moray.special_tokens import SpecialTokens, without_marks
from moray.token_bytes import TokenBytes

__all__ = ["ChatTokenizer", "Message", "TokenisedChat", "fingerprint_parts"]

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# For base models: contents alone behind BOS; an answer runs to EOS.
_PLAIN_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] }}{{ eos_token }}{% endgeneration %}"
    "{% else %}{{ message['content'] }}{% endif %}{% endfor %}"
)


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


class ChatTokenizer:
    """Turns chats into tokens with a response mask, prompts into token ids, and token ids into text."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", name: str, num_ids: int | None = None) -> None:
        """
        Args:
            tokenizer: a fast one with a chat template.
            name: what errors call it.
            num_ids: rows of the model's embeddings and lm_head: ids from there on do not exist for it. None for a
                tokenizer without a model.

        Raises:
            ConfigError: it has no tokenizer.json or no template, or any text may hold an id that the model lacks.
        """
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
        self._template = ChatTemplate(tokenizer, name)
        self._special_tokens = SpecialTokens(tokenizer, self._template)
        self._num_ids = num_ids
        if num_ids is not None:
            self._check_size(num_ids)

    @classmethod
    def load(cls, path_or_name: str, template: str | None = None) -> "ChatTokenizer":
        """Load a tokenizer from a folder or by its hub name.

        Args:
            path_or_name: a folder with tokenizer.json, a GGUF file, or OWNER/NAME.
            template: None for the tokenizer's own chat template, "plain" for contents alone behind BOS with every
                answer running to EOS, otherwise the path of a jinja file.

        Raises:
            ConfigError: for a missing tokenizer or template, a template that cannot be rendered, or a tokenizer that
                is too large for the model beside it.
        """
        source = None if template is None else _PLAIN_TEMPLATE if template == "plain" else _read_template(template)
        folder_or_name = str(folder_of(path_or_name) or path_or_name)
        tokenizer = _load_tokenizer(folder_or_name)
        if source is not None:
            tokenizer.chat_template = source
        return cls(tokenizer, path_or_name, _num_ids(folder_or_name))

    def encode_chat(self, messages: Sequence[Message], max_length: int) -> TokenisedChat:
        """Tokenise a chat and mark the assistant's tokens; what lies past `max_length` tokens is cut.

        Raises:
            DataError: if the template refuses the chat, the assistant's turns cannot be told apart in it, or one of the
                tokens is none of the model's.
        """
        if max_length < 1:
            raise ConfigError(f"max_length is {max_length}; it must be at least 1")
        chat, mark = self._special_tokens.marked(messages)
        text, spans = self._template.render_with_spans(chat)
        ids, offsets = self._tokenise(text, mark)
        if mark:
            text, spans = without_marks(text, mark, spans)
        mask = _mask_tokens(text, offsets, spans)
        return TokenisedChat(np.asarray(self._known(ids[:max_length]), dtype=np.int32), mask[:max_length])

    def encode_text(self, text: str, *, adds_special: bool = True) -> list[int]:
        """Tokenise plain text as the tokenizer does by itself: with the special tokens that it adds, unless told not
        to.

        Raises:
            DataError: a lone surrogate, or a token that is none of the model's.
        """
        try:
            return self._known(list(self.tokenizer(text, verbose=False, add_special_tokens=adds_special)["input_ids"]))
        except (TypeError, UnicodeError) as error:
            raise DataError(f"tokenizer '{self.name}' cannot read a text: {error} (a lone surrogate?)") from None

    def encode_prompt(self, messages: Sequence[Message]) -> list[int]:
        """Tokenise a chat up to where the target begins its answer.

        Raises:
            DataError: the template refuses the chat, or one of its tokens is none of the model's.
        """
        chat, mark = self._special_tokens.marked(messages, add_generation_prompt=True)
        return self._known(self._tokenise(self._template.render(chat, add_generation_prompt=True), mark)[0])

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
    def token_bytes(self) -> TokenBytes:
        """What each token adds to a text, in bytes."""
        return TokenBytes(self.tokenizer)

    @cached_property
    def answers_keep_space(self) -> bool:
        """Whether the first space of an answer to a chat belongs to the answer rather than to the template.

        A template may write a space before every answer. Then the first space of a decoded answer is the template's and
        is left out, so that the answer, put back into its chat, gives the tokens that the target wrote.
        """
        return not self._template.marks.answer_lead.isspace()

    @cached_property
    def eos_ids(self) -> tuple[int, ...]:
        """Every id that ends a turn: the template's end-of-turn token first, then the tokenizer's EOS.

        A model's generation_config may name more; the caller adds those.
        """
        candidates = (self._template.marks.turn_end_id, self.tokenizer.eos_token_id)
        return tuple(dict.fromkeys(int(token) for token in candidates if token is not None))

    @cached_property
    def fingerprint(self) -> str:
        """Hashes of what decides the tokens of a chat: "TOKENIZER.TEMPLATE" (see `fingerprint_parts`).

        How contents that spell special tokens are read is not in it, for it says nothing against a trained drafter;
        caches of tokens note it beside (`special_tokens.CONTENT_RULE`).
        """
        parts = json.loads(self.tokenizer.backend_tokenizer.to_str())
        for passing in ("truncation", "padding"):  # how it was last called, not what it is
            parts.pop(passing, None)
        parts["special_tokens"] = self.tokenizer.special_tokens_map
        return f"{_short_hash(parts)}.{_short_hash(self._template.source)}"

    @cached_property
    def vocab_size(self) -> int:
        """How many ids the tokenizer knows, added tokens included."""
        return len(self.tokenizer)

    def _check_size(self, num_ids: int) -> None:
        """Accept ids that the model lacks if they are added tokens: a chat holds them only if it spells them out, and
        `_known` refuses such a chat."""
        added: dict[int, Any] = self.tokenizer.added_tokens_decoder
        if max(len(self.tokenizer), *added, 0) < num_ids:
            return
        chat = [Message(role="user", content="a"), Message(role="assistant", content="b")]
        always = {*self._tokenise(self._template.render(chat))[0], *self.tokenizer("", verbose=False)["input_ids"]}
        beyond = {
            number: token
            for token, number in self.tokenizer.get_vocab().items()
            if number >= num_ids and (number not in added or number in always)
        }
        if beyond:
            first = min(beyond)
            more = f" and {len(beyond) - 1} more" if len(beyond) > 1 else ""
            raise ConfigError(
                f"tokenizer '{self.name}' has {len(self.tokenizer)} tokens, the lm_head of its model {num_ids} rows: "
                f"id {first} ({beyond[first]!r}){more} may stand in any text; give the model its own tokenizer"
            )

    def _known(self, ids: list[int]) -> list[int]:
        """The ids, unchanged, if the model has all of them."""
        if self._num_ids is not None and ids and max(ids) >= self._num_ids:
            first = next(number for number in ids if number >= self._num_ids)
            raise DataError(
                f"the text holds token {first} ({self.tokenizer.convert_ids_to_tokens(first)!r}) of tokenizer "
                f"'{self.name}', but the lm_head of its model has {self._num_ids} rows: ids below that are accepted"
            )
        return ids

    def _tokenise(self, text: str, mark: str = "") -> tuple[list[int], np.ndarray]:
        """Ids of a rendered chat and their character offsets [seq, 2], those of marked chats (see `SpecialTokens`)
        in the rendering without marks."""
        try:
            if mark:
                return self._special_tokens.tokenise(text, mark)
            encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        except (TypeError, UnicodeError) as error:
            raise DataError(f"tokenizer '{self.name}' cannot read a chat: {error} (a lone surrogate?)") from None
        return encoded["input_ids"], np.asarray(encoded["offset_mapping"], dtype=np.int64).reshape(-1, 2)


def fingerprint_parts(fingerprint: str) -> dict[str, str]:
    """The parts of a text fingerprint, by what they are hashes of."""
    tokenizer, _, template = fingerprint.partition(".")
    return {"tokenizer": tokenizer, "chat template": template}


def _short_hash(value: Any) -> str:
    canonical = json.dumps(value, sort_keys=True, ensure_ascii=False, default=str)
    return hashlib.sha256(canonical.encode("utf-8", "surrogatepass")).hexdigest()[:32]


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


def _num_ids(path_or_name: str) -> int | None:
    """How many ids the model beside a tokenizer has; None where there is no model."""
    from transformers.utils.hub import cached_file

    path = cached_file(
        path_or_name,
        "config.json",
        _raise_exceptions_for_gated_repo=False,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    try:
        size = None if path is None else json.loads(Path(path).read_bytes()).get("vocab_size")
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"tokenizer '{path_or_name}': '{path}' cannot be read: {error}; correct or remove it"
        ) from None
    return size if isinstance(size, int) else None


def _nearest(path: Path) -> str:
    names = sorted(other.name for other in path.parent.iterdir()) if path.parent.is_dir() else []
    match = difflib.get_close_matches(path.name, names, n=1, cutoff=0.4)
    return f"; did you mean '{path.parent / match[0]}'?" if match else ""
