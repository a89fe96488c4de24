"""Settings: frozen dataclasses with annotated value ranges, checked by msgspec. Pure."""

from __future__ import annotations

import dataclasses
import difflib
import sys
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from functools import cache, partial
from typing import Annotated, Any, ClassVar, Literal, Self, get_args, get_origin, get_type_hints

import msgspec
import numpy as np
from msgspec import Meta

from trajstore._core.base.arguments import INT64_MAX, LONGEST, one_of, truth
from trajstore._core.columns.limits import shown
from trajstore.errors import ConfigurationError

Count = Annotated[int, Meta(ge=1, le=INT64_MAX)]
Whole = Annotated[int, Meta(ge=0, le=INT64_MAX)]
Share = Annotated[float, Meta(ge=0, le=1)]
Seconds = Annotated[float, Meta(ge=0, le=LONGEST)]
Finite = Annotated[float, Meta(ge=-sys.float_info.max, le=sys.float_info.max)]
Number = Annotated[float, Meta(ge=-sys.float_info.max)]
"""A float, infinity included."""
NotNegative = Annotated[float, Meta(ge=0, le=sys.float_info.max)]
Positive = Annotated[float, Meta(gt=0, le=sys.float_info.max)]
Text = Annotated[str, Meta(min_length=1)]

Check = Callable[[str, Any], Any]
"""Takes the name and value of a key; returns the converted value, or raises ConfigurationError."""


class Settings:
    """Base of frozen dataclasses whose fields are the keys of a section of a configuration.

    The annotation of a key defines its values, with ranges as msgspec's ``Meta``. ``Annotated`` with a :data:`Check`
    is for conditions beyond msgspec. Numpy's numbers are accepted, and floats without a fraction for whole numbers
    (YAML's ``1e6``).

    Raises:
        ConfigurationError: values out of range; the message lists all of them, each by its key.
    """

    section: ClassVar[str] = ""
    """Name of the section in a configuration; begins the messages."""

    def __post_init__(self) -> None:
        values = dict(vars(self))
        problems = settle(type(self), values)
        for key, value in values.items():
            object.__setattr__(self, key, value)
        refuse(self.section, problems or [*self.contradictions()])

    def contradictions(self) -> Iterable[str]:
        """Yield a sentence for each pair of valid keys that exclude each other."""
        return ()

    @classmethod
    def from_node(cls, node: Any) -> Self:
        """Return the settings of a section; absent keys have their defaults.

        Raises:
            ConfigurationError: unknown keys, values out of range; the message lists all of them.
        """
        values = keys_of(node, cls.section)
        problems = unknown(values, names_of(cls))
        known = {key: value for key, value in values.items() if key in names_of(cls)}
        refuse(cls.section, problems + settle(cls, known))
        return cls(**known)


def names_of(kind: type[Settings]) -> list[str]:
    """Return the keys of settings."""
    return [field.name for field in dataclasses.fields(kind)]  # type: ignore[arg-type]  # subclasses are dataclasses


def settle(kind: type[Settings], values: MutableMapping[str, Any], said: Mapping[str, str] | None = None) -> list[str]:
    """Convert values in place (1000 for ``1e3``); return a sentence for each invalid one.

    Args:
        kind: the settings class. Absent keys are fine.
        values: by key; changed in place.
        said: the keys' original names, where they differ.
    """
    problems = []
    for key, check in _checks(kind).items():  # type: ignore[arg-type]  # mypy asks an instance for its hash
        if key in values:
            try:
                values[key] = check((said or {}).get(key, key), values[key])
            except ConfigurationError as error:
                problems.append(str(error))
    return problems


def refuse(section: str, problems: Sequence[str]) -> None:
    """Raise one error for all problems, if there are any.

    Raises:
        ConfigurationError: there are problems.
    """
    if problems:
        raise ConfigurationError(f"{section}: {'; '.join(problems)}" if section else "; ".join(problems))


def unknown(given: Iterable[str], known: Sequence[str]) -> list[str]:
    """Return a sentence for each unknown key, with the nearest known one."""
    problems = []
    for key in given:
        if key not in known:
            nearest = difflib.get_close_matches(key, known, 1)
            meant = f"; did you mean {nearest[0]}?" if nearest else "."
            problems.append(f"{key}: unknown key{meant} Known are {', '.join(sorted(known))}")
    return problems


def keys_of(node: Any, name: str) -> dict[str, Any]:
    """Return a section as a dict, with plain dicts and lists in place of similar types (OmegaConf's); None is empty.

    Raises:
        ConfigurationError: it is not a mapping.
    """
    if node is not None and not hasattr(node, "keys"):
        raise ConfigurationError(f"{name}: must be a mapping of keys, is a {type(node).__name__}")
    found: dict[str, Any] = {} if node is None else _plain(node)
    return found


def _plain(value: Any) -> Any:
    if hasattr(value, "keys"):
        return {str(key): _plain(value[key]) for key in value.keys()}  # noqa: SIM118 - may not be a dict
    return [_plain(item) for item in value] if isinstance(value, Sequence) and not isinstance(value, str) else value


@cache
def _checks(kind: type[Settings]) -> Mapping[str, Check]:
    hints = get_type_hints(kind, include_extras=True)
    return {name: _check_of(hints[name]) for name in names_of(kind)}


def _check_of(hint: Any) -> Check:
    if hint is bool:
        return truth
    if get_origin(hint) is Literal:
        return partial(one_of, known=get_args(hint))
    if get_origin(hint) is Annotated and callable(hint.__metadata__[0]):
        check: Check = hint.__metadata__[0]
        return check
    return partial(converted, hint=hint)


def converted(name: str, value: Any, hint: Any) -> Any:
    """Convert a value according to an annotation.

    Raises:
        ConfigurationError: it is of another type, or out of range.
    """
    value = value.item() if isinstance(value, np.generic) else value
    try:
        return msgspec.convert(value, hint)
    except UnicodeEncodeError:
        raise ConfigurationError(f"{name}: {shown(value)}, has a character that no text can have") from None
    except msgspec.ValidationError as error:
        if isinstance(value, float) and value.is_integer():
            return converted(name, int(value), hint)
        wanted, _, where = str(error).removeprefix("Expected ").partition(" - at `$")
        raise ConfigurationError(f"{name}{where.removesuffix('`')}: {shown(value)}, must be {wanted}") from None
