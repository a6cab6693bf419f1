"""What a teacher server can be told.

Flag `--max-batch-tokens` is variable `TEACHER_MAX_BATCH_TOKENS`, and so on. Names follow
vLLM (the model) and text-embeddings-inference (the batching).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


def _option(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """Options of `teacher-server serve`."""

    model: str = _option("", "Hub id, local folder or .gguf file of a causal LM. Required.")
    tokenizer: str | None = _option(None, "Where the tokenizer lies, if not with the model.")
    revision: str | None = _option(None, "Hub revision of the model.")
    served_model_name: str | None = _option(None, "Name given to students, the model by default.")
    dtype: str = _option("auto", "auto, bfloat16, float16 or float32.")
    device: str = _option("auto", "auto (cuda if there is one), cpu, cuda or cuda:N.")
    attn_implementation: str = _option("sdpa", "Attention kernel, by its transformers name.")
    trust_remote_code: bool = _option(False, "Run code that comes with the checkpoint.")
    host: str = _option("127.0.0.1", "Address to listen on; 0.0.0.0 for other machines.")
    port: int = _option(50051, "gRPC port; 0 picks a free one.")
    http_port: int = _option(8080, "Port of /healthz /readyz /metrics /v1/describe; -1 = off.")
    max_model_len: int | None = _option(None, "Longest row in tokens, the model's own by default.")
    max_batch_tokens: int = _option(
        16_384, "Tokens in one forward pass. Decides peak memory together with the model."
    )
    max_request_tokens: int = _option(65_536, "Tokens of all rows of one request.")
    max_queue_tokens: int = _option(
        262_144, "Tokens admitted but not yet computed; beyond it requests are refused at once."
    )
    max_top_k: int = _option(1024, "Entries per position of the topk codec.")
    max_answer_bytes: int = _option(1 << 30, "Bytes of one answer, known before it is computed.")
    max_wait_ms: float = _option(2.0, "How long an idle device waits for company for a request.")
    head_chunk_tokens: int = _option(
        512, "Positions whose logits exist at once: x vocabulary x 4 bytes, a few times over."
    )
    shutdown_grace_s: float = _option(30.0, "How long accepted requests may take after SIGTERM.")
    log_level: str = _option("info", "debug, info, warning or error.")

    def __post_init__(self) -> None:
        """Check the fields against each other.

        Raises:
            ValueError: a field is out of range or does not fit another.
        """
        if not self.model:
            raise ValueError("--model is required: a hub id, a local folder or a .gguf file")
        if self.dtype not in ("auto", "bfloat16", "float16", "float32"):
            raise ValueError(
                f"dtype must be auto, bfloat16, float16 or float32, got {self.dtype!r}"
            )
        if self.log_level not in ("debug", "info", "warning", "error"):
            raise ValueError(
                f"log_level must be debug, info, warning or error, got {self.log_level!r}"
            )
        if self.attn_implementation == "eager":
            raise ValueError(
                "attn_implementation eager holds a [length, length] matrix per head; use sdpa"
            )
        for name in ("max_batch_tokens", "max_request_tokens", "max_top_k", "head_chunk_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1, got {getattr(self, name)}")
        if self.max_queue_tokens < self.max_request_tokens:
            raise ValueError(
                f"max_queue_tokens ({self.max_queue_tokens}) must be >= max_request_tokens "
                f"({self.max_request_tokens}): the largest request could never be admitted"
            )
        if not 0 <= self.port < 65_536 or not -1 <= self.http_port < 65_536:
            raise ValueError(
                f"port ({self.port}) and http_port ({self.http_port}) must be below 65536"
            )
