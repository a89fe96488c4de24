"""Arguments as their annotations say: a decorator of functions, and of classes with public methods. Pure."""

from __future__ import annotations

import functools
import inspect
import typing
from collections import abc
from collections.abc import Callable
from types import FunctionType, NoneType, SimpleNamespace, UnionType
from typing import Annotated, Any, Literal, TypeAlias, TypeVar, Union, cast, get_args, get_origin, get_type_hints

import numpy as np
import torch

from trajstore.arguments import is_number
from trajstore.columns.limits import shown
from trajstore.errors import ConfigurationError, InvalidTrajectoryError
from trajstore.trajectory import RESPONSE_COLUMNS, TOKEN_COLUMNS, AgentTrajectory, Reward

Checked = TypeVar("Checked", bound=Callable[..., Any])

_LATER = "its other fields are looked at later"

Offered: TypeAlias = Annotated[AgentTrajectory, _LATER]
"""A rollout among others, to be refused by itself where a field is wrong. :func:`checked` looks only at what says whose
rollout it is and what it came to: texts, metadata and reward."""

_Found = tuple[str, Any, str]
"""Where in an argument something else stands, what it is, and what must be there."""

_Check = Callable[[Any], _Found | None]


def checked(target: Checked) -> Checked:
    """Decorate a function, or a class whose public methods and constructor are meant: arguments must be as annotated.

    What is compared is the kind of an argument, and of the items of lists, tuples and dicts; not what the annotation
    cannot say (a range, a shape). Numpy's numbers pass for numbers, true and false do not. Types and protocols that
    cannot be told at run time are not compared.

    The decorated raise :class:`~trajstore.errors.ConfigurationError`, which names argument, value and remedy; or
    :class:`~trajstore.errors.InvalidTrajectoryError` of a rollout with a field of another kind than it should be.
    """
    if not isinstance(target, type):
        return cast("Checked", _checked_function(target))
    for name, member in list(vars(target).items()):
        if name.startswith("_") and name not in ("__init__", "__call__"):
            continue
        if isinstance(member, staticmethod | classmethod):
            setattr(target, name, type(member)(_checked_function(member.__func__)))
        elif isinstance(member, FunctionType):
            setattr(target, name, _checked_function(member))
    return target


def _checked_function(function: Callable[..., Any]) -> Callable[..., Any]:
    positional = [
        parameter.name
        for parameter in inspect.signature(function).parameters.values()
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    checks: dict[str, _Check] = {}
    made = False

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal made
        if not made:  # not when the class is made: annotations may name what is defined later
            checks.update(_checks_of(function))
            made = True
        for name, value in (*zip(positional, args, strict=False), *kwargs.items()):
            check = checks.get(name)
            if check is not None and (found := check(value)) is not None:
                where, what, wanted = found
                kind = "" if what is None or wanted.startswith(_ONE_OF) else f" is a {type(what).__name__}"
                error = InvalidTrajectoryError if _FIELD in where else ConfigurationError
                raise error(f"{name}{where}: {shown(what)}{kind}, must be {wanted}")
        return function(*args, **kwargs)

    return call


def _checks_of(function: Callable[..., Any]) -> dict[str, _Check]:
    """Return what compares each argument of a function."""
    checks = {}
    plain: Any = inspect.unwrap(function)  # other decorators have names of their own modules
    for name, text in plain.__annotations__.items():
        try:
            holder = SimpleNamespace(__annotations__={name: text})
            hint = get_type_hints(holder, globalns=plain.__globals__, include_extras=True)[name]
        except NameError:  # of a package that is imported for the annotation alone
            continue
        check = None if name == "return" else _check_of(hint)
        if check is not None:
            checks[name] = check
    return checks


def _check_of(hint: Any) -> _Check | None:
    """Return what compares a value with an annotation; None if everything passes."""
    origin, arguments = get_origin(hint), get_args(hint)
    if hint in (Any, object) or isinstance(hint, TypeVar):
        return None
    if hint is None or hint is NoneType:
        return _kind(lambda value: value is None, "None")
    if origin in (Union, UnionType):
        return _check_of_union(arguments)
    if origin is Literal:
        return _kind(lambda value: any(value is one or value == one for one in arguments), _one_of(arguments))
    if hint in _SCALARS:
        return _kind(*_SCALARS[hint])
    if origin is Annotated:
        return _wrong_in_offered if _LATER in arguments else _check_of(arguments[0])
    return _check_of_class(origin or hint, arguments)


def _check_of_class(kind: Any, arguments: tuple[Any, ...]) -> _Check | None:
    if kind in (abc.Callable, typing.Callable):
        return _kind(callable, "a function")
    if not isinstance(kind, type):
        return None  # a protocol's or the typing module's own
    if typing.is_typeddict(kind) or issubclass(kind, abc.Mapping):
        return _items(_is_mapping, "a mapping", *(arguments or (Any, Any)))
    if issubclass(kind, tuple) and arguments:
        return _check_of_tuple(arguments)
    if issubclass(kind, list):
        return _items(lambda value: isinstance(value, list), "a list", int, *(arguments or (Any,)))
    if kind in (abc.Sequence, abc.Collection, abc.Iterable, abc.Iterator):
        return _items(_HOLDS[kind], "a list or the like", int, *(arguments or (Any,)))
    if getattr(kind, "_is_protocol", False):
        if not getattr(kind, "_is_runtime_protocol", False):
            return _kind(callable, f"a {kind.__name__}") if "__call__" in vars(kind) else None
        names = ", ".join(sorted(name for name in vars(kind) if not name.startswith("_")))
        return _kind(lambda value: isinstance(value, kind), f"a {kind.__name__} (with {names})")
    if kind is AgentTrajectory:
        return _wrong_in_rollout
    article = "an" if kind.__name__[0] in "AEIOU" else "a"
    return _kind(lambda value: isinstance(value, kind), f"{article} {kind.__name__}")


_FIELD, _ONE_OF = "field ", "one of "

_TENSORS = (*TOKEN_COLUMNS, *RESPONSE_COLUMNS)

_TOLD: tuple[tuple[str, tuple[type, ...], str], ...] = (
    *((name, (str,), "a text") for name in ("task_id", "data_id", "rollout_id", "query", "tokenizer_fingerprint")),
    ("metadata", (dict,), "a dict"),
    ("reward", (NoneType, Reward), "a Reward or None"),
)
"""What says whose rollout it is, and what it came to."""

_FIELDS: tuple[tuple[str, tuple[type, ...], str], ...] = (
    *((name, (NoneType, torch.Tensor), "a tensor of one dimension, or None") for name in _TENSORS),
    *((name, (NoneType, int, np.integer), "a whole number or None") for name in ("response_start", "policy_version")),
    ("entropy", (NoneType, int, float, np.number), "a number or None"),
    ("is_terminated", (NoneType, bool, np.bool_), "true, false or None"),
    ("messages", (list,), "a list of dicts"),
)

_OF_REWARD: tuple[tuple[str, tuple[type, ...], str], ...] = (
    ("outcome", (NoneType, int, float, np.integer, np.floating), "a number or None"),
    ("success_rate", (NoneType, int, float, np.integer, np.floating), "a number or None"),
    ("description", (str,), "a text"),
    ("metadata", (dict,), "a dict"),
)


def _wrong_in_offered(value: Any) -> _Found | None:
    """Return what of a rollout that may be refused by itself is of another kind than its field."""
    if not isinstance(value, AgentTrajectory):
        return "", value, "an AgentTrajectory"
    for name, kinds, wanted in _TOLD:
        if not isinstance(getattr(value, name), kinds):
            return _in_rollout(value, name), getattr(value, name), wanted
    if value.reward is not None:
        for name, kinds, wanted in _OF_REWARD:
            if not isinstance(getattr(value.reward, name), kinds):
                return _in_rollout(value, f"reward.{name}"), getattr(value.reward, name), wanted
    return None


def offered_problem(value: Any) -> str:
    """Return why something cannot be offered to a pool at all, as :data:`Offered` are; empty if it can."""
    found = _wrong_in_offered(value)
    return "" if found is None else f"{found[0]}: {shown(found[1])}, must be {found[2]}".lstrip(": ")


def _wrong_in_rollout(value: Any) -> _Found | None:
    """Return what of an agent trajectory is of another kind than its field; called for every rollout of a step."""
    if (found := _wrong_in_offered(value)) is not None:
        return found
    for name, kinds, wanted in _FIELDS:
        if not isinstance(getattr(value, name), kinds):
            return _in_rollout(value, name), getattr(value, name), wanted
    for name in _TENSORS:
        tensor = getattr(value, name)
        if tensor is not None and tensor.dim() != 1:
            return _in_rollout(value, name), tensor, "a tensor of one dimension, or None"
    if value.response_start is not None and (value.response_start < 0 or isinstance(value.response_start, bool)):
        return _in_rollout(value, "response_start"), value.response_start, "a whole number of at least 0, or None"
    if isinstance(value.policy_version, bool):
        return _in_rollout(value, "policy_version"), value.policy_version, "a whole number or None"
    for number, message in enumerate(value.messages):
        if not isinstance(message, dict):
            return _in_rollout(value, f"messages[{number}]"), message, "a dict"
    return None


def _in_rollout(value: AgentTrajectory, name: str) -> str:
    return f" (rollout {shown(value.rollout_id)} of task {shown(value.task_id)}): {_FIELD}{name}"


def _kind(fits: Callable[[Any], bool], wanted: str) -> _Check:
    return lambda value: None if fits(value) else ("", value, wanted)


def _check_of_union(hints: tuple[Any, ...]) -> _Check | None:
    checks = [_check_of(hint) for hint in hints]
    known = [check for check in checks if check is not None]
    if len(known) < len(checks):
        return None

    def check(value: Any) -> _Found | None:
        found = []
        for one in known:
            said = one(value)
            if said is None:
                return None
            found.append(said)
        within = [one for one in found if one[0]]  # of the right kind, and an item in it is not
        return within[0] if within else ("", value, " or ".join(wanted for _, _, wanted in found))

    return check


def _items(fits: Callable[[Any], bool], wanted: str, keys: Any, values: Any) -> _Check:
    """Return what compares something that holds items; only of lists, tuples and dicts every item is looked at."""
    key_check, item_check = _check_of(keys), _check_of(values)

    def check(value: Any) -> _Found | None:
        if not fits(value):
            return "", value, wanted
        if type(value) is dict:
            for key, item in value.items():
                if key_check is not None and (found := key_check(key)) is not None:
                    return f": the key {shown(key)}", key, found[2]
                if item_check is not None and (found := item_check(item)) is not None:
                    return f"[{shown(key)}]{found[0]}", found[1], found[2]
        elif item_check is not None and type(value) in (list, tuple):
            for number, item in enumerate(value):
                if (found := item_check(item)) is not None:
                    return f"[{number}]{found[0]}", found[1], found[2]
        return None

    return check


def _check_of_tuple(arguments: tuple[Any, ...]) -> _Check:
    if len(arguments) == 2 and arguments[1] is ...:
        return _items(lambda value: isinstance(value, tuple), "a tuple", int, arguments[0])
    checks = [_check_of(one) for one in arguments]

    def check(value: Any) -> _Found | None:
        if not isinstance(value, tuple) or len(value) != len(checks):
            return "", value, f"a tuple of {len(checks)}"
        for number, (one, item) in enumerate(zip(checks, value, strict=True)):
            if one is not None and (found := one(item)) is not None:
                return f"[{number}]{found[0]}", found[1], found[2]
        return None

    return check


def _one_of(values: tuple[Any, ...]) -> str:
    return f"{_ONE_OF}{', '.join(map(str, values))}"


def _is_mapping(value: Any) -> bool:
    """Return whether a value is a mapping, or behaves like one (a ``TensorDict``, which is none)."""
    return isinstance(value, abc.Mapping) or (hasattr(value, "keys") and hasattr(value, "__getitem__"))


def _is_sequence(value: Any) -> bool:
    if isinstance(value, str | bytes | abc.Set) or _is_mapping(value):
        return False
    return isinstance(value, abc.Sequence) or (hasattr(value, "__len__") and hasattr(value, "__getitem__"))


def _is_iterable(value: Any) -> bool:
    return isinstance(value, abc.Iterable) and not isinstance(value, str | bytes)


_HOLDS: dict[Any, Callable[[Any], bool]] = {
    abc.Sequence: _is_sequence,
    abc.Collection: lambda value: isinstance(value, abc.Collection) and _is_iterable(value),
    abc.Iterable: _is_iterable,
    abc.Iterator: _is_iterable,
}

_SCALARS: dict[Any, tuple[Callable[[Any], bool], str]] = {
    int: (lambda value: isinstance(value, int | np.integer) and not isinstance(value, bool), "a whole number"),
    float: (is_number, "a number"),
    bool: (
        lambda value: isinstance(value, bool | np.bool_) or (type(value) is int and value in (0, 1)),
        "true or false",
    ),
    str: (lambda value: isinstance(value, str), "a text"),
    bytes: (lambda value: isinstance(value, bytes), "bytes"),
}
