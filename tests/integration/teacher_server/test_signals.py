"""Oracle: the same weights run directly, one row at a time.

What a request may ask for besides its distributions: candidates, inner states, the head.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from distill_wire.codecs.hidden import restore_states
from distill_wire.head import read_head
from distill_wire.types import CodecId, StateCodecId, TargetSpec
from tests.support.oracle import exact_logprobs
from tests.support.teacher import Client, RunningTeacher, make_request

ROWS = [[5, 9, 11, 3], list(range(3, 40)), [7, 8]]


def test_on_a_cpu_a_request_gets_the_same_bits_in_any_company(
    client: Client, teacher: RunningTeacher
) -> None:
    spec = TargetSpec(codec=CodecId.THRESHOLD, num_draws=20, seed=1)
    alone, _ = client.score(make_request(ROWS, spec))

    def ask(index: int) -> Any:
        rows = ROWS if index == 0 else [[3 + index] * (4 + index)]
        with Client(teacher.url) as own:
            return own.score(make_request(rows, spec, request_id=f"c{index}"))[0]

    with ThreadPoolExecutor(8) as pool:
        together = next(iter(pool.map(ask, range(16))))

    for name, tensor in alone.tensors.items():
        assert torch.equal(together.tensors[name], tensor)


@pytest.mark.parametrize("codec", [CodecId.THRESHOLD, CodecId.HIDDEN8])
def test_candidates_get_the_teachers_logprobs_at_the_temperature_asked_for(
    client: Client, folder: Path, codec: CodecId
) -> None:
    row = [5, 9, 11, 3, 20, 21]
    spec = TargetSpec(codec=codec, num_draws=20, temperature=2.0)
    candidates = np.array([[1, 60], [7, 7], [0, 63], [2, 3], [4, 5]], np.int32)

    request = replace(make_request([row], spec), candidate_ids_NC=candidates)
    target, _ = client.score(request)

    exact = exact_logprobs(folder, row, 2.0).gather(-1, torch.from_numpy(candidates).long())
    assert target.candidate_logprobs_NC is not None
    torch.testing.assert_close(target.candidate_logprobs_NC.double(), exact, rtol=0, atol=1e-5)


@pytest.mark.parametrize("has_all_states", [False, True])
@pytest.mark.parametrize("state_codec", list(StateCodecId))
def test_states_of_inner_layers_are_those_of_the_model(
    client: Client, folder: Path, state_codec: StateCodecId, has_all_states: bool
) -> None:
    row, mask = [5, 9, 11, 3, 20, 21], [False, True, False, True, True, False]
    spec = TargetSpec(
        codec=CodecId.THRESHOLD,
        num_draws=20,
        hidden_layers=(0, 2, 1),
        state_codec=state_codec,
        has_all_states=has_all_states,
    )

    target, _ = client.score(make_request([row, [4, 5]], spec, masks=[mask, [False, False]]))

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        states = [
            model.model(input_ids=torch.tensor([ids]), output_hidden_states=True).hidden_states
            for ids in (row, [4, 5])
        ]
    for layer in spec.hidden_layers:
        whole = torch.cat([states[0][layer][0], states[1][layer][0]])
        expected = whole if has_all_states else states[0][layer][0][mask]
        codes, scale = target.states[layer]
        found = restore_states(codes, scale, width=whole.shape[-1])
        error = (found - expected).norm(dim=-1) / expected.norm(dim=-1)
        assert error.max() < (0.01 if state_codec is StateCodecId.MID8 else 0.15)


def test_the_head_that_is_fetched_makes_hidden_states_the_models_logits(
    client: Client, folder: Path
) -> None:
    description = client.describe()
    frame = client.fetch_head()
    head = read_head(frame, description)
    request = make_request(ROWS, TargetSpec(codec=CodecId.HIDDEN8))

    target, _ = client.score(request)

    hidden = restore_states(
        target.tensors["hidden"], target.tensors["hidden_scale"], width=description.hidden_size
    )
    exact = torch.cat([exact_logprobs(folder, row) for row in ROWS])
    found = head.logits(hidden).double().log_softmax(-1)
    assert (exact.exp() * (exact - found)).sum(-1).max() < 5e-4


def test_a_head_of_other_weights_is_refused(client: Client) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        client.fetch_head(expected="other")

    assert "expects weights other" in caught.value.details()
