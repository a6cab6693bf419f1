"""Oracle: the states themselves in float64; a Hadamard matrix and nibbles written by hand."""

from __future__ import annotations

import hashlib

import pytest
import torch
from torch import Tensor

from distill_wire.codecs.hidden import encode_states, restore_states, state_bytes, take_states
from distill_wire.codecs.quantise import from_int4, int4_from, int8_from, round_up_to_bf16
from distill_wire.codecs.rotation import rotate, unrotate
from distill_wire.errors import FrameCorrupt
from distill_wire.types import StateCodecId

both_codecs = pytest.mark.parametrize("codec", list(StateCodecId))


def outlier_states(num_positions: int, width: int) -> Tensor:
    """States as models have them: one coordinate holds most of the energy."""
    generator = torch.Generator().manual_seed(width)
    states_ND = torch.randn(num_positions, width, generator=generator)
    states_ND[:, width // 2] += 200.0
    return states_ND


@pytest.mark.parametrize("width", [1, 7, 64, 576, 1536, 4096])
def test_the_rotation_keeps_lengths_and_is_undone_exactly(width: int) -> None:
    states_ND = outlier_states(5, width)

    rotated_ND = rotate(states_ND)

    torch.testing.assert_close(rotated_ND.norm(dim=-1), states_ND.norm(dim=-1))
    torch.testing.assert_close(unrotate(rotated_ND), states_ND, rtol=1e-5, atol=1e-4)


def test_the_rotation_is_the_one_of_the_specification() -> None:
    digest = hashlib.sha256(b"KDW1 rotation" + bytes(4)).digest()
    signs = torch.tensor([-1.0 if digest[i // 8] >> (i % 8) & 1 else 1.0 for i in range(12)])
    quarter = torch.tensor([[1, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, -1], [1, -1, -1, 1.0]]) / 2
    states_ND = torch.randn(3, 12)  # blocks of 4: the largest power of two in 12

    r3, r2, r6 = 3**-0.5, 2**-0.5, 6**-0.5
    across = torch.tensor([[r3, r3, r3], [r2, 0, -r2], [r6, -2 * r6, r6]])  # DCT-II of three blocks

    expected = across @ ((states_ND * signs).view(3, 3, 4) @ quarter)

    torch.testing.assert_close(rotate(states_ND), expected.view(3, 12))


@both_codecs
@pytest.mark.parametrize("width", [32, 60, 576])
@pytest.mark.parametrize("size", [1e-20, 1.0, 1e6, 1e30])
def test_a_state_comes_back_within_half_a_step_whatever_its_size(
    codec: StateCodecId, width: int, size: float
) -> None:
    states_ND = outlier_states(9, width) * size

    encoded = encode_states(states_ND, codec, name="x")

    assert sum(tensor.nbytes for tensor in encoded.values()) == 9 * state_bytes(codec, width)
    found = restore_states(encoded["x"], encoded["x_scale"], width=width)
    # Orthogonal, so the error is that of the codes: half a step a coordinate, at most.
    half_step_N = encoded["x_scale"].double().amax(-1) / 2
    error_N = (found.double() - states_ND.double()).norm(dim=-1)
    assert (error_N <= half_step_N * width**0.5 * 1.02).all()


def test_without_outliers_eight_bits_keep_99_9_per_cent_and_four_99() -> None:
    states_ND = torch.randn(64, 576, generator=torch.Generator().manual_seed(0))
    errors = []
    for codec in (StateCodecId.MID8, StateCodecId.MID4):
        encoded = encode_states(states_ND, codec, name="x")
        found = restore_states(encoded["x"], encoded["x_scale"], width=576)
        errors.append(float((found - states_ND).square().sum() / states_ND.square().sum()))
    assert errors[0] < 1e-4 and errors[1] < 1.2e-2


@both_codecs
def test_a_state_of_zeros_is_zero(codec: StateCodecId) -> None:
    encoded = encode_states(torch.zeros(2, 40), codec, name="x")

    assert restore_states(encoded["x"], encoded["x_scale"], width=40).abs().max() == 0


def test_four_bit_codes_are_nibbles_with_the_even_coordinate_low() -> None:
    states_ND = torch.zeros(1, 32)
    states_ND[0, :4] = torch.tensor([7.0, -7.0, 1.0, 0.0])

    packed, scale = int4_from(states_ND)

    assert scale.tolist() == [[1.0]]
    assert packed[0, :2].tolist() == [15 | 1 << 4, 9 | 8 << 4]
    assert torch.equal(from_int4(packed, scale, width=32), states_ND)


def test_a_scale_is_never_rounded_down() -> None:
    values = torch.rand(10_000, generator=torch.Generator().manual_seed(0)) * 1e3

    rounded = round_up_to_bf16(values).float()

    assert (rounded >= values).all() and (rounded <= values * (1 + 2**-6)).all()
    codes, _ = int8_from(values[:, None])
    assert codes.min() >= 126


@both_codecs
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1.0])
def test_an_impossible_scale_is_refused(codec: StateCodecId, bad: float) -> None:
    encoded = encode_states(torch.randn(2, 40), codec, name="x")
    encoded["x_scale"][1] = bad

    with pytest.raises(FrameCorrupt, match="x_scale holds a scale that is not finite and >= 0"):
        take_states(encoded, codec, name="x", shape=(2, 40))


@both_codecs
def test_states_of_another_width_are_refused(codec: StateCodecId) -> None:
    encoded = encode_states(torch.randn(2, 40), codec, name="x")

    with pytest.raises(FrameCorrupt, match="tensor x is torch"):
        take_states(encoded, codec, name="x", shape=(2, 72))
