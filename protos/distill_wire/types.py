"""The values both ends speak in; frozen, and checked where they are made.

Shapes: R = rows of a request, T = tokens of all rows back to back, N = positions
wanted (set bits of the position mask), V = vocabulary, L = layers.
Depends on: numpy. Knows nothing of protobuf, torch or sockets.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from distill_wire.errors import RequestInvalid

IGNORE_INDEX = -100
"""Label of a position that is not supervised, the convention of torch and transformers."""

MAX_REQUEST_ID_CHARACTERS = 256
"""The id comes back in every answer's frame header and in every error, which are bounded."""

Int32Array = npt.NDArray[np.int32]
BoolArray = npt.NDArray[np.bool_]


class CodecId(enum.IntEnum):
    """The codecs; equal to enum `Codec` of the IDL, which a test holds."""

    TOPK = 1
    DENSE = 2
    THRESHOLD = 3
    HIDDEN8 = 4


class StateCodecId(enum.IntEnum):
    """The codecs of inner layers' states; equal to enum `StateCodec` of the IDL."""

    MID4 = 1
    MID8 = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetSpec:
    """What a student wants to know about each wanted position.

    Attributes:
        codec: how the distribution is compressed.
        temperature: divisor of the logits, > 0, applied by the teacher, once.
        top_k: entries kept per position; only for `CodecId.TOPK`.
        num_draws: N of `CodecId.THRESHOLD`; probabilities from 1/N on are kept exactly.
        seed: of the random draws, an unsigned 64-bit integer. A row's draws depend on it and on the
            row alone, not on its company in a batch.
        hidden_layers: layers whose states are wanted; 0 is the embedding output.
        state_codec: how those states travel.
        has_all_states: states of every token and not only of the wanted positions, as
            keys of an attention loss.
    """

    codec: CodecId
    temperature: float = 1.0
    top_k: int = 0
    num_draws: int = 0
    seed: int = 0
    hidden_layers: tuple[int, ...] = ()
    state_codec: StateCodecId = StateCodecId.MID8
    has_all_states: bool = False

    def __post_init__(self) -> None:
        if not (self.temperature > 0 and np.isfinite(self.temperature)):
            raise RequestInvalid(f"temperature must be a finite number > 0, got {self.temperature}")
        if self.codec is CodecId.TOPK and self.top_k < 1:
            raise RequestInvalid(f"codec topk needs top_k >= 1, got {self.top_k}")
        if self.codec is CodecId.THRESHOLD and self.num_draws < 2:
            raise RequestInvalid(f"codec threshold needs num_draws >= 2, got {self.num_draws}")
        if not 0 <= self.seed < 2**64:
            raise RequestInvalid(f"seed must be in [0, 2**64), got {self.seed}")
        if len(set(self.hidden_layers)) != len(self.hidden_layers):
            raise RequestInvalid(f"hidden_layers {self.hidden_layers} names a layer twice")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ScoreRequest:
    """One micro-batch of token rows, without padding.

    Attributes:
        request_id: names the micro-batch in logs and errors; at most
            MAX_REQUEST_ID_CHARACTERS.
        token_ids_T: int32, the rows back to back.
        row_lengths_R: int32, tokens of each row; their sum is T.
        position_mask_T: True at input position t asks for the distribution of token t + 1.
        target: codec, temperature and options.
        expected_weights_fingerprint: "" = not checked.
        candidate_ids_NC: int32, ids whose log-probabilities are wanted besides, C at each
            wanted position; None = none.
    """

    request_id: str
    token_ids_T: Int32Array
    row_lengths_R: Int32Array
    position_mask_T: BoolArray
    target: TargetSpec
    expected_weights_fingerprint: str = ""
    candidate_ids_NC: Int32Array | None = None

    def __post_init__(self) -> None:
        if len(self.request_id) > MAX_REQUEST_ID_CHARACTERS:
            raise RequestInvalid(
                f"request id {self.request_id[:32]}... has {len(self.request_id)} characters, "
                f"limit {MAX_REQUEST_ID_CHARACTERS}"
            )
        # Elsewhere an id over 2**31 would wrap to another token on its way to the bytes.
        if self.token_ids_T.dtype != np.int32 or self.position_mask_T.dtype != np.bool_:
            raise RequestInvalid(
                f"request {self.request_id} holds {self.token_ids_T.dtype} token ids and a "
                f"{self.position_mask_T.dtype} position mask, expected int32 and bool"
            )
        num_tokens = int(self.token_ids_T.shape[0])
        if len(self.row_lengths_R) == 0:
            raise RequestInvalid(f"request {self.request_id} holds no rows; send at least one")
        is_empty_R = self.row_lengths_R < 1
        if is_empty_R.any():
            raise RequestInvalid(
                f"row {int(np.argmax(is_empty_R))} of request {self.request_id} is empty; "
                f"a row needs at least 1 token"
            )
        total = int(self.row_lengths_R.sum(dtype=np.int64))
        if total != num_tokens:
            raise RequestInvalid(
                f"request {self.request_id} holds {num_tokens} token ids but its row lengths "
                f"add up to {total}"
            )
        if self.position_mask_T.shape[0] != num_tokens:
            raise RequestInvalid(
                f"request {self.request_id} holds {num_tokens} token ids but its position mask "
                f"covers {self.position_mask_T.shape[0]}"
            )
        ends_R = np.cumsum(self.row_lengths_R, dtype=np.int64) - 1
        wanted_last_R = self.position_mask_T[ends_R]
        if wanted_last_R.any():
            row = int(np.argmax(wanted_last_R))
            last = int(self.row_lengths_R[row]) - 1
            raise RequestInvalid(
                f"row {row} of request {self.request_id} asks for its last position {last}, which "
                f"has no next token; the mask may cover the {last} positions before it"
            )

        if self.candidate_ids_NC is not None:
            shape = self.candidate_ids_NC.shape
            if len(shape) != 2 or shape[0] != self.num_positions or shape[1] < 1:
                raise RequestInvalid(
                    f"candidate ids of request {self.request_id} have shape {shape}, "
                    f"expected at least one for each of {self.num_positions} wanted positions"
                )

    @property
    def num_tokens(self) -> int:
        """Tokens of all rows, T."""
        return int(self.token_ids_T.shape[0])

    @property
    def num_positions(self) -> int:
        """Wanted positions, N."""
        return int(self.position_mask_T.sum())

    def place_of(self, token: int) -> tuple[int, int]:
        """Give row and position within the row of a token, counted over all rows."""
        ends_R = np.cumsum(self.row_lengths_R)
        row = int(np.searchsorted(ends_R, token, side="right"))
        return row, token - int(ends_R[row] - self.row_lengths_R[row])

    @property
    def num_candidates(self) -> int:
        """Candidates of each wanted position, C."""
        return 0 if self.candidate_ids_NC is None else int(self.candidate_ids_NC.shape[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitTransform:
    """What a model does to head(hidden) before the softmax.

    Attributes:
        scale: factor of the logits; 1 = none (Cohere `logit_scale`, Granite 1 / `logits_scaling`).
        softcap: c of c * tanh(logits / c), after the scale; 0 = none (Gemma).
    """

    scale: float = 1.0
    softcap: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one request may ask of a teacher."""

    max_request_tokens: int
    """Tokens of all rows of one request."""

    max_row_tokens: int
    """Tokens of one row; at most the model's positions."""

    max_top_k: int
    """Entries per position of the topk codec, draws of threshold, candidates."""

    max_answer_bytes: int
    """Bytes of one answer's frame, known before anything is computed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherDescription:
    """Who a teacher is: the handshake.

    Attributes:
        wire_version: of the server.
        model_id: hub id or folder name the teacher was started with.
        revision: hub commit, or "".
        weights_fingerprint: hash over every weight, see `handshake`.
        token_map_fingerprint: hash over the id-to-token map, "" without a tokenizer.
        head_rows: rows of the output head, padding included.
        vocab_size: real tokens V; every distribution is over ids below it.
        hidden_size: width D.
        num_layers: L.
        logit_transform: soft-cap and scale between head and softmax.
        dtype: of the weights, such as "bfloat16".
        attention_implementation: the kernel in use.
        codecs: what `Score` may be asked for.
        limits: of one request.
        queue_tokens: tokens waiting when this was said.
        queue_requests: requests waiting when this was said.
        token_map: tokens in order of id; only when asked for.
    """

    wire_version: int
    model_id: str
    revision: str
    weights_fingerprint: str
    token_map_fingerprint: str
    head_rows: int
    vocab_size: int
    hidden_size: int
    num_layers: int
    logit_transform: LogitTransform
    dtype: str
    attention_implementation: str
    codecs: tuple[CodecId, ...]
    limits: Limits
    queue_tokens: int = 0
    queue_requests: int = 0
    token_map: tuple[str, ...] = field(default=(), repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """Where a request's time went on the server, in seconds, and in what company it ran."""

    queue_s: float = 0.0
    forward_s: float = 0.0
    encode_s: float = 0.0
    batch_tokens: int = 0
    batch_requests: int = 0
