"""What a distillation run can be told, in the dataclasses transformers users know.

`DistillationConfig` extends `TrainingArguments`; `ModelConfig` and `DataConfig` follow
TRL's names. One YAML file and the command line fill all of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import TrainingArguments

from distill_wire.codecs import LossKind, check_loss, codec_by_name
from distill_wire.errors import RequestInvalid
from distill_wire.types import CodecId, StateCodecId, TargetSpec
from student_trainer.hidden_states import LayerMap, parse_layer_map
from student_trainer.objective import HIDDEN_LOSSES, ObjectiveConfig


def _option(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass
class DistillationConfig(TrainingArguments):
    """Training arguments of a distillation run.

    The data's rows must reach the collator whole, so `remove_unused_columns` is off.
    """

    teacher_url: str | None = _option(
        None, "host:port of a teacher-server. Excludes teacher_model_name_or_path."
    )
    teacher_model_name_or_path: str | None = _option(
        None,
        "Teacher to load in this process instead, sharded beside the student under FSDP. "
        "Costs its memory on every rank; a remote one does not.",
    )
    teacher_dtype: str = _option("auto", "Dtype of a teacher in this process.")
    teacher_codec: str = _option(
        "hidden8",
        "How the teacher's distribution travels: hidden8 (any loss, D + 2 bytes a token), "
        "threshold (forward KL, about 33 bytes), topk (k best + tail mass) or dense (2V bytes).",
    )
    teacher_top_k: int = _option(64, "Entries kept per position by the topk codec.")
    teacher_num_draws: int = _option(
        50, "N of the threshold codec: probabilities from 1/N on are kept, others drawn."
    )
    teacher_eval_codec: str | None = _option(
        None,
        "Codec during evaluation, teacher_codec by default; hidden8 and dense give the whole KL.",
    )
    teacher_prefetch: int = _option(
        2,
        "Micro-batches whose requests are under way while one trains; 0 = wait for each. Raise it "
        "while teacher_wait_fraction is above 0 and the teacher is not busy.",
    )
    teacher_connect_timeout_s: float = _option(
        60.0, "Seconds nothing may answer at teacher_url before the run ends."
    )
    teacher_ready_timeout_s: float = _option(
        1800.0, "Seconds a teacher that answers may go on loading its model."
    )
    teacher_timeout_s: float = _option(300.0, "Deadline of one attempt of one request, in seconds.")
    teacher_max_outage_s: float = _option(
        120.0, "Seconds a request is tried again before the run ends."
    )
    teacher_check_token_map: bool = _option(
        True, "Refuse a teacher whose ids mean other tokens. Turn off only if you know better."
    )
    temperature: float = _option(
        1.0,
        "Divisor of both sides' logits in the distillation term; its square multiplies the term, "
        "once, and is part of kd_loss.",
    )
    beta: float = _option(
        0.0, "0 = forward KL(teacher || student), 1 = reverse KL, between = JSD(beta)."
    )
    alpha_kd: float = _option(1.0, "Weight of the distillation term.")
    alpha_ce: float = _option(0.0, "Weight of the cross-entropy with the data's own tokens.")
    alpha_hidden: float = _option(0.0, "Weight of the hidden-state term.")
    hidden_loss: str = _option(
        "mse", "mse of RMS-normalised states, or cosine (half of it, up to rounding)."
    )
    hidden_layers: str = _option(
        "",
        "Layers of the hidden-state term: the teacher's, 8,16, or pairs with the student's, "
        "8:5,16:10. Empty = one at two thirds of the depth.",
    )
    hidden_codec: str = _option(
        "mid8", "How those states travel: mid8 (D + 2 bytes a layer) or mid4 (0.5625 D)."
    )
    loss_chunk_positions: int = _option(
        512, "Positions whose student logits exist at once: x V x 4 bytes, a few times over."
    )
    remove_unused_columns: bool = _option(
        False, "Must stay off: the collator needs the columns the model does not name."
    )

    def __post_init__(self) -> None:
        """Check the distillation fields and those of transformers.

        Raises:
            ValueError: fields are out of range or do not fit together.
        """
        # accelerate asks for CPU ranks by name; without it FSDP finds no process group.
        self.use_cpu = self.use_cpu or not torch.accelerator.is_available()
        super().__post_init__()  # type: ignore[no-untyped-call]
        if self.teacher_url and "," in self.teacher_url:
            raise ValueError(
                f"teacher_url {self.teacher_url!r} names several; this release talks to one teacher"
            )
        if self.teacher_url and self.teacher_model_name_or_path:
            raise ValueError(
                "teacher_url and teacher_model_name_or_path are both set; keep one teacher"
            )
        if self.remove_unused_columns:
            raise ValueError(
                "remove_unused_columns must be false: it drops the sample ids before the collator"
            )
        alphas = (self.alpha_kd, self.alpha_ce, self.alpha_hidden)
        if min(alphas) < 0 or sum(alphas) == 0:
            raise ValueError(
                f"alpha_kd ({self.alpha_kd}), alpha_ce ({self.alpha_ce}) and alpha_hidden "
                f"({self.alpha_hidden}) must be >= 0, and one of them > 0"
            )
        if self.alpha_kd + self.alpha_hidden > 0 and not self.has_teacher:
            raise ValueError(
                "alpha_kd or alpha_hidden > 0 needs a teacher: set teacher_url or "
                "teacher_model_name_or_path"
            )
        if self.hidden_loss not in HIDDEN_LOSSES:
            raise ValueError(
                f"hidden_loss must be {' or '.join(HIDDEN_LOSSES)}, got {self.hidden_loss!r}"
            )
        parse_layer_map(self.hidden_layers)
        if not 0.0 <= self.beta <= 1.0:
            raise ValueError(f"beta must be in [0, 1], got {self.beta}")
        if self.teacher_prefetch < 0 or self.loss_chunk_positions < 1:
            raise ValueError(
                f"teacher_prefetch ({self.teacher_prefetch}) must be >= 0 and loss_chunk_positions "
                f"({self.loss_chunk_positions}) >= 1"
            )
        if self.alpha_kd > 0:
            check_loss(codec_by_name(self.teacher_codec), _loss_kind(self.beta))
        self.train_target_spec()
        self.eval_target_spec()

    @property
    def has_teacher(self) -> bool:
        """Whether any teacher is named."""
        return bool(self.teacher_url or self.teacher_model_name_or_path)

    def train_target_spec(self) -> TargetSpec:
        """What the teacher is asked for in training, hidden layers left out."""
        return self._target_spec(self.teacher_codec, self.temperature)

    def eval_target_spec(self) -> TargetSpec:
        """What it is asked for in evaluation: always at temperature 1."""
        return self._target_spec(self.teacher_eval_codec or self.teacher_codec, 1.0)

    @property
    def needs_teacher_head(self) -> bool:
        """Whether a target is hidden states, which the teacher's head turns into logits."""
        specs = (self.train_target_spec(), self.eval_target_spec())
        return any(spec.codec is CodecId.HIDDEN8 for spec in specs)

    def objective_config(
        self, *, vocab_size: int, layer_map: LayerMap = (), is_evaluation: bool = False
    ) -> ObjectiveConfig:
        """What a forward pass minimises; an evaluation measures the forward KL alone."""
        return ObjectiveConfig(
            alpha_kd=self.alpha_kd,
            alpha_ce=self.alpha_ce,
            alpha_hidden=self.alpha_hidden,
            hidden_loss=self.hidden_loss,
            layer_map=() if is_evaluation else layer_map,
            beta=0.0 if is_evaluation else self.beta,
            chunk_positions=self.loss_chunk_positions,
            vocab_size=vocab_size,
        )

    def _target_spec(self, codec_name: str, temperature: float) -> TargetSpec:
        codec = codec_by_name(codec_name)
        try:
            return TargetSpec(
                codec=codec.id,
                temperature=temperature,
                top_k=self.teacher_top_k if codec.id is CodecId.TOPK else 0,
                num_draws=self.teacher_num_draws if codec.id is CodecId.THRESHOLD else 0,
                state_codec=_state_codec(self.hidden_codec),
            )
        except RequestInvalid as exc:
            raise ValueError(str(exc)) from exc


def _state_codec(name: str) -> StateCodecId:
    names = {codec.name.lower(): codec for codec in StateCodecId}
    if name not in names:
        raise ValueError(f"hidden_codec must be {' or '.join(names)}, got {name!r}")
    return names[name]


def _loss_kind(beta: float) -> LossKind:
    if beta in (0.0, 1.0):
        return LossKind.REVERSE_KL if beta else LossKind.FORWARD_KL
    return LossKind.JSD


@dataclass
class ModelConfig:
    """The student, under TRL's names."""

    model_name_or_path: str = _option("", "Student: hub id or local folder. Required.")
    model_revision: str | None = _option(None, "Hub revision of the student.")
    dtype: str = _option("auto", "Dtype the student's weights are loaded in.")
    attn_implementation: str | None = _option(None, "Attention kernel of the student.")
    trust_remote_code: bool = _option(False, "Run code that comes with the student's checkpoint.")
    use_peft: bool = _option(False, "Train LoRA adapters instead of all weights.")
    lora_r: int = _option(16, "Rank of the adapters.")
    lora_alpha: int = _option(32, "Scale numerator of the adapters.")
    lora_dropout: float = _option(0.0, "Dropout before the adapters.")
    lora_target_modules: list[str] = field(
        default_factory=lambda: ["all-linear"],
        metadata={"help": "Layers that get adapters: names, or all-linear."},
    )


@dataclass
class DataConfig:
    """The data, under TRL's names."""

    dataset_name: str = _option(
        "", "python-stdlib, a .jsonl/.json/.parquet file, or any datasets id. Required."
    )
    dataset_config: str | None = _option(None, "Configuration of a hub data set.")
    dataset_train_split: str = _option("train", "Split to train on.")
    dataset_test_split: str = _option("test", "Split to evaluate on; empty = no evaluation.")
    eval_dataset_name: str | None = _option(
        None, "Where the evaluation split comes from, if not from dataset_name."
    )
    max_length: int = _option(
        1024, "Tokens of a row; longer ones are cut on the right and counted."
    )
    num_train_samples: int | None = _option(None, "Use only the first samples for training.")
    num_eval_samples: int | None = _option(None, "Use only the first samples for evaluation.")


@dataclass
class LaunchConfig:
    """How many ranks to start, and on what."""

    device: str = _option("auto", "auto (an accelerator if there is one), cpu or cuda.")

    num_processes: int | None = _option(
        None,
        "Ranks to start on this machine with torchrun; leave unset under torchrun or accelerate.",
    )
