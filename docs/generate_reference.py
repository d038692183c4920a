"""Writes docs/reference from the code: commands, settings, metrics, the HTTP interface and the cache's format.

    make reference

A test fails while the pages differ from what this script would write (tests/test_reference.py).
"""

import importlib
import re
import sys
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, cast

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from moray.activations.format import schema
from moray.activations.format.shard_info import ShardInfo
from moray.config import Config
from moray.explain import classes_of, default_of, default_text, element_of, type_name
from serve.api.schemas import ChatRequest, CompletionRequest
from serve.metrics.series import ALL

HERE = Path(__file__).resolve().parent
MODULES = (
    "pipelines.fetch_target",
    "pipelines.train_demo_target",
    "pipelines.pack_chats",
    "pipelines.regenerate",
    "pipelines.cache_activations",
    "pipelines.distill",
    "pipelines.sparsify",
    "pipelines.evaluate",
    "pipelines.replay",
    "pipelines.plan",
    "pipelines.export",
    "pipelines.import_drafter",
    "pipelines.prune",
    "pipelines.benchmark",
    "pipelines.demo",
    "pipelines.edge",
    "sweeps.tune",
    "sweeps.tune_decoding",
    "sweeps.tune_sparse",
    "sweeps.summarize",
    "serve.deploy",
    "serve.benchmark",
)
"""Entry points in the order in which a user meets them."""
NOTICE = "<!-- Written by docs/generate_reference.py: edit the code's docstrings and run `make reference`. -->\n"


def pages() -> dict[str, str]:
    """Every page by its file name."""
    commands = {name: config_class for name, (config_class, _, _) in _commands().items()}
    return {
        "commands.md": _commands_page(),
        "settings.md": _settings_page(commands),
        "metrics.md": _metrics_page(),
        "http.md": _http_page(),
        "cache-format.md": _cache_page(),
    }


def _commands() -> dict[str, tuple[type[Config], str, str]]:
    """Configuration, usage and purpose by command."""
    found: dict[str, tuple[type[Config], str, str]] = {}
    for name in MODULES:
        module = importlib.import_module(name)
        listed: Mapping[str, Any] = getattr(module, "COMMANDS", {"": getattr(module, "COMMAND", None)})
        for word, command in listed.items():
            called = f"{name} {word}".rstrip()
            if command is None:
                purpose = (module.__doc__ or "").strip().partition("\n")[0]
                found[called] = module.CONFIG, "[config.yaml ...] [key=value ...]", purpose
            else:
                found[called] = command.config_class, command.usage, command.summary
    return found


def _commands_page() -> str:
    lines = [
        "# Commands",
        "",
        *_wrapped(
            "Call each with `python -m`. Every command takes YAML files, merged from left to right, then overrides "
            "such as `train.epochs=2`; `--help` lists its keys. A wrong key or value ends it with one line on stderr "
            "and exit code 2."
        ),
        "",
        "| command | what it does | settings |",
        "|---|---|---|",
    ]
    for called, (config_class, usage, purpose) in _commands().items():
        link = f"[{config_class.__name__}](settings.md#{config_class.__name__.lower()})"
        lines.append(f"| `{called}` {_code(usage)} | {_cell(purpose)} | {link} |")
    lines += [
        "",
        "`serve.app`, which `serve.deploy` and `serve run` start, takes [ServeConfig](settings.md#serveconfig).",
    ]
    lines.append("")
    return NOTICE + "\n".join(lines)


def _settings_page(commands: Mapping[str, type[Config]]) -> str:
    from serve.config import ServeConfig

    users: dict[type[BaseModel], list[str]] = {}
    for called, config_class in [*commands.items(), ("serve.app", ServeConfig)]:
        users.setdefault(config_class, []).append(called)
    classes: dict[type[BaseModel], None] = {}
    for config_class in users:
        for each in _with_parts(config_class):
            classes.setdefault(each)
    lines = [
        "# Settings",
        "",
        *_wrapped(
            "One section for every group of keys. On the command line the key of a nested group stands behind that of "
            "the group: `train.epochs`. Where a group has several types, its key `type` says which one is meant."
        ),
        "",
    ]
    for cls in classes:
        lines += _settings_of(cls, users.get(cls, []))
    return NOTICE + "\n".join(lines)


def _settings_of(cls: type[BaseModel], users: list[str]) -> Iterator[str]:
    yield f"## {cls.__name__}"
    yield ""
    yield from _wrapped(cls.__doc__ or "")
    if users:
        yield ""
        yield from _wrapped(f"Settings of {', '.join(f'`{name}`' for name in users)}.")
    yield ""
    yield "| key | type and default | meaning |"
    yield "|---|---|---|"
    for name, field in cls.model_fields.items():
        yield f"| `{name}` | {_type_cell(field)} | {_cell(_meaning(name, field))} |"
    yield ""
    renamed = cast(Mapping[str, str], getattr(cls, "renamed", {}))
    values = cast(Mapping[str, Mapping[str, str]], getattr(cls, "renamed_values", {}))
    old = [f"`{old}` is `{new}`" for old, new in renamed.items()]
    old += [f"`{key}={old}` is `{key}={new}`" for key, names in values.items() for old, new in names.items()]
    if old:
        yield from _wrapped(f"Old names: {', '.join(old)}.")
        yield ""


def _type_cell(field: FieldInfo) -> str:
    """Type and default of a key; groups of keys are links to their sections."""
    value, kind = default_of(field), type_name(field)
    held = [*classes_of(field.annotation), *classes_of(element_of(field.annotation))]
    shown = "" if held and isinstance(value, BaseModel) else default_text(value)
    if not held:
        return _code(kind + shown)
    links = ", ".join(f"[{each.__name__}](#{each.__name__.lower()})" for each in held)
    is_one_group = kind == held[0].__name__
    return links + f" {_code(shown)}" * bool(shown) if is_one_group else f"{_code(kind + shown)}: {links}"


def _meaning(name: str, field: FieldInfo) -> str:
    """The docstring of a key, else that of the only group that it holds."""
    held = [*classes_of(field.annotation), *classes_of(element_of(field.annotation))]
    if field.description is None and not held and name == "type":
        return "Says that the group is of this type."
    return _text(field.description or (held[0].__doc__ if held else "") or "")


def _with_parts(cls: type[BaseModel]) -> Iterator[type[BaseModel]]:
    """A configuration class, and those of its keys, depth first."""
    yield cls
    for field in cls.model_fields.values():
        for annotation in (field.annotation, element_of(field.annotation)):
            for part in classes_of(annotation):
                yield from _with_parts(part)


def _metrics_page() -> str:
    lines = [
        "# Metrics",
        "",
        *_wrapped(
            "What the replicas publish, at `/metrics` of every gateway and at Ray's own exporters. Ray adds the tags "
            "`application`, `deployment` and `replica`."
        ),
        "",
        "| name | kind | tags | meaning |",
        "|---|---|---|---|",
    ]
    for series in ALL.values():
        tags = ", ".join(f"`{tag}`" for tag in series.tags)
        lines.append(f"| `{series.exported}` | {series.kind} | {tags} | {_cell(series.meaning)} |")
    return NOTICE + "\n".join([*lines, ""])


def _http_page() -> str:
    lines = [
        "# HTTP interface",
        "",
        "OpenAI's chat completions and completions. `GET /openapi.json` of a running endpoint is the exact schema.",
        "",
        "| route | what it does |",
        "|---|---|",
        "| `POST /v1/chat/completions` | answer a chat, streamed on demand |",
        "| `POST /v1/completions` | continue a text |",
        "| `GET /v1/models`, `GET /v1/models/{model}` | the model, its context and its drafters |",
        "| `GET /v1/edge` as a WebSocket | devices that run the drafter ([edge](../guide/edge.md)) |",
        "| `GET /v1/edge/sessions` | the latest sessions of devices with the same key |",
        "| `GET /health` | 200 while there are target replicas, else 503 |",
        "| `GET /metrics` | the [metrics](metrics.md), for Prometheus |",
        "| `GET /` | the chat page |",
        "",
        *_wrapped(
            'Errors have the form of OpenAI, `{"error": {"message", "type", "param", "code"}}`: 400 for a wrong field, '
            "401 for a missing key, 404 for an unknown model or route, 413 for a body that is too long, 429 over the "
            "rate limit or at capacity (with `Retry-After`), 500 and 503 where the service fails or is not ready."
        ),
        "",
    ]
    for cls, route in ((ChatRequest, "/v1/chat/completions"), (CompletionRequest, "/v1/completions")):
        lines += [f"## Body of `{route}`", "", "| field | type and default | meaning |", "|---|---|---|"]
        for name, field in cls.model_fields.items():
            kind = _code(_plain_type(type_name(field)) + default_text(default_of(field)))
            lines.append(f"| `{name}` | {kind} | {_cell(_text(field.description or ''))} |")
        ignored, refused = (", ".join(f"`{name}`" for name in sorted(names)) for names in (cls.ignored, cls.neutral))
        lines += ["", *_wrapped(f"Accepted and without effect: {ignored}."), ""]
        lines += [*_wrapped(f"Refused, but for values that ask for nothing: {refused}."), ""]
    return NOTICE + "\n".join(lines)


def _cache_page() -> str:
    layout = (schema.__doc__ or "").strip()
    purpose, _, rest = layout.partition("\n\n")
    lines = ["# Format of the activation cache", "", purpose.removesuffix(" Torch-free."), ""]
    for paragraph in rest.split("\n\n"):
        block = paragraph.startswith("    ")
        lines += ["```", textwrap.dedent(paragraph), "```", ""] if block else [*_wrapped(paragraph), ""]
    lines += ["## Codecs", "", "| codec | bits an element | bytes of a token of width 4,096 |", "|---|---|---|"]
    for name, bits in schema.BITS.items():
        lines.append(f"| `{name}` | {bits} | {schema.codec_bytes(name, 4096):,} |")
    lines += [
        "",
        "## The commit marker of a shard",
        "",
        (ShardInfo.__doc__ or "").strip(),
        "",
        "| key | type |",
        "|---|---|",
    ]
    lines += [f"| `{field.name}` | `{getattr(field.type, '__name__', field.type)}` |" for field in fields(ShardInfo)]
    lines += [
        "",
        f"Every JSON file has a `seal`, a hash of its other keys. The format's version is {schema.FORMAT}.",
        "",
    ]
    return NOTICE + "\n".join(lines)


def _text(text: str) -> str:
    """A docstring as one paragraph."""
    return " ".join(text.split())


def _wrapped(text: str) -> list[str]:
    """A paragraph as lines of Markdown."""
    return textwrap.wrap(_text(text), 120, break_long_words=False, break_on_hyphens=False)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _code(text: str) -> str:
    return f"`{_cell(text.strip())}`" if text.strip() else ""


def _plain_type(name: str) -> str:
    return re.sub(r"Annotated\[|, FieldInfo.*?\]", "", name)


def main() -> None:
    """Write the pages and say which have changed."""
    folder = HERE / "reference"
    folder.mkdir(exist_ok=True)
    for name, text in pages().items():
        path = folder / name
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            print(f"wrote {path.relative_to(HERE.parent)}", file=sys.stderr)


if __name__ == "__main__":
    main()
