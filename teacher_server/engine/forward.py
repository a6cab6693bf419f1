"""Runs the rows of many requests through the trunk and keeps the wanted positions.

Rows are sorted by length and run in groups of similar length, padded on the right and
masked, so that a group wastes at most a quarter of its tokens and never exceeds the
token budget. A row's hidden states do not depend on its company beyond rounding.

Shapes: R = rows, T = padded length, D = hidden size, n = wanted positions of a row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

SHORTEST_OF_GROUP = 0.75
"""Rows shorter than this part of a group's longest start the next group."""


def wanted_hidden_states(
    trunk: Any,
    rows: Sequence[Tensor],
    masks: Sequence[Tensor],
    *,
    max_padded_tokens: int,
    device: torch.device,
) -> list[Tensor]:
    """Give the last hidden states of each row's wanted positions.

    Args:
        trunk: a transformers module; gives `.last_hidden_state` after the final norm.
        rows: token ids, int64 on the host, each at least 1 long.
        masks: bool on the host, as long as the rows.
        max_padded_tokens: rows x longest of one forward; a longer single row runs alone.
        device: of the trunk.

    Returns:
        Per row, in the order given, [n, D] on `device`.
    """
    hidden: list[Tensor | None] = [None] * len(rows)
    lengths = [len(row) for row in rows]
    for group in group_by_length(lengths, max_padded_tokens=max_padded_tokens):
        if not any(bool(masks[index].any()) for index in group):
            # Nothing is wanted of these rows; they only have to give empty results.
            width = trunk.get_input_embeddings().weight.shape[1]
            dtype = next(trunk.parameters()).dtype
            for index in group:
                hidden[index] = torch.empty(0, width, dtype=dtype, device=device)
            continue
        input_ids = pad_sequence([rows[index] for index in group], batch_first=True)
        attention_mask = pad_sequence(
            [torch.ones(lengths[index], dtype=torch.long) for index in group], batch_first=True
        )
        states_RTD = trunk(
            input_ids=input_ids.to(device),
            attention_mask=attention_mask.to(device),
            use_cache=False,
        ).last_hidden_state
        for row, index in enumerate(group):
            wanted = masks[index].nonzero().squeeze(-1).to(device)
            hidden[index] = states_RTD[row].index_select(0, wanted)
    return [states for states in hidden if states is not None]


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
