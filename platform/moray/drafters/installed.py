"""Drafters of other packages: configuration classes that installed packages register in the group `moray.drafters`.

    [project.entry-points."moray.drafters"]
    recurrent = "recurrent_drafter.config:RecurrentConfig"

`docs/developer/add-a-drafter.md` builds one.
"""

import logging
from collections.abc import Collection
from importlib.metadata import EntryPoint, entry_points
from typing import get_args

from moray.drafters.config_base import DrafterConfigBase, ReadyBase, TrainableBase
from moray.explain import one_line

GROUP = "moray.drafters"
_LOGGER = logging.getLogger("moray")


def installed_drafters(taken: Collection[str]) -> list[type[DrafterConfigBase]]:
    """The configuration classes that packages register in the group. An unusable one is skipped with a warning, because
    commands that do not need it must still work. `taken` are the types that Moray itself has."""
    found: dict[str, type[DrafterConfigBase]] = {}
    for entry in sorted(entry_points(group=GROUP), key=lambda one: one.name):
        try:
            problem, loaded = f"there is a drafter type '{entry.name}' already: rename it", None
            if entry.name not in {*taken, *found}:
                problem, loaded = _check(entry, entry.load())
        except Exception as error:  # noqa: BLE001 - importing another package can raise anything
            problem, loaded = f"{type(error).__name__}: {one_line(str(error))}", None
        if loaded is None:
            package = "an unknown package" if entry.dist is None else f"package '{entry.dist.name}'"
            _LOGGER.warning("drafter type '%s' of %s is left out: %s", entry.name, package, problem)
        else:
            found[entry.name] = loaded
    return list(found.values())


def _check(entry: EntryPoint, loaded: object) -> tuple[str, type[DrafterConfigBase] | None]:
    """Check an entry: what is wrong with it, or the class that it names."""
    if not (isinstance(loaded, type) and issubclass(loaded, TrainableBase | ReadyBase)):
        return f"'{entry.value}' is no subclass of TrainableBase or ReadyBase of moray.drafters.config_base", None
    field = loaded.model_fields.get("type")
    names = () if field is None else get_args(field.annotation)
    if names != (entry.name,):
        return f'{loaded.__name__} needs the field `type: Literal["{entry.name}"]`, like the entry\'s name', None
    return "", loaded
