"""Hidden states on the wire: the last one instead of a distribution, others for their own losses.

`hidden8` sends the state that the teacher's head would read. The student multiplies it
by the teacher's head, which `FetchHead` gives once a run, and has the teacher's whole
distribution: every divergence at any temperature for D + 2 bytes, where the logits take 2V.
Rotated and rounded to 8 bits, the KL to the true distribution stays under 5e-4 nats on SmolLM2.

`mid8` and `mid4` send the states of inner layers for hidden and attention losses: D + 2
and 0.5625 D bytes.

On the wire, for a tensor of states called NAME (`hidden` for hidden8, `layer_I` for layer I):

    8 bits: `NAME` int8 [N, D], `NAME_scale` bfloat16 [N, 1]; state = unrotate(codes * scale)
    4 bits: `NAME` uint8 [N, G * 16], `NAME_scale` bfloat16 [N, G], see `quantise`

Shapes: N = positions, D = width, G = groups of 32 coordinates.
Source: Liu et al. 2024 (SpinQuant, arXiv 2405.16406) on quantising rotated states.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from distill_wire.codecs.base import ALL_LOSSES, Codec, check_scales, take
from distill_wire.codecs.quantise import (
    GROUP,
    from_int4,
    from_int8,
    int4_bytes,
    int4_from,
    int8_from,
    num_groups,
)
from distill_wire.codecs.rotation import rotate, unrotate
from distill_wire.codecs.scores import TeacherScores
from distill_wire.types import CodecId, StateCodecId, TargetSpec

_NAME = "hidden"


class Hidden8Codec(Codec):
    """`hidden8`: the last hidden state, after the final norm."""

    id = CodecId.HIDDEN8
    name = "hidden8"
    losses = ALL_LOSSES

    def bytes_per_position(self, spec: TargetSpec, *, vocab_size: int, hidden_size: int) -> int:
        """D + 2."""
        return state_bytes(StateCodecId.MID8, hidden_size)

    def encode(self, scores: TeacherScores, spec: TargetSpec) -> dict[str, Tensor]:
        """Rotate and round."""
        return encode_states(scores.hidden_ND, StateCodecId.MID8, name=_NAME)

    def decode(
        self,
        tensors: Mapping[str, Tensor],
        spec: TargetSpec,
        *,
        vocab_size: int,
        hidden_size: int,
        num_positions: int,
    ) -> dict[str, Tensor]:
        """Give codes `hidden` and `hidden_scale` as they came; the loss widens a chunk."""
        shape = (num_positions, hidden_size)
        return take_states(tensors, StateCodecId.MID8, name=_NAME, shape=shape)


def state_bytes(codec: StateCodecId, width: int) -> int:
    """Bytes of one position's state: D + 2, or 0.5625 D."""
    return width + 2 if codec is StateCodecId.MID8 else int4_bytes(width)


def encode_states(states_ND: Tensor, codec: StateCodecId, *, name: str) -> dict[str, Tensor]:
    """Rotate and round states; not finite ones give a scale that is not finite."""
    quantise = int8_from if codec is StateCodecId.MID8 else int4_from
    codes, scale = quantise(rotate(states_ND))
    return {name: codes, f"{name}_scale": scale}


def take_states(
    tensors: Mapping[str, Tensor], codec: StateCodecId, *, name: str, shape: tuple[int, int]
) -> dict[str, Tensor]:
    """Check the tensors of one state.

    Raises:
        FrameCorrupt: they are missing, misshapen, or hold an impossible scale.
    """
    num_positions, width = shape
    if codec is StateCodecId.MID8:
        codes = take(tensors, name, dtype=torch.int8, shape=shape)
        scale_shape = (num_positions, 1)
    else:
        groups = num_groups(width)
        packed_shape = (num_positions, groups * GROUP // 2)
        codes = take(tensors, name, dtype=torch.uint8, shape=packed_shape)
        scale_shape = (num_positions, groups)
    scale = take(tensors, f"{name}_scale", dtype=torch.bfloat16, shape=scale_shape)
    check_scales(scale, f"{name}_scale")
    return {name: codes, f"{name}_scale": scale}


def restore_states(codes: Tensor, scale: Tensor, *, width: int) -> Tensor:
    """Give states back, fp32 [N, D]; the codes' dtype tells the codec."""
    if codes.dtype == torch.int8:
        return unrotate(from_int8(codes, scale))
    return unrotate(from_int4(codes, scale, width=width))
