"""Runs the rows of many requests through the trunk and keeps the wanted positions.

Rows are sorted by length and run in groups of similar length, padded on the right and
masked, so that a group wastes at most a quarter of its tokens and never exceeds the
token budget. A row's hidden states do not depend on its company beyond rounding.

Shapes: R = rows, T = padded length, D = hidden size, n = wanted positions of a row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

SHORTEST_OF_GROUP = 0.75
"""Rows shorter than this part of a group's longest start the next group."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Row:
    """One row and what is wanted of it.

    Attributes:
        token_ids_T: int64 on the host, at least 1 long.
        mask_T: bool on the host, True where the last hidden state is wanted.
        layers: inner layers whose states are wanted; 0 is the embedding output.
        has_all_states: of every token, and not only of the masked ones.
    """

    token_ids_T: Tensor
    mask_T: Tensor
    layers: tuple[int, ...] = ()
    has_all_states: bool = False

    @property
    def is_wanted(self) -> bool:
        """Whether the row has to run at all."""
        return bool(self.mask_T.any()) or (bool(self.layers) and self.has_all_states)


@dataclass(frozen=True, kw_only=True, eq=False)
class RowStates:
    """A row's states: the last ones [n, D], and by layer [n or T, D]."""

    last_nD: Tensor
    layers: dict[int, Tensor]


def row_states(
    trunk: Any, rows: Sequence[Row], *, max_padded_tokens: int, device: torch.device
) -> list[RowStates]:
    """Give the wanted hidden states of each row.

    Args:
        trunk: a transformers module; gives `.last_hidden_state` after the final norm.
        rows: what is wanted.
        max_padded_tokens: rows x longest of one forward; a longer single row runs alone.
        device: of the trunk.

    Returns:
        Per row, in the order given, on `device`.
    """
    states: dict[int, RowStates] = {}
    lengths = [len(row.token_ids_T) for row in rows]
    for group in group_by_length(lengths, max_padded_tokens=max_padded_tokens):
        if any(rows[index].is_wanted for index in group):
            for index, found in _run_group(trunk, rows, group, device):
                states[index] = found
            continue
        # Nothing is wanted of these rows; they only have to give empty results.
        width = trunk.get_input_embeddings().weight.shape[1]
        dtype = next(trunk.parameters()).dtype
        nothing = torch.empty(0, width, dtype=dtype, device=device)
        for index in group:
            layers = dict.fromkeys(rows[index].layers, nothing)
            states[index] = RowStates(last_nD=nothing, layers=layers)
    return [states[index] for index in range(len(rows))]


def _run_group(
    trunk: Any, rows: Sequence[Row], group: list[int], device: torch.device
) -> Iterator[tuple[int, RowStates]]:
    lengths = [len(rows[index].token_ids_T) for index in group]
    input_ids = pad_sequence([rows[index].token_ids_T for index in group], batch_first=True)
    attention_mask = pad_sequence(
        [torch.ones(length, dtype=torch.long) for length in lengths], batch_first=True
    )
    has_layers = any(rows[index].layers for index in group)
    output = trunk(
        input_ids=input_ids.to(device),
        attention_mask=attention_mask.to(device),
        use_cache=False,
        output_hidden_states=has_layers,
    )
    for place, index in enumerate(group):
        row = rows[index]
        wanted = row.mask_T.nonzero().squeeze(-1).to(device)
        all_tokens = torch.arange(lengths[place], device=device)
        chosen = all_tokens if row.has_all_states else wanted
        yield (
            index,
            RowStates(
                last_nD=output.last_hidden_state[place].index_select(0, wanted),
                layers={
                    layer: output.hidden_states[layer][place].index_select(0, chosen)
                    for layer in row.layers
                },
            ),
        )


def group_by_length(lengths: Sequence[int], *, max_padded_tokens: int) -> Iterator[list[int]]:
    """Split row indices into groups of similar length, longest first."""
    group: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: lengths[i], reverse=True):
        if group:
            longest = lengths[group[0]]
            is_full = longest * (len(group) + 1) > max_padded_tokens
            if is_full or lengths[index] < SHORTEST_OF_GROUP * longest:
                yield group
                group = []
        group.append(index)
    if group:
        yield group
