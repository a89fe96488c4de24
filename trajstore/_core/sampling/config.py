"""Builds samplers from plain dicts, as in YAML files, keyed by the classes' argument names."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from trajstore._core.columns.limits import shown
from trajstore._core.sampling.base import Sampler
from trajstore._core.sampling.epochs import EpochSampler
from trajstore._core.sampling.factors import Factor, Recency, UseLimit
from trajstore._core.sampling.groups import GroupSampler
from trajstore._core.sampling.staleness import Staleness
from trajstore._core.sampling.weighted import Priorities, WeightedSampler
from trajstore.errors import ConfigurationError

_FACTORS: Mapping[str, Callable[..., Factor]] = {"recency": Recency, "staleness": Staleness, "uses": UseLimit}
_T = TypeVar("_T")

_OTHERS: Mapping[str, Callable[..., Sampler]] = {"epochs": EpochSampler, "groups": GroupSampler}


def sampler_of(value: Mapping[str, Any]) -> Sampler:
    """Build the sampler that a dict describes.

    ``{"name": "weighted", "unit": "sample", "priorities": {"alpha": 0.6}, "staleness": {"max_age": 4}}``: ``name``
    selects the sampler, the other keys are its arguments. For a weighted sampler, ``priorities`` and each factor
    (``recency``, ``staleness``, ``uses``) are dicts of their own arguments.

    Raises:
        ConfigurationError: a name or argument is unknown or out of range; names it.
    """
    if not isinstance(value, Mapping):
        raise ConfigurationError(
            f'sampler: {shown(value)} is a {type(value).__name__}, must be a dict of options, as {{"name": "weighted"}}'
        )
    arguments = dict(value)
    name = arguments.pop("name", None)
    if isinstance(name, str) and name in _OTHERS:
        return _call(name, _OTHERS[name], arguments)
    if not isinstance(name, str) or name != "weighted":
        raise ConfigurationError(f"sampler: name {shown(name)}, must be one of {', '.join(('weighted', *_OTHERS))}")
    factors = [_call(key, make, arguments.pop(key)) for key, make in _FACTORS.items() if key in arguments]
    if "priorities" in arguments:
        arguments["priorities"] = _call("priorities", Priorities, arguments["priorities"])
    return _call("weighted", WeightedSampler, arguments, factors)


def _call(name: str, make: Callable[..., _T], arguments: Any, *first: Any) -> _T:
    if not isinstance(arguments, Mapping):
        raise ConfigurationError(f"sampler: {name}: must be a dict of options, is {shown(arguments)}")
    known = [parameter for parameter in inspect.signature(make).parameters if parameter != "factors"]
    unknown = sorted(map(str, set(arguments) - set(known)))
    if unknown:
        raise ConfigurationError(f"sampler: {name} has no option {unknown[0]!r}; there are {', '.join(known)}")
    try:
        return make(*first, **arguments)
    except TypeError as error:
        raise ConfigurationError(f"sampler: {name}: {error}") from error
