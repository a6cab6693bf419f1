"""Oracle: Python integers and sets; the ids that went in."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from distill_wire.codecs.bits import pack_bits, pack_numbers, unpack_bits, unpack_numbers
from distill_wire.codecs.id_sets import id_sets_bytes_bound, pack_id_sets, unpack_id_sets
from distill_wire.errors import FrameCorrupt

LAW = settings(max_examples=60, deadline=None, derandomize=True, database=None)


def pack(sets: list[list[int]], vocab_size: int) -> dict[str, Tensor]:
    ids = torch.tensor([token for row in sets for token in sorted(row)], dtype=torch.int64)
    counts = torch.tensor([len(row) for row in sets], dtype=torch.int64)
    return pack_id_sets(ids, counts, vocab_size=vocab_size)


def unpack(tensors: dict[str, Tensor], num_positions: int, vocab_size: int) -> list[list[int]]:
    ids, counts = unpack_id_sets(
        tensors, vocab_size=vocab_size, num_positions=num_positions, max_count=10**6
    )
    return [part.tolist() for part in ids.split(counts.tolist())]


@st.composite
def id_sets(draw: st.DrawFn) -> tuple[list[list[int]], int]:
    vocab_size = draw(st.sampled_from([1, 2, 17, 32_256, 49_152, 151_936, 262_144]))
    top = draw(st.integers(1, vocab_size))
    sets = st.lists(st.sets(st.integers(0, top - 1), max_size=40).map(sorted), max_size=8)
    return draw(sets), vocab_size


@LAW
@given(id_sets())
def test_what_goes_in_comes_out(case: tuple[list[list[int]], int]) -> None:
    sets, vocab_size = case

    tensors = pack(sets, vocab_size)

    assert unpack(tensors, len(sets), vocab_size) == sets
    largest = max([len(row) for row in sets], default=1) or 1
    bound = id_sets_bytes_bound(largest, vocab_size=vocab_size) * max(len(sets), 1)
    assert sum(tensor.nbytes for tensor in tensors.values()) <= bound + 2


@LAW
@given(st.lists(st.tuples(st.integers(0, 24), st.integers(0, 2**24 - 1)), max_size=50))
def test_numbers_of_any_width_are_the_bits_of_one_python_integer(
    pairs: list[tuple[int, int]],
) -> None:
    widths = [width for width, _ in pairs]
    numbers = [number & ((1 << width) - 1) for width, number in pairs]
    whole, shift = 0, 0
    for width, number in zip(widths, numbers, strict=True):
        whole |= number << shift
        shift += width

    packed = pack_numbers(torch.tensor(numbers, dtype=torch.int64), torch.tensor(widths).long())

    assert bytes(packed.tolist()) == whole.to_bytes(-(-shift // 8), "little")
    assert unpack_numbers(packed, torch.tensor(widths).long()).tolist() == numbers


@LAW
@given(st.lists(st.booleans(), max_size=70))
def test_bits_come_back_with_zeros_behind(bits: list[bool]) -> None:
    packed = pack_bits(torch.tensor(bits, dtype=torch.bool))

    found = unpack_bits(packed).tolist()

    assert found[: len(bits)] == bits and not any(found[len(bits) :])


def test_ids_in_order_of_frequency_take_fewer_bits_than_ids_of_one_width() -> None:
    generator = torch.Generator().manual_seed(0)
    # Ids as byte-pair vocabularies have them: every octave is about as likely.
    ids_NK = (49_152 ** torch.rand(1000, 18, generator=generator)).long()
    sets = [sorted(set(row.tolist())) for row in ids_NK]

    num_bits = 8 * sum(tensor.nbytes for tensor in pack(sets, 49_152).values())

    assert num_bits / sum(map(len, sets)) < 11.5  # 16 as plain numbers


def test_ids_in_no_order_take_what_elias_and_fano_say() -> None:
    generator = torch.Generator().manual_seed(0)
    sets = [sorted(torch.randperm(49_152, generator=generator)[:18].tolist()) for _ in range(500)]

    num_bits = 8 * sum(tensor.nbytes for tensor in pack(sets, 49_152).values())

    assert num_bits / (500 * 18) < 13.5


def test_golden_bytes() -> None:
    # One position, ids {1, 9} of 16: buckets of 16 ids, so one bucket and four low bits an id.
    tensors = pack([[1, 9]], 16)

    assert unpack({**tensors}, 1, 16) == [[1, 9]]
    by_hand = {
        "ids_high": torch.tensor([15 + 16 * 4, 0b011], dtype=torch.uint8),
        "ids_low": torch.tensor([1 | 9 << 4], dtype=torch.uint8),
    }
    assert unpack(by_hand, 1, 16) == [[1, 9]]


def damaged(name: str, tensor: Tensor) -> dict[str, Tensor]:
    return pack([[1, 9, 3000], [5], []], 49_152) | {name: tensor}


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (damaged("ids_high", torch.empty(0, dtype=torch.uint8)), "does not begin with"),
        (damaged("ids_high", torch.zeros(3, dtype=torch.uint8)), "bytes of bits with 0 set"),
        (damaged("ids_low", torch.zeros(1, dtype=torch.uint8)), "ids_low has 1 bytes"),
        (damaged("ids_low", torch.zeros(3)), "ids_low is torch.float32"),
        ({}, "ids_high is missing"),
    ],
)
def test_bytes_that_are_no_sets_are_refused(tensors: dict[str, Tensor], message: str) -> None:
    with pytest.raises(FrameCorrupt, match=message):
        unpack(tensors, 3, 49_152)


def test_an_id_outside_the_vocabulary_or_twice_in_a_position_is_refused() -> None:
    outside = {
        "ids_high": torch.tensor([15 + 16 * 4, 0b011], dtype=torch.uint8),
        "ids_low": torch.tensor([1 | 9 << 4], dtype=torch.uint8),
    }
    twice = outside | {"ids_low": torch.tensor([1 | 1 << 4], dtype=torch.uint8)}

    for tensors in (outside, twice):
        with pytest.raises(FrameCorrupt, match=r"the vocabulary has ids 0\.\.7"):
            unpack(tensors, 1, 8)
