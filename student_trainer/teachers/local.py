"""A teacher in this process: the oracle of the remote one, and the pattern people ask for.

The model is loaded on every rank and, when ranks train together, sharded over them
with FSDP2 beside the student. It runs inside `result`, on the training thread, because
its all-gathers must come in the same order on every rank. Targets go through the same
codec as over the wire, so both sources give equal losses.

What it costs is why the remote one exists: at the founding shape 31.6 GiB a rank
instead of 10 (bench/README.md).
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.utils.rnn import pad_sequence

from distill_wire.causal_lm import CausalLMParts, check_parts, head_function, split_causal_lm
from distill_wire.handshake import describe_teacher
from distill_wire.head import TeacherHead, head_of
from distill_wire.scoring import encode_answer
from distill_wire.targets import decode_target
from distill_wire.types import Limits, ScoreRequest, TeacherDescription, Timings
from student_trainer.teachers.source import ScoredTarget, name_samples

_NO_LIMIT = 2**31 - 1


@dataclass(frozen=True, kw_only=True, eq=False)
class _Question:
    """What the teacher's forward needs; a class, so that FSDP2 does not cast its tensors."""

    request: ScoreRequest
    positions_N: Tensor
    tokens_T: Tensor


class LocalTeacher:
    """Scores rows with a causal LM in this process."""

    def __init__(
        self,
        model: Any,
        *,
        token_map: tuple[str, ...],
        device: torch.device,
        is_sharded: bool,
        head_chunk_tokens: int,
        keeps_head: bool = True,
    ) -> None:
        """Take over a loaded model.

        Args:
            model: a transformers causal LM on the host; it is frozen and moved.
            token_map: its tokens by id, () if unknown.
            device: where it runs.
            is_sharded: shard it over all ranks with FSDP2.
            head_chunk_tokens: positions whose logits exist at once.
            keeps_head: let `fetch_head` give the head; when sharded, each rank keeps it whole.
        """
        self._keeps_head = keeps_head
        self._model = model.eval().requires_grad_(False)
        self._token_map = token_map
        self._device = device
        self._is_sharded = is_sharded
        self._head_chunk_tokens = head_chunk_tokens
        self._description: TeacherDescription | None = None
        self._output_head: TeacherHead | None = None

    def connect(self) -> TeacherDescription:
        """Place the model, shard it and say who it is; later calls only answer."""
        if self._description is None:
            self._model.to(self._device)
            parts = split_causal_lm(self._model)
            check_parts(self._model, parts, device=self._device)
            config = self._model.config
            positions = int(getattr(config.get_text_config(), "max_position_embeddings", 0))
            self._description = describe_teacher(
                self._model,
                parts,
                token_map=self._token_map,
                model_id=config.name_or_path,
                revision=None,
                limits=Limits(
                    max_request_tokens=_NO_LIMIT,
                    max_row_tokens=positions or _NO_LIMIT,
                    max_top_k=_NO_LIMIT,
                    max_answer_bytes=_NO_LIMIT,
                ),
            )
            self._bind_scoring_forward(parts, self._description.vocab_size)
            head = head_of(parts, vocab_size=self._description.vocab_size)
            if self._keeps_head:
                # The parameters become shards, which the student could not read.
                self._output_head = head.clone() if self._is_sharded else head
            if self._is_sharded:
                _shard(self._model)
        return self._description

    def token_map(self) -> tuple[str, ...]:
        """Give the tokens by id."""
        return self._token_map

    def fetch_head(self) -> TeacherHead:
        """Give the output head."""
        self.connect()
        if self._output_head is None:
            raise RuntimeError("this teacher was built with keeps_head=False and gives no head")
        return self._output_head

    def submit(self, request: ScoreRequest, *, sample_ids: tuple[str, ...]) -> _LocalPending:
        """Remember a request; it runs when its result is asked for."""
        return _LocalPending(self, request, sample_ids)

    def close(self) -> None:
        """Nothing is under way."""

    def score(self, request: ScoreRequest) -> ScoredTarget:
        """Run the teacher on a request, now."""
        start = time.perf_counter()
        description = self.connect()
        lengths = request.row_lengths_R.tolist()
        rows = torch.from_numpy(request.token_ids_T).long().split(lengths)
        input_ids = pad_sequence(list(rows), batch_first=True).to(self._device)
        attention_mask = pad_sequence(
            [torch.ones(length, dtype=torch.long) for length in lengths], batch_first=True
        ).to(self._device)
        wanted_BT = pad_sequence(
            list(torch.from_numpy(request.position_mask_T).split(lengths)), batch_first=True
        )
        question = _Question(
            request=request,
            positions_N=wanted_BT.flatten().nonzero().squeeze(-1).to(self._device),
            tokens_T=attention_mask.flatten().nonzero().squeeze(-1),
        )
        encoded = self._model(input_ids=input_ids, attention_mask=attention_mask, question=question)
        target = decode_target(encoded, request, description)
        timings = Timings(
            forward_s=time.perf_counter() - start,
            batch_tokens=request.num_tokens,
            batch_requests=1,
        )
        return ScoredTarget(target=target, answer_bytes=0, timings=timings)

    def _bind_scoring_forward(self, parts: CausalLMParts, vocab_size: int) -> None:
        head = head_function(parts, vocab_size=vocab_size)

        @torch.no_grad()
        def forward(
            *, input_ids: Tensor, attention_mask: Tensor, question: _Question
        ) -> dict[str, Tensor]:
            spec = question.request.target
            output = parts.trunk(
                input_ids=input_ids,
                attention_mask=attention_mask,
                use_cache=False,
                output_hidden_states=bool(spec.hidden_layers),
            )
            states_N = question.tokens_T if spec.has_all_states else question.positions_N
            return encode_answer(
                question.request,
                output.last_hidden_state.flatten(0, 1)[question.positions_N],
                head=head,
                vocab_size=vocab_size,
                states={
                    layer: output.hidden_states[layer].flatten(0, 1)[states_N]
                    for layer in spec.hidden_layers
                },
                chunk_tokens=self._head_chunk_tokens,
            )

        self._model.forward = forward


class _LocalPending:
    def __init__(
        self, teacher: LocalTeacher, request: ScoreRequest, sample_ids: tuple[str, ...]
    ) -> None:
        self._teacher = teacher
        self._request = request
        self._sample_ids = sample_ids

    def result(self) -> ScoredTarget:
        try:
            return self._teacher.score(self._request)
        except (ValueError, RuntimeError) as exc:
            exc.add_note(f"in the teacher's forward; {name_samples(self._sample_ids)}")
            raise


def _shard(model: nn.Module) -> None:
    names = set(getattr(model, "_no_split_modules", None) or ())
    for module in list(model.modules()):
        if type(module).__name__ in names:
            fully_shard(module)
    fully_shard(model)
