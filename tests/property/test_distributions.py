"""Oracle: the softmax of the whole vocabulary in float64, over generated teachers."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from distill_wire.targets import encode_positions, read_target, write_target
from distill_wire.types import CodecId, ScoreRequest, TargetSpec

LAW = settings(max_examples=80, deadline=None, derandomize=True, database=None)


@st.composite
def teachers(draw: st.DrawFn) -> Tensor:
    """Draw logits: flat or peaked, far from zero or not, with or without masked ids."""
    vocab_size = draw(st.integers(2, 40))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    shape = (draw(st.integers(0, 6)), vocab_size)
    logits_NV = torch.randn(shape, generator=generator) * draw(st.sampled_from([0.0, 0.1, 3, 30]))
    logits_NV += draw(st.sampled_from([0.0, -80.0, 1000.0]))
    is_masked_NV = torch.rand(shape, generator=generator) < draw(st.sampled_from([0.0, 0.5, 0.95]))
    is_masked_NV[:, draw(st.integers(0, vocab_size - 1))] = False
    return logits_NV.masked_fill(is_masked_NV, -torch.inf)


def through_a_frame(logits_NV: Tensor, spec: TargetSpec) -> dict[str, Tensor]:
    num_positions, vocab_size = logits_NV.shape
    mask = np.arange(num_positions + 1) < num_positions
    request = ScoreRequest(
        request_id="r-1",
        token_ids_T=np.zeros(num_positions + 1, np.int32),
        row_lengths_R=np.array([num_positions + 1], np.int32),
        position_mask_T=mask,
        target=spec,
    )
    gold_N = torch.zeros(num_positions, dtype=torch.long)
    encoded = encode_positions(
        logits_NV, gold_N, head=lambda hidden: hidden, spec=spec, chunk_tokens=4
    )
    frame = write_target(encoded, request, weights_fingerprint="w")
    target = read_target(bytearray(frame), request, vocab_size=vocab_size, weights_fingerprint="w")
    return {**target.tensors, "entropy": target.entropy_N, "gold_logprob": target.gold_logprob_N}


@LAW
@given(
    logits_NV=teachers(),
    share=st.floats(0, 1),
    temperature=st.sampled_from([0.01, 0.5, 1.0, 2.0, 100.0]),
)
def test_top_k_and_tail_are_the_full_distribution(
    logits_NV: Tensor, share: float, temperature: float
) -> None:
    vocab_size = logits_NV.shape[-1]
    k = 1 + int(share * (vocab_size - 2))
    spec = TargetSpec(codec=CodecId.TOPK, top_k=k, temperature=temperature)

    found = through_a_frame(logits_NV, spec)

    exact_NV = (logits_NV.double() / temperature).log_softmax(-1)
    kept_NK = exact_NV.gather(-1, found["token_ids"])
    tail_N = exact_NV.scatter(-1, found["token_ids"], -torch.inf).logsumexp(-1)
    # fp32 rounds a log-probability twice on its way, relative to its own size.
    torch.testing.assert_close(found["logprobs"].double(), kept_NK, rtol=5e-7, atol=2e-6)
    torch.testing.assert_close(found["tail_logprob"].double(), tail_N, rtol=5e-7, atol=2e-6)
    entropy_N = torch.special.entr(exact_NV.exp()).sum(-1)
    torch.testing.assert_close(found["entropy"].double(), entropy_N, rtol=2e-6, atol=2e-6)
    gold_N = logits_NV.double().log_softmax(-1)[:, 0]
    torch.testing.assert_close(found["gold_logprob"].double(), gold_N, rtol=5e-7, atol=2e-6)


@LAW
@given(logits_NV=teachers(), temperature=st.sampled_from([0.5, 1.0, 4.0]))
def test_all_but_one_id_and_the_tail_are_the_dense_answer(
    logits_NV: Tensor, temperature: float
) -> None:
    vocab_size = logits_NV.shape[-1]
    # Values that float16 holds when centred, so that the dense answer loses nothing.
    logits_NV = (logits_NV - logits_NV.amax(-1, keepdim=True)).half().float()
    sparse_spec = TargetSpec(codec=CodecId.TOPK, top_k=vocab_size - 1, temperature=temperature)

    sparse = through_a_frame(logits_NV, sparse_spec)
    dense = through_a_frame(logits_NV, TargetSpec(codec=CodecId.DENSE, temperature=temperature))

    assert torch.equal(dense["logits"].float(), logits_NV)
    left_N1 = (torch.arange(vocab_size).sum() - sparse["token_ids"].sum(-1))[:, None]
    joined_NV = torch.empty_like(logits_NV).scatter_(-1, sparse["token_ids"], sparse["logprobs"])
    joined_NV.scatter_(-1, left_N1, sparse["tail_logprob"][:, None])
    expected_NV = (dense["logits"].double() / temperature).log_softmax(-1)
    torch.testing.assert_close(joined_NV.double(), expected_NV, rtol=5e-7, atol=2e-6)
    assert torch.equal(sparse["entropy"], dense["entropy"])
