"""What is asked for, and rows on their way to a learner: every dtype and shape, cut anywhere, from several stores."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from trajstore.distributed.packed import Part, pack, pieces_of, request, requested, united
from trajstore.errors import ConfigurationError, SchemaMismatchError, StoreError
from trajstore.sampling.base import Drawn


def rows(count: int, salt: int = 0) -> dict[str, torch.Tensor]:
    def numbers(width: int) -> torch.Tensor:
        return (torch.arange(count * width) * 37 + salt).remainder(251).reshape(count, width)

    return {
        "flag": numbers(1)[:, 0] > 100,
        "half": numbers(3).to(torch.bfloat16),
        "eighth": numbers(2).to(torch.float8_e4m3fn),
        "wave": torch.complex(numbers(2).float(), -numbers(2).float()),
        "é.nothing": torch.zeros(count, 3, 0),
        "picture": numbers(5 * 7).to(torch.uint8).reshape(count, 5, 7),
        "number": numbers(1)[:, 0].long() << 40,
    }


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        (one[name].dtype, one[name].shape) == (other[name].dtype, other[name].shape)
        and bits(one[name]) == bits(other[name])
        for name in one
    )


@pytest.mark.parametrize("count", [1, 29, 1000])
@pytest.mark.parametrize("pieces", [1, 2, 13])
def test_rows_of_three_stores_are_put_where_they_belong(count: int, pieces: int) -> None:
    order = np.random.default_rng(count).permutation(3 * count)
    places = [np.sort(order[number * count : (number + 1) * count]) for number in range(3)]
    given = [rows(count, salt) for salt in range(3)]
    expected = {name: torch.empty((3 * count, *one.shape[1:]), dtype=one.dtype) for name, one in given[0].items()}
    for at, part in zip(places, given, strict=True):
        for name, one in part.items():
            if one.numel():
                wide = expected[name].reshape(3 * count, -1).view(torch.uint8)
                wide[torch.from_numpy(at)] = one.reshape(count, -1).view(torch.uint8)
    turned = dict(reversed(given[1].items()))
    parts = [Part.unpacked(pack(given[0], pieces)), Part.unpacked(pack(turned, pieces)), Part.of(given[2])]
    assert same(united(parts, places, None), expected)
    out = {name: torch.ones_like(one).repeat(2, *[1] * (one.dim() - 1)) for name, one in expected.items()}
    found = united(parts, places, out)
    assert same(found, expected)
    assert all(found[name].data_ptr() == out[name].data_ptr() for name in out)


def test_what_does_not_fit_is_refused() -> None:
    at = [np.arange(4), np.arange(4, 8)]
    first, less = Part.of(rows(4)), rows(4)
    del less["flag"]
    with pytest.raises(SchemaMismatchError, match="differ in flag; name the columns"):
        united([first, Part.of(less)], at, None)
    with pytest.raises(SchemaMismatchError, match="dtype or shape of picture"):
        united([first, Part.of({**rows(4), "picture": torch.zeros(4, 7, 5, dtype=torch.uint8)})], at, None)
    with pytest.raises(ConfigurationError, match=r"out\['half'\]"):
        united([first, first], at, {**rows(8), "half": torch.zeros(8, 3)})
    with pytest.raises(StoreError, match="gave 3 of 4 rows: all machines must have the same trajstore"):
        united([Part.unpacked(pack(rows(3), 2)), first], at, None)


def test_a_request_says_what_was_drawn() -> None:
    ids, samples = np.arange(10, dtype=np.int32)[::2], np.arange(5)[::-1] + 2**40
    drawn, columns, pieces = requested(request(Drawn(ids, samples, names=-samples), ["é.b", "c"], 7))
    assert (drawn.ids.tolist(), drawn.samples.tolist()) == (ids.tolist(), samples.tolist())
    assert drawn.names is not None
    assert drawn.names.tolist() == (-samples).tolist()
    assert (columns, pieces) == (["é.b", "c"], 7)
    assert requested(request(Drawn(ids, samples), None, 1))[0].names is None


def test_only_what_is_not_much_larger_than_a_reply_is_cut() -> None:
    assert [pieces_of(size) for size in (0, 90_000, 100_000, 3_000_000, 4_000_000)] == [1, 1, 2, 31, 1]
