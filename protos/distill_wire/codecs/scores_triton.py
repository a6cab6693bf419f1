"""`TeacherScores` with kernels: each row of logits is read a few times and never written.

Plain torch moves a chunk's logits through memory a dozen times for their log-softmax, entropy and
selection. Here one program has one row: a first kernel gives its maximum, normaliser and entropy,
and what a codec asks for then takes one reading more. On an H200 that is a sixth of the time
(`tests/bench/encode.py`). Laws and results are those of `scores`, up to rounding of exp and sums.

Triton comes with torch's CUDA builds and nowhere else, so it is imported here alone.
Shapes: as in `scores`; W = most entries of a position.
"""

from __future__ import annotations

import math
from functools import cached_property

import torch
import triton
import triton.language as tl
from torch import Tensor

from distill_wire.codecs.scores import ONE_BITS, Entries, TeacherScores

_BLOCK = 4096
_BLOCK_OF_SAMPLE = 2048
_WARPS = 8


class TritonScores(TeacherScores):
    """The same answers from fused kernels. Needs CUDA tensors and a contiguous last dimension."""

    @cached_property
    def _statistics_4N(self) -> Tensor:
        """Maximum, log-normalisers at the temperature and at 1, entropy; fp32 rows."""
        num_positions, vocab_size = self.logits_NV.shape
        statistics_4N = self.logits_NV.new_empty(4, num_positions)
        if num_positions:
            _statistics[(num_positions,)](
                self.logits_NV,
                self.logits_NV.stride(0),
                statistics_4N,
                num_positions,
                vocab_size,
                1.0 / self.temperature,
                BLOCK=_BLOCK,
                num_warps=_WARPS,
            )
        return statistics_4N

    def entropy(self) -> Tensor:
        """As the plain one."""
        entropy_N: Tensor = self._statistics_4N[3]
        return entropy_N

    def logprobs_of(self, token_ids_NK: Tensor) -> Tensor:
        """As the plain one."""
        largest_N, normaliser_N = self._statistics_4N[:2]
        centred_NK = self.logits_NV.gather(-1, token_ids_NK) - largest_N[:, None]
        logprobs_NK: Tensor = centred_NK / self.temperature - normaliser_N[:, None]
        return logprobs_NK

    def gold_logprobs(self, token_ids_N: Tensor) -> Tensor:
        """As the plain one."""
        largest_N, _, normaliser_N = self._statistics_4N[:3]
        chosen_N = self.logits_NV.gather(-1, token_ids_N[:, None])[:, 0]
        logprobs_N: Tensor = chosen_N - largest_N - normaliser_N
        return logprobs_N

    def top(self, k: int) -> tuple[Tensor, Tensor, Tensor]:
        """As the plain one."""
        num_positions, vocab_size = self.logits_NV.shape
        logits_NK, token_ids_NK = self.logits_NV.topk(k, dim=-1)
        largest_N, normaliser_N = self._statistics_4N[:2]
        kept_NK = (logits_NK - largest_N[:, None]) / self.temperature - normaliser_N[:, None]
        smallest_N = logits_NK[:, -1].contiguous()
        num_smallest_N = (logits_NK == smallest_N[:, None]).sum(-1, dtype=torch.int32)
        tail_N = torch.empty_like(smallest_N)
        if num_positions:
            _tail[(num_positions,)](
                self.logits_NV,
                self.logits_NV.stride(0),
                largest_N,
                smallest_N,
                num_smallest_N,
                tail_N,
                vocab_size,
                1.0 / self.temperature,
                BLOCK=_BLOCK,
                num_warps=_WARPS,
            )
        return kept_NK, token_ids_NK, tail_N.log() - normaliser_N

    def sample(self, num_draws: int) -> Entries:
        """As the plain one."""
        num_positions, vocab_size = self.logits_NV.shape
        device = self.logits_NV.device
        # The kept weights add up to 1 plus at most one draw, and none is below 1 / num_draws.
        width = min(num_draws + 1, vocab_size)
        token_ids_NW = torch.empty(num_positions, width, dtype=torch.int64, device=device)
        logprobs_NW = torch.empty(num_positions, width, device=device)
        counts_N = torch.zeros(num_positions, dtype=torch.int64, device=device)
        largest_N, normaliser_N = self._statistics_4N[:2]
        if num_positions:
            _sample[(num_positions,)](
                self.logits_NV,
                self.logits_NV.stride(0),
                largest_N,
                normaliser_N,
                (self.phases_N * (1 << ONE_BITS)).long(),
                token_ids_NW,
                logprobs_NW,
                counts_N,
                vocab_size,
                width,
                1.0 / self.temperature,
                float(num_draws),
                -math.log(num_draws),
                BLOCK=_BLOCK_OF_SAMPLE,
                BITS=ONE_BITS,
                num_warps=_WARPS,
            )
        is_entry_NW = torch.arange(width, device=device) < counts_N[:, None]
        entries_E = is_entry_NW.flatten().nonzero()[:, 0]
        return Entries(
            counts_N=counts_N,
            token_ids_E=token_ids_NW.flatten()[entries_E],
            logprobs_E=logprobs_NW.flatten()[entries_E],
        )


@triton.jit
def _statistics(
    logits, row_stride, statistics, num_rows, vocab_size, inverse_temperature, BLOCK: tl.constexpr
):
    row = tl.program_id(0)
    logits += row.to(tl.int64) * row_stride
    offsets = tl.arange(0, BLOCK)
    largest_B = tl.full([BLOCK], -float("inf"), tl.float32)
    for start in range(0, vocab_size, BLOCK):
        inside = start + offsets < vocab_size
        x = tl.load(logits + start + offsets, mask=inside, other=-float("inf"))
        largest_B = tl.maximum(largest_B, x)
    largest = tl.max(largest_B, 0)
    sum_B = tl.zeros([BLOCK], tl.float32)
    weighted_B = tl.zeros([BLOCK], tl.float32)
    plain_B = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocab_size, BLOCK):
        inside = start + offsets < vocab_size
        x = tl.load(logits + start + offsets, mask=inside, other=-float("inf")) - largest
        # A NaN comes through in the sums; the maximum may have passed over it.
        scaled = x * inverse_temperature
        p = tl.exp(scaled)
        sum_B += p
        weighted_B += tl.where(p > 0, p * scaled, 0.0)
        plain_B += tl.exp(x)
    total = tl.sum(sum_B, 0)
    log_total = tl.log(total)
    tl.store(statistics + row, largest)
    tl.store(statistics + num_rows + row, log_total)
    tl.store(statistics + 2 * num_rows + row, tl.log(tl.sum(plain_B, 0)))
    # H = -sum p log p with log p = scaled - log_total.
    tl.store(statistics + 3 * num_rows + row, log_total - tl.sum(weighted_B, 0) / total)


@triton.jit
def _tail(
    logits,
    row_stride,
    largest,
    smallest,
    num_smallest,
    tail,
    vocab_size,
    inverse_temperature,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    logits += row.to(tl.int64) * row_stride
    largest_x = tl.load(largest + row)
    smallest_x = tl.load(smallest + row)
    offsets = tl.arange(0, BLOCK)
    sum_B = tl.zeros([BLOCK], tl.float32)
    equal_B = tl.zeros([BLOCK], tl.int32)
    for start in range(0, vocab_size, BLOCK):
        inside = start + offsets < vocab_size
        x = tl.load(logits + start + offsets, mask=inside, other=-float("inf"))
        below = x < smallest_x
        sum_B += tl.where(below, tl.exp((x - largest_x) * inverse_temperature), 0.0)
        equal_B += ((x == smallest_x) & inside).to(tl.int32)
    # Of several tokens as likely as the last one kept, some are kept and the others are not.
    num_others = (tl.sum(equal_B, 0) - tl.load(num_smallest + row)).to(tl.float32)
    ties = num_others * tl.exp((smallest_x - largest_x) * inverse_temperature)
    tl.store(tail + row, tl.sum(sum_B, 0) + ties)


@triton.jit
def _sample(
    logits,
    row_stride,
    largest,
    normaliser,
    starts,
    token_ids,
    logprobs,
    counts,
    vocab_size,
    width,
    inverse_temperature,
    num_draws,
    log_least,
    BLOCK: tl.constexpr,
    BITS: tl.constexpr,
):
    row = tl.program_id(0)
    logits += row.to(tl.int64) * row_stride
    token_ids += row.to(tl.int64) * width
    logprobs += row.to(tl.int64) * width
    largest_x = tl.load(largest + row)
    log_total = tl.load(normaliser + row)
    passed = tl.load(starts + row)
    count = passed * 0
    offsets = tl.arange(0, BLOCK)
    for start in range(0, vocab_size, BLOCK):
        inside = start + offsets < vocab_size
        x = tl.load(logits + start + offsets, mask=inside, other=-float("inf"))
        logprob = (x - largest_x) * inverse_temperature - log_total
        is_likely = logprob >= log_least
        expected = tl.where(is_likely, 0.0, tl.exp(logprob) * num_draws * (1 << BITS))
        units = (expected + 0.5).to(tl.int64)
        sums = tl.cumsum(units, 0)
        now = passed + sums
        is_drawn = (now >> BITS) > ((now - units) >> BITS)
        passed += tl.sum(units, 0)
        is_kept = is_likely | is_drawn
        kept = is_kept.to(tl.int64)
        place = count + tl.cumsum(kept, 0) - 1
        fits = is_kept & (place < width)
        tl.store(token_ids + place, (start + offsets).to(tl.int64), mask=fits)
        tl.store(logprobs + place, logprob, mask=fits)
        count += tl.sum(kept, 0)
    tl.store(counts + row, tl.minimum(count, width))
