from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Codec(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CODEC_UNSPECIFIED: _ClassVar[Codec]
    CODEC_TOPK: _ClassVar[Codec]
    CODEC_DENSE: _ClassVar[Codec]
    CODEC_THRESHOLD: _ClassVar[Codec]
    CODEC_HIDDEN8: _ClassVar[Codec]

class StateCodec(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    STATE_CODEC_UNSPECIFIED: _ClassVar[StateCodec]
    STATE_CODEC_MID4: _ClassVar[StateCodec]
    STATE_CODEC_MID8: _ClassVar[StateCodec]
CODEC_UNSPECIFIED: Codec
CODEC_TOPK: Codec
CODEC_DENSE: Codec
CODEC_THRESHOLD: Codec
CODEC_HIDDEN8: Codec
STATE_CODEC_UNSPECIFIED: StateCodec
STATE_CODEC_MID4: StateCodec
STATE_CODEC_MID8: StateCodec

class DescribeRequest(_message.Message):
    __slots__ = ("wire_version", "include_token_map")
    WIRE_VERSION_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_TOKEN_MAP_FIELD_NUMBER: _ClassVar[int]
    wire_version: int
    include_token_map: bool
    def __init__(self, wire_version: _Optional[int] = ..., include_token_map: bool = ...) -> None: ...

class TeacherDescription(_message.Message):
    __slots__ = ("wire_version", "model_id", "revision", "weights_fingerprint", "token_map_fingerprint", "head_rows", "vocab_size", "hidden_size", "num_layers", "logit_transform", "dtype", "attention_implementation", "codecs", "limits", "load", "token_map")
    WIRE_VERSION_FIELD_NUMBER: _ClassVar[int]
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_MAP_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    HEAD_ROWS_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    LOGIT_TRANSFORM_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    ATTENTION_IMPLEMENTATION_FIELD_NUMBER: _ClassVar[int]
    CODECS_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    TOKEN_MAP_FIELD_NUMBER: _ClassVar[int]
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
    codecs: _containers.RepeatedScalarFieldContainer[Codec]
    limits: Limits
    load: Load
    token_map: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, wire_version: _Optional[int] = ..., model_id: _Optional[str] = ..., revision: _Optional[str] = ..., weights_fingerprint: _Optional[str] = ..., token_map_fingerprint: _Optional[str] = ..., head_rows: _Optional[int] = ..., vocab_size: _Optional[int] = ..., hidden_size: _Optional[int] = ..., num_layers: _Optional[int] = ..., logit_transform: _Optional[_Union[LogitTransform, _Mapping]] = ..., dtype: _Optional[str] = ..., attention_implementation: _Optional[str] = ..., codecs: _Optional[_Iterable[_Union[Codec, str]]] = ..., limits: _Optional[_Union[Limits, _Mapping]] = ..., load: _Optional[_Union[Load, _Mapping]] = ..., token_map: _Optional[_Iterable[str]] = ...) -> None: ...

class LogitTransform(_message.Message):
    __slots__ = ("scale", "softcap")
    SCALE_FIELD_NUMBER: _ClassVar[int]
    SOFTCAP_FIELD_NUMBER: _ClassVar[int]
    scale: float
    softcap: float
    def __init__(self, scale: _Optional[float] = ..., softcap: _Optional[float] = ...) -> None: ...

class Limits(_message.Message):
    __slots__ = ("max_request_tokens", "max_row_tokens", "max_top_k", "max_answer_bytes")
    MAX_REQUEST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_ROW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOP_K_FIELD_NUMBER: _ClassVar[int]
    MAX_ANSWER_BYTES_FIELD_NUMBER: _ClassVar[int]
    max_request_tokens: int
    max_row_tokens: int
    max_top_k: int
    max_answer_bytes: int
    def __init__(self, max_request_tokens: _Optional[int] = ..., max_row_tokens: _Optional[int] = ..., max_top_k: _Optional[int] = ..., max_answer_bytes: _Optional[int] = ...) -> None: ...

class Load(_message.Message):
    __slots__ = ("queue_tokens", "queue_requests")
    QUEUE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    queue_tokens: int
    queue_requests: int
    def __init__(self, queue_tokens: _Optional[int] = ..., queue_requests: _Optional[int] = ...) -> None: ...

class ScoreRequest(_message.Message):
    __slots__ = ("wire_version", "request_id", "token_ids", "row_lengths", "position_mask", "target", "expected_weights_fingerprint", "candidate_ids", "num_candidates")
    WIRE_VERSION_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    ROW_LENGTHS_FIELD_NUMBER: _ClassVar[int]
    POSITION_MASK_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_WEIGHTS_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    CANDIDATE_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    wire_version: int
    request_id: str
    token_ids: bytes
    row_lengths: _containers.RepeatedScalarFieldContainer[int]
    position_mask: bytes
    target: TargetSpec
    expected_weights_fingerprint: str
    candidate_ids: bytes
    num_candidates: int
    def __init__(self, wire_version: _Optional[int] = ..., request_id: _Optional[str] = ..., token_ids: _Optional[bytes] = ..., row_lengths: _Optional[_Iterable[int]] = ..., position_mask: _Optional[bytes] = ..., target: _Optional[_Union[TargetSpec, _Mapping]] = ..., expected_weights_fingerprint: _Optional[str] = ..., candidate_ids: _Optional[bytes] = ..., num_candidates: _Optional[int] = ...) -> None: ...

class FetchHeadRequest(_message.Message):
    __slots__ = ("wire_version", "expected_weights_fingerprint")
    WIRE_VERSION_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_WEIGHTS_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    wire_version: int
    expected_weights_fingerprint: str
    def __init__(self, wire_version: _Optional[int] = ..., expected_weights_fingerprint: _Optional[str] = ...) -> None: ...

class TargetSpec(_message.Message):
    __slots__ = ("codec", "temperature", "top_k", "hidden_layers", "num_draws", "seed", "state_codec", "has_all_states")
    CODEC_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_LAYERS_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAWS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    STATE_CODEC_FIELD_NUMBER: _ClassVar[int]
    HAS_ALL_STATES_FIELD_NUMBER: _ClassVar[int]
    codec: Codec
    temperature: float
    top_k: int
    hidden_layers: _containers.RepeatedScalarFieldContainer[int]
    num_draws: int
    seed: int
    state_codec: StateCodec
    has_all_states: bool
    def __init__(self, codec: _Optional[_Union[Codec, str]] = ..., temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., hidden_layers: _Optional[_Iterable[int]] = ..., num_draws: _Optional[int] = ..., seed: _Optional[int] = ..., state_codec: _Optional[_Union[StateCodec, str]] = ..., has_all_states: bool = ...) -> None: ...

class Chunk(_message.Message):
    __slots__ = ("data", "frame_bytes", "timings")
    DATA_FIELD_NUMBER: _ClassVar[int]
    FRAME_BYTES_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    frame_bytes: int
    timings: Timings
    def __init__(self, data: _Optional[bytes] = ..., frame_bytes: _Optional[int] = ..., timings: _Optional[_Union[Timings, _Mapping]] = ...) -> None: ...

class Timings(_message.Message):
    __slots__ = ("queue_s", "forward_s", "encode_s", "batch_tokens", "batch_requests")
    QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    FORWARD_S_FIELD_NUMBER: _ClassVar[int]
    ENCODE_S_FIELD_NUMBER: _ClassVar[int]
    BATCH_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BATCH_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    queue_s: float
    forward_s: float
    encode_s: float
    batch_tokens: int
    batch_requests: int
    def __init__(self, queue_s: _Optional[float] = ..., forward_s: _Optional[float] = ..., encode_s: _Optional[float] = ..., batch_tokens: _Optional[int] = ..., batch_requests: _Optional[int] = ...) -> None: ...
