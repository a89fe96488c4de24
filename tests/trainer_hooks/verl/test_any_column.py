"""Every column of a put reaches the store as it was put: expert routes, images, an agent loop's own."""

from __future__ import annotations

from tempfile import TemporaryDirectory

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

from tests.trainer_hooks.verl.builders import fresh_row
from trainer_hooks.replay.rows import rows_of
from trainer_hooks.transfer_queue import Row, StoreOptions
from trainer_hooks.transfer_queue.recorder import Recorder
from trainer_hooks.transfer_queue.rows import pack_columns
from trainer_hooks.verl.arrival import VerlRollouts
from trainer_hooks.verl.config import OutcomeRule
from trainer_hooks.verl.reading import RunTokenizer
from trajstore import TrajectoryReplayBuffer, attached
from trajstore.attachments import ATTACHED, filled_rows


@settings(max_examples=8, deadline=None)
@given(st.data(), st.sampled_from([torch.int8, torch.uint8, torch.int16, torch.float16, torch.bfloat16, torch.int32]))
def test_any_column_is_recorded_as_it_was_put(data: st.DataObject, dtype: torch.dtype) -> None:
    rows = []
    for output in range(data.draw(st.integers(1, 2))):
        row = fresh_row("u", output=output, prompt=2 + output)
        length, response = row.tag["seq_len"], row.tag["response_len"]
        routes = torch.randint(1, 100, (length, 2, 3)).to(torch.int16)
        routes[length - 1 :] = 0
        extra = {**row.columns["extra_fields"], "adapter_id": "lora-7", "logits": torch.rand(2).to(dtype)}
        columns = {
            **row.columns,
            "routed_experts": routes,
            "policy_versions": torch.arange(response).to(dtype),
            "multi_modal_inputs": {"pixel_values": torch.rand(2 + output, 3).to(dtype), "kind": "image"},
            "raw_prompt": [{"role": "user", "content": [{"type": "image", "image": b"png"}, {"type": "text"}]}],
            "checksum": b"\x00\xff",
            "extra_info": {"split": "train"},
            "extra_fields": extra,
        }
        rows.append(Row(row.key, row.tag, columns))
    data_put = list_of_dict_to_tensordict([dict(row.columns) for row in rows])
    recorder = Recorder()
    with TemporaryDirectory() as folder:
        recorder.open(StoreOptions(folder), VerlRollouts(OutcomeRule(), RunTokenizer("tokens"), "run-a", text=False))
        wanted = recorder.wanted()
        assert wanted is not None
        names = sorted({*data_put.keys()} - wanted.left_out)
        recorder.accept([*range(len(rows))], [row.tag for row in rows], pack_columns(data_put, names))
        recorder.flush()
        assert recorder.status().error is None
        recorder.close()
        with TrajectoryReplayBuffer.open(folder) as reader:
            held = reader.get(0)
    assert held.metadata["columns"]["extra_info"] == {"split": "train"}
    assert held.metadata["extra_fields"]["adapter_id"] == "lora-7"
    assert held.messages[0]["content"] == [
        {"type": "image", "image": {ATTACHED: "messages.0.content.0.image"}},
        {"type": "text"},
    ]
    for row, part in zip(rows, rows_of(held), strict=True):
        assert filled_rows(part.metadata) == {"routed_experts": 1}
        values = attached(part.metadata)
        media = row.columns["multi_modal_inputs"]
        expected = {
            "routed_experts": row.columns["routed_experts"],
            "policy_versions": row.columns["policy_versions"],
            "multi_modal_inputs.pixel_values": media["pixel_values"],
            "extra_fields.logits": row.columns["extra_fields"]["logits"],
            "messages.0.content.0.image": b"png",
            "checksum": b"\x00\xff",
        }
        assert values.keys() == expected.keys()
        for name, value in expected.items():
            assert type(values[name]) is type(value)
            if isinstance(value, Tensor):
                assert values[name].dtype == value.dtype
                assert torch.equal(values[name], value)
            else:
                assert values[name] == value
