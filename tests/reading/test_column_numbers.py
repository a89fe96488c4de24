"""Numbers of columns, and signatures: equal where trajectories can be sampled together as they are."""

from __future__ import annotations

from trajstore.columns.fields import Axis
from trajstore.columns.schema import ColumnSpec, Schema
from trajstore.reading.column_numbers import ColumnNumbers, axes_of

X = ColumnSpec("x", "float32", (2,), Axis.SAMPLES)
DONES = ColumnSpec("dones", "bool", (), Axis.FIRST_EXTRA)
DOCUMENT = ColumnSpec("document", "uint8", (), Axis.DOCUMENT)


def test_columns_of_one_name_dtype_and_shape_have_one_number() -> None:
    columns = ColumnNumbers()
    numbers, _ = columns.of(Schema("step", (X, DONES)))
    again, _ = columns.of(Schema("step", (DONES, X, ColumnSpec("x", "float64", (2,), Axis.SAMPLES))))
    assert numbers.tolist() == [0, 1]
    assert again.tolist() == [1, 0, 2]
    assert [(spec.name, spec.dtype) for spec in columns.specs] == [
        ("x", "float32"),
        ("dones", "bool"),
        ("x", "float64"),
    ]


def test_a_signature_tells_what_can_be_sampled_in_whatever_order_and_the_kind() -> None:
    columns = ColumnNumbers()
    _, plain = columns.of(Schema("step", (X, DONES)))
    _, turned = columns.of(Schema("step", (DONES, X)))
    _, documented = columns.of(Schema("step", (X, DONES, DOCUMENT)))
    _, fewer = columns.of(Schema("step", (X,)))
    _, agent = columns.of(Schema("agent", (X, DONES)))
    assert plain == turned == documented
    assert len({plain, fewer, agent}) == 3
    assert columns.sampled(plain) == (0, 1)
    assert (columns.kind(plain), columns.kind(agent)) == ("step", "agent")


def test_the_axis_is_each_schemas_own() -> None:
    columns = ColumnNumbers()
    moved = ColumnSpec("dones", "bool", (), Axis.LAST_EXTRA)
    _, one = columns.of(Schema("step", (DONES,)))
    _, other = columns.of(Schema("step", (moved,)))
    assert one == other
    assert axes_of(Schema("step", (DONES, moved, DOCUMENT))) == [Axis.FIRST_EXTRA, Axis.LAST_EXTRA, 0]
