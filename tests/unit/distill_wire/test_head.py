"""Oracle: a linear layer of torch with the padding rows cut off."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from distill_wire.causal_lm import CausalLMParts
from distill_wire.errors import FrameCorrupt, IdentityMismatch
from distill_wire.frame import Frame, write_frame
from distill_wire.head import TeacherHead, head_bytes_bound, head_of, read_head, write_head
from distill_wire.targets import tensor_to_frame
from distill_wire.types import LogitTransform
from tests.unit.distill_wire.answers import describe

V, D = 12, 8
DESCRIPTION = replace(
    describe(V, hidden_size=D), logit_transform=LogitTransform(scale=0.5, softcap=3.0)
)


def parts(*, has_bias: bool, dtype: torch.dtype = torch.float32) -> CausalLMParts:
    torch.manual_seed(0)
    head = nn.Linear(D, V + 4, bias=has_bias).to(dtype)
    transform = DESCRIPTION.logit_transform
    return CausalLMParts(trunk=nn.Identity(), head=head, transform=transform, head_rows=V + 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_head_that_travelled_gives_the_models_logits(has_bias: bool, dtype: torch.dtype) -> None:
    model = parts(has_bias=has_bias, dtype=dtype)
    frame = write_head(head_of(model, vocab_size=V), weights_fingerprint="w")
    assert len(frame) <= head_bytes_bound(DESCRIPTION)

    head = read_head(bytes(frame), DESCRIPTION).to(torch.device("cpu"))

    hidden_ND = torch.randn(5, D)
    with torch.no_grad():
        raw_NV = model.head(hidden_ND.to(dtype))[:, :V].float() * 0.5
    torch.testing.assert_close(head.logits(hidden_ND), 3.0 * torch.tanh(raw_NV / 3.0))
    assert head.weight_VD.dtype == dtype


@pytest.mark.parametrize("has_bias", [False, True])
def test_a_clone_does_not_change_with_the_model(has_bias: bool) -> None:
    model = parts(has_bias=has_bias)
    head = head_of(model, vocab_size=V)
    clone = head.clone()

    with torch.no_grad():
        for parameter in model.head.parameters():
            parameter.zero_()

    hidden_ND = torch.randn(5, D)
    assert head.logits(hidden_ND).abs().max() == 0
    assert clone.logits(hidden_ND).abs().max() > 0


def test_the_head_of_another_teacher_is_refused() -> None:
    frame = write_head(head_of(parts(has_bias=False), vocab_size=V), weights_fingerprint="other")

    with pytest.raises(IdentityMismatch, match=r"belongs to weights other, .* pinned to w"):
        read_head(frame, DESCRIPTION)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"bias": torch.zeros(V)}, "a head holds weight and bias, this one bias"),
        ({"weight": torch.zeros(V, D), "x": torch.zeros(1)}, "this one weight, x"),
        ({"weight": torch.zeros(V + 1, D)}, r"weight is torch.float32 \(13, 8\), expected"),
        ({"weight": torch.zeros(V, D, dtype=torch.int8)}, "weight is torch.int8"),
        ({"weight": torch.zeros(V, D), "bias": torch.zeros(D)}, r"bias is torch.float32 \(8,\)"),
    ],
)
def test_what_is_no_head_is_refused(tensors: dict[str, torch.Tensor], message: str) -> None:
    framed = {name: tensor_to_frame(tensor) for name, tensor in tensors.items()}
    frame = write_frame(Frame(meta={"weights_fingerprint": "w"}, tensors=framed))

    with pytest.raises(FrameCorrupt, match=message):
        read_head(frame, DESCRIPTION)


def test_no_gradient_reaches_the_teachers_head() -> None:
    head = TeacherHead(
        weight_VD=torch.randn(V, D, requires_grad=True), bias_V=None, transform=LogitTransform()
    )

    assert not head.logits(torch.randn(2, D, requires_grad=True)).requires_grad
