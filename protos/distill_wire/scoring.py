"""From a request and the teacher's hidden states to the tensors of an answer.

Every answer also carries two numbers a position that no sparse codec can give back: the
teacher's entropy at the requested temperature (so that a KL value can be logged from a
cross-entropy) and the log-probability it gives the next token at temperature 1 (the teacher's
own hard loss), both float16.

The random number of a position is a function of the row's ids, the position in the row and
`TargetSpec.seed` alone, so a row's draws are the same in any batch, on any replica and on a
retry: number t of numpy's Philox stream with the key XXH3-64(row as little-endian int32,
seed), its upper 53 bits as a fraction.

Shapes: N = wanted positions, D = hidden size, V = real tokens, C = candidates.
Depends on: torch, numpy. Knows nothing of gRPC or models.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt
import torch
import xxhash
from torch import Tensor

from distill_wire.codecs import CODECS
from distill_wire.codecs.hidden import encode_states
from distill_wire.codecs.scores import make_scores
from distill_wire.errors import TeacherFailed
from distill_wire.types import ScoreRequest

HEAD_CHUNK_TOKENS = 512
"""Positions whose logits exist at once: 512 x 152k fp32 is 311 MB."""


@torch.no_grad()
def encode_answer(
    request: ScoreRequest,
    hidden_ND: Tensor,
    *,
    head: Callable[[Tensor], Tensor],
    vocab_size: int,
    states: Mapping[int, Tensor] | None = None,
    chunk_tokens: int = HEAD_CHUNK_TOKENS,
) -> dict[str, Tensor]:
    """Run head and codec over chunks of positions; [N, V] never exists.

    Args:
        request: what was asked.
        hidden_ND: [N, D] last hidden states of the wanted positions after the final norm.
        head: hidden [n, D] -> fp32 logits [n, V], real tokens only.
        vocab_size: V.
        states: by layer, [N or T, D] as `TargetSpec.has_all_states` says.
        chunk_tokens: positions whose logits exist at once.

    Returns:
        What travels, on the device of `hidden_ND`.

    Raises:
        TeacherFailed: a logit is NaN or +inf, or a state is not finite; the message names the
            first position.
    """
    spec, device = request.target, hidden_ND.device
    codec = CODECS[spec.codec]
    wanted_N = np.flatnonzero(request.position_mask_T)
    gold_ids_N = torch.from_numpy(request.token_ids_T[wanted_N + 1]).long().to(device)
    phases_N = torch.from_numpy(phases_of(request)).to(device)
    candidates_NC = None
    if request.candidate_ids_NC is not None:
        candidates_NC = torch.from_numpy(request.candidate_ids_NC).long().to(device)
    parts: dict[str, list[Tensor]] = {}
    # An empty request still runs one empty chunk, which gives every tensor its shape.
    for start in range(0, max(len(hidden_ND), 1), chunk_tokens):
        rows = slice(start, start + chunk_tokens)
        scores = make_scores(
            hidden_ND[rows],
            head(hidden_ND[rows]),
            temperature=spec.temperature,
            phases_N=phases_N[rows],
        )
        chunk = codec.encode(scores, spec)
        chunk["entropy"] = scores.entropy()
        chunk["gold_logprob"] = scores.gold_logprobs(gold_ids_N[rows]).half()
        if candidates_NC is not None:
            chunk["candidate_logprobs"] = scores.logprobs_of(candidates_NC[rows])
        for name, tensor in chunk.items():
            parts.setdefault(name, []).append(tensor)
    encoded = {name: torch.cat(tensors) for name, tensors in parts.items()}
    # The entropy of a row is finite unless one of its logits is NaN or +inf, or all are -inf.
    _check_finite(encoded["entropy"], request, wanted_N, what="logits are")
    shared = {name: encoded.pop(name) for name in ("entropy", "gold_logprob")}
    shared["entropy"] = shared["entropy"].half()
    if candidates_NC is not None:
        shared["candidate_logprobs"] = encoded.pop("candidate_logprobs")
    positions_N = np.arange(request.num_tokens) if spec.has_all_states else wanted_N
    for layer, states_ND in (states or {}).items():
        layer_states = encode_states(states_ND, spec.state_codec, name=f"layer_{layer}")
        scale = layer_states[f"layer_{layer}_scale"].sum(-1)
        _check_finite(scale, request, positions_N, what=f"states of layer {layer} are")
        shared |= layer_states
    return codec.pack(encoded, vocab_size=vocab_size) | shared


def phases_of(request: ScoreRequest) -> npt.NDArray[np.float64]:
    """Give the random number of each wanted position, float64 [N] in [0, 1)."""
    phases: list[npt.NDArray[np.float64]] = []
    for row in np.split(request.token_ids_T, np.cumsum(request.row_lengths_R)[:-1]):
        key = xxhash.xxh3_64_intdigest(row.astype("<i4").tobytes(), seed=request.target.seed)
        words = np.random.Philox(key=key).random_raw(len(row))
        phases.append((words >> np.uint64(11)).astype(np.float64) * 2.0**-53)
    return np.concatenate(phases)[request.position_mask_T]


def _check_finite(
    values_N: Tensor, request: ScoreRequest, tokens_N: npt.NDArray[np.int64], *, what: str
) -> None:
    bad_N = ~values_N.isfinite()
    if bad_N.any():
        row, position = request.place_of(int(tokens_N[int(bad_N.nonzero()[0, 0])]))
        raise TeacherFailed(
            f"the teacher's {what} not finite at {int(bad_N.sum())} of {len(bad_N)} wanted "
            f"positions, first at position {position} of row {row}; nothing was sent"
        )
