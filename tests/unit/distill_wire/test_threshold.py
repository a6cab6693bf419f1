"""Oracle: the softmax in float64, the mean of many draws, and a sequential systematic sampler."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from distill_wire.codecs import CODECS
from distill_wire.codecs.scores import systematic_draws
from distill_wire.codecs.threshold import MAX_DRAWS
from distill_wire.errors import FrameCorrupt, RequestInvalid
from distill_wire.scoring import phases_of
from distill_wire.types import CodecId, ScoreRequest, TargetSpec
from tests.unit.distill_wire.answers import describe, encode, make_request, round_trip

THRESHOLD = CODECS[CodecId.THRESHOLD]


def threshold(num_draws: int, *, seed: int = 0, temperature: float = 1.0) -> TargetSpec:
    return TargetSpec(
        codec=CodecId.THRESHOLD, num_draws=num_draws, seed=seed, temperature=temperature
    )


def weights_of(logits_NV: Tensor, spec: TargetSpec) -> Tensor:
    """Give the weights over the whole vocabulary, float64 [N, V]."""
    tensors = round_trip(logits_NV, spec).tensors
    full_NV = torch.zeros(logits_NV.shape, dtype=torch.float64)
    return full_NV.scatter_add_(-1, tensors["token_ids"], tensors["weights"].double())


def random_teacher(num_positions: int, vocab_size: int) -> Tensor:
    generator = torch.Generator().manual_seed(num_positions)
    return 3 * torch.randn(num_positions, vocab_size, generator=generator)


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_the_mean_of_256_draws_converges_on_the_distribution_as_one_over_root_n(
    temperature: float,
) -> None:
    logits_NV = random_teacher(16, 400)
    p_NV = (logits_NV.double() / temperature).softmax(-1)

    draws = [
        weights_of(logits_NV, threshold(20, seed=seed, temperature=temperature))
        for seed in range(256)
    ]

    single = float(torch.stack([(draw - p_NV).norm() for draw in draws]).mean())
    errors = {n: float((torch.stack(draws[:n]).mean(0) - p_NV).norm()) for n in (16, 64, 256)}
    # What is left of a single draw's error is 1 / sqrt(n); the exact entries' rounding stays.
    rounding = float((p_NV[p_NV >= 1 / 20]).norm()) * math.log(20) / 510
    for n, error in errors.items():
        assert error < 1.5 * single / math.sqrt(n) + rounding
    assert errors[256] < 0.25 * errors[16] * 1.5 + rounding


def test_likely_tokens_are_kept_in_every_draw_within_half_a_step() -> None:
    logits_NV = random_teacher(32, 100)
    p_NV = logits_NV.double().softmax(-1)
    is_likely_NV = p_NV >= 1 / 30

    for seed in range(4):
        weights_NV = weights_of(logits_NV, threshold(30, seed=seed))

        error = (weights_NV.log() - p_NV.log())[is_likely_NV].abs()
        assert error.max() <= math.log(30) / 510 * 1.001
        drawn = weights_NV[~is_likely_NV]
        assert set(drawn.unique().tolist()) <= {0.0, float(np.float32(1 / 30))}


def testsystematic_draws_are_those_of_a_sequential_sampler() -> None:
    generator = torch.Generator().manual_seed(3)
    expected_NV = torch.rand(8, 1000, generator=generator).pow(8)
    phases_N = torch.rand(8, generator=generator, dtype=torch.float64)

    found_NV = systematic_draws(expected_NV, phases_N)

    for row in range(8):
        units = [round(float(value) * 2**24) for value in expected_NV[row]]
        total, drawn = int(float(phases_N[row]) * 2**24), []
        for token, unit in enumerate(units):
            if (total + unit) >> 24 > total >> 24:
                drawn.append(token)
            total += unit
        assert found_NV[row].nonzero().squeeze(-1).tolist() == drawn


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_draws_what_the_cpu_draws() -> None:
    generator = torch.Generator().manual_seed(3)
    expected_NV = torch.rand(512, 49_152, generator=generator).pow(20)
    phases_N = torch.rand(512, generator=generator, dtype=torch.float64)

    found_NV = systematic_draws(expected_NV.cuda(), phases_N.cuda()).cpu()

    assert torch.equal(found_NV, systematic_draws(expected_NV, phases_N))


@pytest.mark.parametrize("vocab_size", [3, 151_936, 262_144])
def test_every_vocabulary_is_drawn_from_to_its_last_token(vocab_size: int) -> None:
    logits_NV = torch.zeros(4, vocab_size)
    logits_NV[:, -1] = math.log(max(vocab_size - 1, 2))  # half of the mass, or all but as much

    weights_NV = weights_of(logits_NV, threshold(50))

    p = float(logits_NV.double().softmax(-1)[0, -1])
    assert weights_NV[:, -1].tolist() == pytest.approx([p] * 4, rel=0.01)
    assert weights_NV.sum(-1).tolist() == pytest.approx([1.0] * 4, abs=0.03)


def request_of(rows: list[list[int]], spec: TargetSpec) -> ScoreRequest:
    ids = np.array([token for row in rows for token in row], np.int32)
    lengths = np.array([len(row) for row in rows], np.int32)
    mask = np.ones(len(ids), np.bool_)
    mask[np.cumsum(lengths) - 1] = False
    return ScoreRequest(
        request_id="r", token_ids_T=ids, row_lengths_R=lengths, position_mask_T=mask, target=spec
    )


def test_a_rows_random_numbers_depend_on_the_row_and_the_seed_alone() -> None:
    first, second = [5, 6, 7, 8], [9, 9, 9]

    together = phases_of(request_of([first, second], threshold(9, seed=4)))
    apart = [phases_of(request_of([row], threshold(9, seed=4))) for row in (first, second)]

    assert np.array_equal(together, np.concatenate(apart))
    assert not np.isin(phases_of(request_of([first], threshold(9, seed=5))), together).any()
    assert not np.isin(phases_of(request_of([[5, 6, 7, 9]], threshold(9, seed=4))), together).any()


def test_the_random_numbers_are_those_the_specification_gives() -> None:
    # numpy's Philox with the key XXH3-64(1, 2, 3 as int32; seed 7), written down once.
    found = phases_of(request_of([[1, 2, 3]], threshold(9, seed=7)))

    assert found.tolist() == [0.17440945728696033, 0.6652005421570745]


@pytest.mark.parametrize("num_draws", [0, 1, MAX_DRAWS + 1])
def test_a_number_of_draws_out_of_range_is_refused(num_draws: int) -> None:
    spec = replace(TargetSpec(codec=CodecId.DENSE), num_draws=num_draws)

    with pytest.raises(RequestInvalid, match=rf"num_draws must be in \[2, 4096\], got {num_draws}"):
        THRESHOLD.check(spec, vocab_size=10)


@pytest.mark.parametrize("num_draws", [2, MAX_DRAWS])
def test_a_number_of_draws_in_range_is_served(num_draws: int) -> None:
    THRESHOLD.check(threshold(num_draws), vocab_size=10)


def decode(tensors: dict[str, Tensor], spec: TargetSpec) -> dict[str, Tensor]:
    description = describe(100)
    return THRESHOLD.decode(
        tensors, spec, vocab_size=100, hidden_size=description.hidden_size, num_positions=8
    )


@pytest.mark.parametrize("name", ["is_likely", "codes"])
def test_too_few_flags_or_codes_are_refused(name: str) -> None:
    tensors = encode(random_teacher(8, 100), threshold(20))
    tensors[name] = tensors[name][:-1]

    with pytest.raises(FrameCorrupt, match=f"tensor {name} is torch.uint8"):
        decode(tensors, threshold(20))


def test_weights_that_do_not_add_up_are_refused() -> None:
    tensors = encode(random_teacher(8, 100), threshold(20))
    tensors["codes"] = torch.full_like(tensors["codes"], 255)

    with pytest.raises(FrameCorrupt, match="weights of a position add up to 1"):
        decode(tensors, threshold(20))


def test_a_request_remembers_its_draws() -> None:
    logits_NV = random_teacher(16, 400)
    request = make_request(16, threshold(20, seed=3))

    first, again = (encode(logits_NV, request.target) for _ in range(2))

    assert all(torch.equal(first[name], again[name]) for name in first)
    other = encode(logits_NV, threshold(20, seed=4))
    assert not torch.equal(first["ids_high"], other["ids_high"])
