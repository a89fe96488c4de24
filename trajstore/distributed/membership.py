"""Which stores a name has, noted where Ray keeps the names of its actors, so that a store that is lost is still known.

Ray forgets the name of an actor that has ended. What is noted here stays until :func:`strike`, and as long as Ray's
names do: no actor, node or producer that ends takes it along.
"""

from __future__ import annotations

import json

_NAMESPACE = b"trajstore"


def enlist(namespace: str, name: str, rank: int) -> None:
    """Note that a store has begun."""
    from ray.experimental.internal_kv import _internal_kv_put

    _internal_kv_put(_key(namespace, name) + str(rank).encode(), b"", namespace=_NAMESPACE)


def strike(namespace: str, name: str, rank: int) -> None:
    """Note that a store is wanted no longer."""
    from ray.experimental.internal_kv import _internal_kv_del

    _internal_kv_del(_key(namespace, name) + str(rank).encode(), namespace=_NAMESPACE)


def enlisted(namespace: str, name: str) -> set[int]:
    """Return the ranks of the stores that have begun and are still wanted."""
    from ray.experimental.internal_kv import _internal_kv_list

    prefix = _key(namespace, name)
    return {int(key[len(prefix) :]) for key in _internal_kv_list(prefix, namespace=_NAMESPACE)}


def _key(namespace: str, name: str) -> bytes:
    """Return the beginning of the keys of one name's stores, which no other name's keys begin with."""
    return json.dumps([namespace, name]).encode() + b"/"
