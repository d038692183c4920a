"""Configuration keys that have a new name: the old one works for one release, with a one-line notice.

A class lists its old names in `Config.renamed`. Keys are renamed in every source (a YAML file, an override, a record
that an earlier version wrote) before sources are merged, so that an override by the new name wins over a file that
uses the old one. This module imports neither torch nor ray.
"""

import sys
from functools import cache
from typing import Any

from pydantic import BaseModel

from moray.errors import ConfigError
from moray.explain import classes_of, element_of, variant_of

REMOVED_IN = "0.3"
"""Version that no longer knows the old names."""


def with_current_names(config_class: type[BaseModel], values: dict[str, Any], *, notice: bool = True) -> dict[str, Any]:
    """A copy of nested settings in which every old key and value has its new name.

    Args:
        config_class: what the settings are for.
        values: as read, with unknown keys and wrong values left as they are.
        notice: whether to say on stderr, once per key, what the new name is.

    Raises:
        ConfigError: a mapping holds a key under both its names, or itself.
    """
    try:
        return _renamed(config_class, values, "", notice)
    except RecursionError:
        raise ConfigError("the configuration refers to itself: remove the YAML alias that closes the circle") from None


def _renamed(annotation: Any, value: Any, path: str, notice: bool) -> Any:
    if isinstance(value, list):
        return [_renamed(element_of(annotation), item, path, notice) for item in value]
    if not isinstance(value, dict):
        return value
    classes = _classes(annotation, value)
    if not classes:
        return {key: _renamed(element_of(annotation), item, f"{path}{key}.", notice) for key, item in value.items()}
    renamed: dict[str, Any] = {}
    for key, item in value.items():
        name = _current_name(classes, key)
        if name != key and name in value:
            raise ConfigError(f"'{path}{key}' is the old name of '{path}{name}', and both are given: leave out '{key}'")
        if name in renamed:
            raise ConfigError(f"'{path}{name}' is given twice, the second time as '{path}{key}': leave one out")
        field = next((cls.model_fields[name] for cls in classes if name in cls.model_fields), None)
        inner = _renamed(field.annotation if field is not None else None, item, f"{path}{name}.", notice)
        renamed[name] = _current_value(classes, name, inner)
        if notice and name != key:
            _say(f"'{path}{key}' is now '{path}{name}'")
        if notice and renamed[name] is not inner:
            _say(f"{path}{name}={inner} is now {path}{name}={renamed[name]}")
    return renamed


def _classes(annotation: Any, value: dict[str, Any]) -> list[type[BaseModel]]:
    """The classes that a mapping may be for: of a union all, where the mapping does not say which."""
    variant = variant_of(annotation, value.get("type"))
    return [variant] if variant is not None else classes_of(annotation)


def _current_name(classes: list[type[BaseModel]], key: str) -> str:
    if any(key in cls.model_fields for cls in classes):
        return key
    return next((names[key] for cls in classes if key in (names := getattr(cls, "renamed", {}))), key)


def _current_value(classes: list[type[BaseModel]], name: str, value: Any) -> Any:
    for cls in classes:
        renamed = getattr(cls, "renamed_values", {}).get(name, {})
        if isinstance(value, str) and value in renamed:
            return renamed[value]
    return value


@cache
def _say(text: str) -> None:
    """Print a notice, once per process."""
    print(f"note: {text}; the old name works until version {REMOVED_IN}", file=sys.stderr)
