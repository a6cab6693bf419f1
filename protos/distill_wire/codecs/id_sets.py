"""Sets of token ids, one a position, in fewer bits than the ids themselves.

An id of a 49,152-token vocabulary takes 16 bits. A set needs less, because its order
does not matter, and token ids are not alike: byte-pair vocabularies are numbered by
merge order, so small ids are the frequent ones. Elias-Fano coding uses the first fact, buckets
that grow with the id the second: on SmolLM2 and Python source an entry of a set of 18 costs 11.3
bits, its position included, against 13.3 with buckets of one size.

The vocabulary is cut into buckets: 2**c of size 2**j, then 2**c of size 2**(j + 1), and
so on until every id is in one. Sorted by position and id, each entry has a global bucket
g = position * B + bucket, which does not fall along the list.

    `ids_high`  uint8: byte 0 is c + 16 j; then a string of bits in which entry i of the list is
                the set bit number g_i + i, E + N * B bits long (Elias-Fano)
    `ids_low`   uint8: per entry id - start of its bucket, in log2(size of its bucket) bits

The writer takes the c and j that give the fewest bits. Bits are ordered as in `bits`.
Shapes: N = positions, E = entries of all positions, B = buckets.

Source: Elias 1974, Fano 1971 for the two-part code of a monotone list.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from distill_wire.codecs.bits import (
    num_bytes,
    pack_bits,
    pack_numbers,
    unpack_bits,
    unpack_numbers,
)
from distill_wire.errors import FrameCorrupt

_SMALLEST = 4
# Growing buckets for ids in order of frequency; buckets of one size for any other order.
_GROWING = [(c, j) for c in range(5) for j in (_SMALLEST, 6)]
_EQUAL = [(15, j) for j in range(_SMALLEST, 15)]

IntArray = npt.NDArray[np.int64]


def pack_id_sets(token_ids_E: Tensor, counts_N: Tensor, *, vocab_size: int) -> dict[str, Tensor]:
    """Pack sets of ids.

    Args:
        token_ids_E: int64, rising within each position.
        counts_N: int64, ids of each position.
        vocab_size: ids are below it.

    Returns:
        `ids_high` and `ids_low`, uint8.
    """
    device, num_positions, num_entries = token_ids_E.device, len(counts_N), len(token_ids_E)
    c, j = _best_table(token_ids_E, num_positions, vocab_size)
    starts_B, widths_B = _buckets(c, j, vocab_size, device)
    bucket_E = _bucket_of(token_ids_E, starts_B)
    positions_E = torch.repeat_interleave(counts_N, output_size=num_entries)
    entries_E = torch.arange(num_entries, device=device)
    bits = torch.zeros(num_entries + num_positions * len(starts_B), dtype=torch.bool, device=device)
    bits[positions_E * len(starts_B) + bucket_E + entries_E] = True
    head = torch.tensor([c + 16 * j], dtype=torch.uint8, device=device)
    return {
        "ids_high": torch.cat([head, pack_bits(bits)]),
        "ids_low": pack_numbers(token_ids_E - starts_B[bucket_E], widths_B[bucket_E]),
    }


def unpack_id_sets(
    tensors: Mapping[str, Tensor], *, vocab_size: int, num_positions: int, max_count: int
) -> tuple[Tensor, Tensor]:
    """Read sets of ids from untrusted bytes.

    Args:
        tensors: an answer's tensors.
        vocab_size: ids are below it.
        num_positions: N.
        max_count: ids a position may have.

    Returns:
        Ids int64 [E], rising within each position, and counts int64 [N].

    Raises:
        FrameCorrupt: the bytes are no such sets.
    """
    high_S, low_S = (_take_bytes(tensors, name) for name in ("ids_high", "ids_low"))
    if len(high_S) == 0:
        raise FrameCorrupt("tensor ids_high does not begin with a bucket table")
    c, j = int(high_S[0]) & 15, int(high_S[0]) >> 4
    starts_B, widths_B = _buckets(c, j, vocab_size, high_S.device)
    num_buckets = len(starts_B)
    set_bits_E = unpack_bits(high_S[1:]).nonzero().squeeze(-1)
    num_entries = len(set_bits_E)
    global_E = set_bits_E - torch.arange(num_entries, device=high_S.device)
    expected = num_bytes(num_entries + num_positions * num_buckets)
    is_beyond = num_entries > 0 and int(global_E[-1]) >= num_positions * num_buckets
    if len(high_S) - 1 != expected or is_beyond:
        raise FrameCorrupt(
            f"tensor ids_high has {len(high_S) - 1} bytes of bits with {num_entries} set, "
            f"{num_positions} positions of {num_buckets} buckets need {expected}"
        )
    bucket_E, positions_E = global_E % num_buckets, global_E // num_buckets
    widths_E = widths_B[bucket_E]
    if len(low_S) != num_bytes(int(widths_E.sum())):
        raise FrameCorrupt(
            f"tensor ids_low has {len(low_S)} bytes, its entries need "
            f"{num_bytes(int(widths_E.sum()))}"
        )
    token_ids_E = starts_B[bucket_E] + unpack_numbers(low_S, widths_E)
    counts_N = torch.bincount(positions_E, minlength=num_positions)
    is_repeat_E = (token_ids_E[1:] <= token_ids_E[:-1]) & (positions_E[1:] == positions_E[:-1])
    if (token_ids_E >= vocab_size).any() or is_repeat_E.any():
        raise FrameCorrupt(
            f"the ids of a position do not rise, or reach {int(token_ids_E.max())}; "
            f"the vocabulary has ids 0..{vocab_size - 1}"
        )
    if (counts_N > max_count).any():
        raise FrameCorrupt(f"a position holds {int(counts_N.max())} ids, at most {max_count} fit")
    return token_ids_E, counts_N


def id_sets_bytes_bound(max_count: int, *, vocab_size: int) -> int:
    """Bound the bytes of one position's set, its share of rounding up included."""
    # The buckets of one size that Elias and Fano chose: the writer finds none worse.
    width = max(4, min(14, (vocab_size // max_count).bit_length() - 1))
    num_buckets = -(-vocab_size >> width) + 1
    return num_bytes(max_count * (width + 1) + num_buckets) + 2


def _take_bytes(tensors: Mapping[str, Tensor], name: str) -> Tensor:
    tensor = tensors.get(name)
    if tensor is None or tensor.dtype != torch.uint8 or tensor.dim() != 1:
        found = "missing" if tensor is None else f"{tensor.dtype} {tuple(tensor.shape)}"
        raise FrameCorrupt(f"tensor {name} is {found}, expected a string of uint8")
    return tensor


def _bucket_of(token_ids_E: Tensor, starts_B: Tensor) -> Tensor:
    return torch.bucketize(token_ids_E, starts_B, right=True) - 1


def _best_table(token_ids_E: Tensor, num_positions: int, vocab_size: int) -> tuple[int, int]:
    """Give the c and j that take the fewest bits."""
    # Every bucket begins at a multiple of the smallest size, so one histogram prices all tables:
    # a price each would have to be waited for on a GPU.
    histogram = torch.bincount(token_ids_E >> _SMALLEST, minlength=(vocab_size >> _SMALLEST) + 1)
    below = np.concatenate([[0], histogram.cumsum(0).cpu().numpy()])

    def cost(table: tuple[int, int]) -> int:
        starts, widths = _table(*table, vocab_size)
        edges = np.append(starts >> _SMALLEST, len(histogram))
        return num_positions * len(starts) + int((np.diff(below[edges]) * widths).sum())

    return min(_GROWING + _EQUAL, key=cost)


@lru_cache(maxsize=128)
def _table(c: int, j: int, vocab_size: int) -> tuple[IntArray, IntArray]:
    """Give first id and width in bits of each bucket."""
    starts: list[int] = []
    widths: list[int] = []
    start, width = 0, j
    while start < vocab_size:
        for _ in range(1 << c):
            if start >= vocab_size:
                break
            starts.append(start)
            widths.append(width)
            start += 1 << width
        width += 1
    return np.array(starts, np.int64), np.array(widths, np.int64)


@lru_cache(maxsize=128)
def _buckets(c: int, j: int, vocab_size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Give the same on a device, int64 [B]."""
    with torch.inference_mode(False):
        starts_B, widths_B = (torch.from_numpy(part) for part in _table(c, j, vocab_size))
        return starts_B.to(device), widths_B.to(device)
