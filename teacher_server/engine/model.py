"""Loads a teacher and says who it is.

Any causal LM of transformers: a hub id, a local folder, or a GGUF file, which is
unpacked to the asked dtype. A teacher with missing weights would teach noise without
an error, so it is refused here by the names of the missing tensors.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from distill_wire.causal_lm import CausalLMParts, check_parts, split_causal_lm
from distill_wire.handshake import describe_teacher, token_map_of
from distill_wire.types import Limits, TeacherDescription

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, eq=False)
class LoadedTeacher:
    """A teacher ready to run.

    Attributes:
        parts: trunk and head, on `device`.
        device: where it runs.
        description: its identity and limits.
        token_map: tokens by id, () without a tokenizer.
    """

    parts: CausalLMParts
    device: torch.device
    description: TeacherDescription
    token_map: tuple[str, ...]


def load_teacher(
    model: str,
    *,
    tokenizer: str | None,
    revision: str | None,
    served_model_name: str | None,
    dtype: str,
    device: str,
    attn_implementation: str,
    trust_remote_code: bool,
    max_row_tokens: int | None,
    max_request_tokens: int,
    max_top_k: int,
    max_answer_bytes: int,
) -> LoadedTeacher:
    """Load a causal LM for scoring.

    Raises:
        ValueError: weights are missing, or the model cannot be taken apart.
        OSError: there is no such model.
    """
    place = _pick_device(device)
    files = _locate(model, revision=revision)
    options: dict[str, Any] = files | {
        "dtype": dtype if dtype == "auto" else getattr(torch, dtype),
        "attn_implementation": attn_implementation,
        "trust_remote_code": trust_remote_code,
        "output_loading_info": True,
    }
    if "gguf_file" in files:
        options["quantization_config"] = GgufConfig(dequantize=True)
    # With output_loading_info it gives a pair, which its type does not say.
    loaded, report = cast(Any, AutoModelForCausalLM.from_pretrained(**options))
    missing = sorted(report["missing_keys"])
    if missing:
        raise ValueError(
            f"{model} lacks {len(missing)} weights, first {', '.join(missing[:5])}; "
            f"a complete checkpoint of {type(loaded).__name__} is needed"
        )
    loaded.eval().requires_grad_(False).to(place)
    parts = split_causal_lm(loaded)
    check_parts(loaded, parts, device=place)
    tokens = _load_token_map(tokenizer, files, trust_remote_code=trust_remote_code)
    config = loaded.config.get_text_config()
    positions = int(getattr(config, "max_position_embeddings", 0)) or max_request_tokens
    description = describe_teacher(
        loaded,
        parts,
        token_map=tokens,
        model_id=served_model_name or model,
        revision=revision,
        limits=Limits(
            max_request_tokens=max_request_tokens,
            max_row_tokens=min(positions, max_row_tokens or positions, max_request_tokens),
            max_top_k=max_top_k,
            max_answer_bytes=max_answer_bytes,
        ),
    )
    logger.info("loaded %s on %s: %s", model, place, description)
    return LoadedTeacher(parts=parts, device=place, description=description, token_map=tokens)


def _pick_device(device: str) -> torch.device:
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"device {device} was asked for, but torch finds no CUDA device; use cpu")
    return torch.device(device)


def _locate(model: str, *, revision: str | None) -> dict[str, Any]:
    """Give the arguments of `from_pretrained` for an id, a folder or a GGUF file."""
    path = Path(model)
    if path.suffix == ".gguf":
        if not path.is_file():
            raise FileNotFoundError(f"there is no GGUF file {model}")
        return {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    if path.is_dir():
        gguf_files = sorted(path.glob("*.gguf"))
        if not (path / "config.json").is_file() and len(gguf_files) == 1:
            return {"pretrained_model_name_or_path": model, "gguf_file": gguf_files[0].name}
        return {"pretrained_model_name_or_path": model}
    if path.is_absolute() or model.startswith((".", "~")) or model.count("/") > 1:
        raise FileNotFoundError(f"there is no model folder {model}")
    return {"pretrained_model_name_or_path": model, "revision": revision or "main"}


def _load_token_map(
    tokenizer: str | None, files: dict[str, Any], *, trust_remote_code: bool
) -> tuple[str, ...]:
    where = {"pretrained_model_name_or_path": tokenizer} if tokenizer else files
    try:
        loaded = AutoTokenizer.from_pretrained(**where, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as exc:
        if tokenizer:
            raise ValueError(f"no tokenizer can be loaded from {tokenizer}: {exc}") from exc
        logger.warning(
            "%s has no tokenizer, so students cannot check that ids mean the same: %s",
            files["pretrained_model_name_or_path"],
            exc,
        )
        return ()
    return token_map_of(loaded)
