"""Words for configuration classes: what is wrong with given values, and which keys there are.

Errors name the key as a user writes it, the value, what is accepted and the nearest valid name; `--help`
lists every key with its type, its default and what it means. This module refuses to know where the values came from.
"""

import collections.abc
import difflib
import json
import re
import textwrap
import types
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import annotated_types
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, PydanticUndefined

_MAX_PROBLEMS = 5
"""Maximum number of problems spelled out in one error."""
_CONTAINERS = (tuple, list, set, frozenset, dict, collections.abc.Sequence, collections.abc.Mapping)


class HelpRow(NamedTuple):
    """One key, as `--help` lists it."""

    key: str
    """Dotted; `a[].b` is the key `b` of every item of `a`."""
    value: str
    """Type and default, and the variants of a union that have the key if not all do."""
    description: str
    """First sentence of the field's docstring, else of the docstring of the class that it holds; empty without one."""


def explain(config_class: type[BaseModel], error: ValidationError) -> str:
    """Word the problems on one line, one per key, unknown keys first; those past `_MAX_PROBLEMS` are counted."""
    found = error.errors(include_url=False)
    # A list of which an item is refused is also told to be too short without it.
    parents = {problem["loc"][:end] for problem in found for end in range(len(problem["loc"]))}
    found = [p for p in found if p["type"] != "too_short" or p["loc"] not in parents]
    # Of a union of a text and mappings, a mapping was meant for the mappings.
    problems = [p for p in found if p["type"] != "string_type" or not isinstance(p["input"], dict)] or found
    problems.sort(key=lambda problem: problem["type"] != "extra_forbidden")
    by_key: dict[str, ErrorDetails] = {}
    for problem in problems:
        by_key.setdefault(_locate(config_class, problem["loc"])[0], problem)
    # A plain union fails once per member; the member that was meant is refused for one of its items.
    by_key = {key: problem for key, problem in by_key.items() if not any(k.startswith(f"{key}.") for k in by_key)}
    words: list[str] = []
    for key, problem in by_key.items():
        # A misspelt required key is both unknown and missing; the unknown one shows what to fix.
        if problem["type"] != "missing" or not any(f"did you mean '{key}'" in word for word in words):
            words.append(_without_repetition(one_line(_explain_one(config_class, problem)), words))
    left = len(words) - _MAX_PROBLEMS
    if left > 0:
        words[_MAX_PROBLEMS:] = [f"{left} more problem{'s' if left > 1 else ''}"]
    return words[0] if len(words) == 1 else " Also: ".join(w if w.endswith("?") else f"{w}." for w in words)


def describe(config_class: type[BaseModel], width: int | None = None) -> str:
    """List every dotted key with its type, its default and what it means, for `--help`.

    Args:
        config_class: whose keys.
        width: characters of a line, longer ones are wrapped; None leaves every key on one line, for `grep`.
    """
    lines = [f"  {key}: {value}" + f"  # {text}" * bool(text) for key, value, text in help_rows(config_class)]
    if width is not None:
        shape = {"width": width, "subsequent_indent": " " * 6, "break_long_words": False, "break_on_hyphens": False}
        lines = [textwrap.fill(line, **shape) for line in lines]
    return "\n".join(["keys:", *lines])


def nearest_path(path: Path) -> str:
    """Suggest a YAML file or folder that lies beside the first part of a path that does not exist."""
    while not path.parent.is_dir():
        path = path.parent
    siblings = {other.stem: str(other) for other in sorted(path.parent.iterdir()) if _is_config_path(other)}
    match = difflib.get_close_matches(path.stem, siblings, n=1)
    return f"; did you mean '{siblings[match[0]]}'?" if match else ""


def one_line(text: str) -> str:
    """Join the lines of a text with single spaces."""
    return " ".join(line.strip() for line in text.splitlines())


def default_of(field: FieldInfo) -> Any:
    """The declared default of a field, or `PydanticUndefined` for a required one."""
    return PydanticUndefined if field.is_required() else field.get_default(call_default_factory=True)


def variant_of(annotation: Any, tag: Any) -> type[BaseModel] | None:
    """The configuration class that an annotation means: the only one, or the union's member of that `type`."""
    classes = classes_of(annotation)
    if len(classes) == 1:
        return classes[0]
    return next((cls for cls in classes if tag is not None and tag in _tags_of(cls)), None)


def element_of(annotation: Any) -> Any:
    """What a container holds (the values of a mapping), or None for anything that is no container."""
    for member in _members(annotation):
        if typing.get_origin(member) in _CONTAINERS:
            arguments = typing.get_args(member)
            return arguments[1] if len(arguments) == 2 and arguments[1] is not Ellipsis else arguments[0]
    return None


def _is_sequence(annotation: Any) -> bool:
    """Whether its items are numbered: it is, or one of its members is, a container that is no mapping."""
    origins = [typing.get_origin(member) for member in _members(annotation)]
    containers = [origin for origin in origins if origin in _CONTAINERS]
    return bool(containers) and not any(issubclass(origin, collections.abc.Mapping) for origin in containers)


def classes_of(annotation: Any) -> list[type[BaseModel]]:
    """The configuration classes among the alternatives of an annotation, those in containers not counted."""
    return [member for member in _members(annotation) if isinstance(member, type) and issubclass(member, BaseModel)]


def description_of(field: FieldInfo) -> str:
    """What a key means: the first sentence of its docstring, else of that of the only class that it holds."""
    classes = classes_of(field.annotation)
    text = field.description or (classes[0].__doc__ if len(classes) == 1 else None) or ""
    paragraph = one_line(text.strip().partition("\n\n")[0])
    return re.split(r"(?<=\.)\s", paragraph)[0].removesuffix(".")


def _without_repetition(word: str, before: list[str]) -> str:
    """A problem without the list of accepted keys, if an earlier one has it already."""
    problem, mark, accepted = word.partition("; ")
    return problem if mark and any(other.endswith(f"; {accepted}") for other in before) else word


def _explain_one(config_class: type[BaseModel], problem: ErrorDetails) -> str:
    key, owner, annotation = _locate(config_class, problem["loc"])
    kind, context = problem["type"], problem.get("ctx", {})
    received = json.dumps(problem["input"], default=str, ensure_ascii=False)
    received = received if len(received) <= 80 else received[:77] + "..."
    tags = [tag for cls in classes_of(annotation) for tag in _tags_of(cls)]
    match kind:
        case "extra_forbidden":
            return f"unknown key '{key}'{_nearest_key(config_class, owner, key)}"
        case "missing" if isinstance(problem["loc"][-1], int):
            return f"'{key.rpartition('.')[0]}' is {received}: it needs more items"
        case "missing":
            return f"'{key}' is missing: give it in a YAML file or as {key}=VALUE"
        case "union_tag_not_found":
            return f"'{key}.type' is missing: accepted are {', '.join(tags)}"
        case "union_tag_invalid":
            tag = str(context["tag"])
            return f"'{key}.type' is \"{tag}\": accepted are {', '.join(tags)}{did_you_mean(tag, tags)}"
        case "value_error":
            return f"'{key}': {context['error']}" if key else str(context["error"])
        case "model_type" | "model_attributes_type" | "dict_type":
            return f"'{key}' is {received}: a mapping of keys is needed, such as {key}.NAME=VALUE"
        case "literal_error":
            accepted = re.findall(r"'([^']*)'", str(context["expected"]))
            nearest = did_you_mean(str(problem["input"]), accepted)
            return f"'{key}' is {received}: accepted are {context['expected']}{nearest}"
        case _ if kind.endswith("_type") and len(list(_members(annotation))) > 1:
            return f"'{key}' is {received}: accepted are {_annotation_name(annotation)}"
        case _:
            return f"'{key}' is {received}: {problem['msg'][:1].lower()}{problem['msg'][1:]}"


def _locate(config_class: type[BaseModel], location: Sequence[int | str]) -> tuple[str, type[BaseModel], Any]:
    """The dotted key as a user writes it, the class it was looked up in, and its annotation.

    Pydantic puts the tag of a union's variant, and the member of a plain union, into the location.
    """
    names: list[str] = []
    annotation: Any = config_class
    owner = config_class
    for part in location:
        if str(part).startswith("tagged-union["):  # a union inside of a plain one has a name of its own
            continue
        variant = variant_of(annotation, part)
        if variant is not None and len(classes_of(annotation)) > 1:
            annotation = variant
            continue
        if variant is None and element_of(annotation) is None:
            break
        if variant is None and isinstance(part, str) and _is_sequence(annotation):  # a member of a plain union
            continue
        names.append(str(part))
        owner = variant or owner
        field = variant.model_fields.get(str(part)) if variant is not None else None
        annotation = field.annotation if field is not None else element_of(annotation)
    return ".".join(names), owner, annotation


def _nearest_key(config_class: type[BaseModel], owner: type[BaseModel], key: str) -> str:
    """Suggest a key of the same mapping, else one of any other; failing both, list what the mapping takes."""
    prefix, _, leaf = key.rpartition(".")
    match = difflib.get_close_matches(leaf, owner.model_fields, n=1)
    if match:
        return f"; did you mean '{prefix + '.' * bool(prefix) + match[0]}'?"
    rows = help_rows(config_class)
    takes = f"; '{prefix}' takes {_listing(owner)}" if prefix else f"; accepted are {_listing(owner)}"
    tags = re.search(r"\[([^\]]*)\]$", {row.key: row.value for row in rows}.get(key, ""))
    if tags:  # a key of another variant of the union
        return f"; only type {tags[1]} takes it{takes}"
    names = {name.rpartition(".")[2]: name for name, _, _ in reversed(rows) if "[" not in name}
    match = difflib.get_close_matches(leaf, names, n=1, cutoff=0.8)
    return f"; did you mean '{names[match[0]]}'?" if match else takes


def _listing(config_class: type[BaseModel]) -> str:
    return ", ".join(config_class.model_fields) or "no keys"


def did_you_mean(name: str, candidates: Sequence[str]) -> str:
    """Suggest the candidate that a misspelt name is nearest to."""
    match = difflib.get_close_matches(name, candidates, n=1)
    return f"; did you mean '{match[0]}'?" if match else ""


def _is_config_path(path: Path) -> bool:
    return path.suffix in (".yaml", ".yml") or path.is_dir()


def _members(annotation: Any) -> Iterator[Any]:
    """The alternatives of a union, looking through `Annotated` and leaving None out."""
    origin = typing.get_origin(annotation)
    if origin is typing.Annotated:
        yield from _members(typing.get_args(annotation)[0])
    elif origin in (typing.Union, types.UnionType):
        for argument in typing.get_args(annotation):
            yield from _members(argument)
    elif annotation not in (None, type(None)):
        yield annotation


def _tags_of(config_class: type[BaseModel]) -> tuple[str, ...]:
    field = config_class.model_fields.get("type")
    return typing.get_args(field.annotation) if field is not None else ()


def help_rows(config_class: type[BaseModel], prefix: str = "", default: Any = PydanticUndefined) -> list[HelpRow]:
    """Every dotted key of a configuration class.

    Args:
        config_class: whose keys.
        prefix: what stands before each key.
        default: the instance that the outer class declares; its values are shown in place of the class's own defaults.
    """
    rows: list[HelpRow] = []
    for name, field in config_class.model_fields.items():
        declared = getattr(default, name) if isinstance(default, BaseModel) else default_of(field)
        key = prefix + name
        classes = classes_of(field.annotation)
        if len(classes) > 1:
            shown = getattr(declared, "type", declared)
            rows.append(HelpRow(f"{key}.type", type_name(field) + default_text(shown), description_of(field)))
        elif not classes or not isinstance(declared, BaseModel):
            rows.append(HelpRow(key, type_name(field) + default_text(declared), description_of(field)))
        if not classes:
            classes = classes_of(element_of(field.annotation))
            key += "[]"
        rows += _variant_rows(classes, f"{key}.", declared)
    return rows


def _variant_rows(classes: list[type[BaseModel]], prefix: str, default: Any) -> list[HelpRow]:
    """The keys below a field; of a union, each key says which variants have it."""
    tags_by_row: dict[HelpRow, list[str]] = {}
    for cls in classes:
        for row in help_rows(cls, prefix, default if isinstance(default, cls) else PydanticUndefined):
            if len(classes) == 1 or row.key != f"{prefix}type":
                tags_by_row.setdefault(row, []).append("|".join(_tags_of(cls)))
    return [
        row if len(tags) == len(classes) else row._replace(value=f"{row.value}  [{', '.join(tags)}]")
        for row, tags in tags_by_row.items()
    ]


def default_text(value: Any) -> str:
    if value is PydanticUndefined:
        return " (required)"
    plain = json.dumps(value, default=lambda v: v.model_dump(mode="json") if isinstance(v, BaseModel) else str(v))
    return f" = {plain}"


def type_name(field: FieldInfo) -> str:
    """A type as YAML shows it, with the limits of its value."""
    limits = ((annotated_types.Ge, ">=", "ge"), (annotated_types.Gt, ">", "gt"))
    limits += ((annotated_types.Le, "<=", "le"), (annotated_types.Lt, "<", "lt"))
    pairs = [(item, limit) for item in field.metadata for limit in limits if isinstance(item, limit[0])]
    return _annotation_name(field.annotation) + ",".join(
        f" {sign} {getattr(item, name)}" for item, (_, sign, name) in pairs
    )


def _annotation_name(annotation: Any) -> str:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation in (None, type(None)):
        return "null"
    if origin is typing.Annotated:
        return _annotation_name(arguments[0])
    if origin is typing.Literal:
        return " | ".join(str(argument) for argument in arguments)
    if origin in (typing.Union, types.UnionType):
        return " | ".join(_annotation_name(argument) for argument in arguments)
    if origin in (dict, collections.abc.Mapping):
        return f"{{{_annotation_name(arguments[0])}: {_annotation_name(arguments[1])}}}"
    if origin in _CONTAINERS:
        return f"[{', '.join('...' if argument is Ellipsis else _annotation_name(argument) for argument in arguments)}]"
    if isinstance(annotation, type):
        tags = _tags_of(annotation) if issubclass(annotation, BaseModel) else ()
        return "path" if issubclass(annotation, Path) else " | ".join(tags) or annotation.__name__
    return str(annotation).replace("typing.", "")
