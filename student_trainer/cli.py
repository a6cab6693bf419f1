"""`student-trainer`: the commands, their files and flags, and how errors end a run.

    student-trainer train --config recipe.yaml --any_field value
    student-trainer demo --output_dir out/demo

A user's mistake (a config key, a missing file, a teacher that is not there) is one line
on stderr and exit code 2; anything else keeps its traceback.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import signal
import sys
import time
from argparse import ArgumentParser
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn

USAGE = """usage: student-trainer COMMAND [options]

  train   distil a student: --config recipe.yaml --any_field value
  demo    a real teacher over gRPC and two FSDP ranks learning from it, on this machine

student-trainer COMMAND --help lists a command's options."""


_SPEAK_AFTER_S = 3.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and give the process's exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    command = arguments.pop(0) if arguments else "--help"
    if command in ("-h", "--help"):
        print(USAGE)
        return 0
    if command == "--version":
        print(version("teacher-serving"))
        return 0
    commands = {"train": _train, "demo": _demo}
    if command not in commands:
        return _fail(f"command {command!r} is unknown; there are {', '.join(commands)}")
    _set_up_logging()
    # As Ctrl-C: whoever started other programs ends them on the way out.
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        return commands[command](arguments)
    except KeyboardInterrupt:
        print("student-trainer: interrupted", file=sys.stderr)
        return 130


def _interrupt(number: int, frame: object) -> NoReturn:
    raise KeyboardInterrupt


def _train(arguments: list[str]) -> int:
    from distill_wire.errors import DistillError

    try:
        args, model_args, data_args, launch = parse_train_config(arguments)
        if "LOCAL_RANK" not in os.environ and (args.fsdp or (launch.num_processes or 1) > 1):
            return _run_ranks(launch.num_processes or 1, arguments)
        from student_trainer.app import train
        from student_trainer.parallel import end_with_launcher

        end_with_launcher()
        train(args, model_args, data_args)
    except (ValueError, OSError, DistillError) as exc:
        if os.environ.get("DISTILL_TRACEBACK"):
            raise
        return _fail(f"{type(exc).__name__}: {exc}")
    return 0


def _is_cpu(device: str) -> bool:
    import torch

    if device not in ("auto", "cpu", "cuda"):
        raise ValueError(f"device must be auto, cpu or cuda, got {device!r}")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device cuda was asked for, but torch finds no CUDA device; use cpu")
    return device == "cpu"


def _run_ranks(num_processes: int, arguments: list[str]) -> int:
    """Start this command once per rank under torchrun, which FSDP needs even for one.

    A rank that fails has said why in one line; torchrun's own account of it would bury that.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    # One thread a rank is torchrun's own default; on CPUs the ranks share the cores fairly.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // num_processes)))
    command = ["-m", "student_trainer", "train", *arguments]
    launcher = ["--standalone", f"--nproc-per-node={num_processes}"]
    try:
        run(parse_args([*launcher, *command]))
    except ChildFailedError as exc:
        rank, failure = exc.get_first_failure()
        if failure.exitcode > 0:
            return int(failure.exitcode)
        return _fail(f"rank {rank} was ended by signal {-failure.exitcode}", code=1)
    except SignalException as exc:
        print(f"student-trainer: ended by signal {int(exc.sigval)}", file=sys.stderr)
        return 128 + int(exc.sigval)
    return 0


def _demo(arguments: list[str]) -> int:
    parser = ArgumentParser(
        prog="student-trainer demo", epilog="Any flag of student-trainer train may follow."
    )
    parser.add_argument("--output_dir", type=Path, default=Path("out/demo"))
    parser.add_argument("--config", type=Path, default=Path("deploy/recipes/demo.yaml"))
    parser.add_argument("--device", default="cpu", help="of teacher and student: cpu or cuda")
    options, overrides = parser.parse_known_args(arguments)
    if not options.config.is_file():
        return _fail(
            f"there is no recipe {options.config}; run from the repository's root, or name one "
            f"with --config"
        )
    from student_trainer.demo import run_demo

    return run_demo(**vars(options), overrides=overrides)


def parse_train_config(arguments: Sequence[str]) -> tuple[Any, ...]:
    """Give the training, model, data and launch configuration of `train`.

    Raises:
        ValueError: as `parse_config`.
    """
    from student_trainer.config import DataConfig, DistillationConfig, LaunchConfig, ModelConfig

    return parse_config((DistillationConfig, ModelConfig, DataConfig, LaunchConfig), arguments)


def parse_config(types: Sequence[Any], arguments: Sequence[str]) -> tuple[Any, ...]:
    """Fill dataclasses from `--config file.yaml` and flags; flags win.

    Raises:
        ValueError: the file or a flag names a field that does not exist, or a value is
            refused by its dataclass.
    """
    import yaml
    from transformers import HfArgumentParser

    config_parser = ArgumentParser(add_help=False)
    config_parser.add_argument("--config", type=Path)
    config_parser.add_argument("--device")
    known, rest = config_parser.parse_known_args(list(arguments))
    parser = HfArgumentParser(
        list(types),
        prog="student-trainer train",
        description="--config FILE.yaml may set any of these fields; flags win over the file.",
    )
    fields = {field.name for kind in types for field in dataclasses.fields(kind) if field.init}
    if known.config is not None:
        try:
            values = yaml.safe_load(known.config.read_text(encoding="utf-8")) or {}
        except yaml.YAMLError as exc:
            raise ValueError(f"{known.config} is not YAML: {' '.join(str(exc).split())}") from exc
        if not isinstance(values, dict):
            raise ValueError(
                f"{known.config} holds {type(values).__name__}, expected key: value lines"
            )
        unknown = sorted(set(values) - fields)
        if unknown:
            raise ValueError(
                f"{known.config} has unknown keys {', '.join(unknown)}; "
                f"student-trainer train --help lists the fields"
            )
        parser.set_defaults(**values)
    device = known.device or parser.get_default("device")
    if device is not None:
        parser.set_defaults(device=device, use_cpu=_is_cpu(device))
    for action in parser._actions:
        if action.dest == "resume_from_checkpoint":
            action.nargs, action.const = "?", "last"
    *parsed, extra = parser.parse_args_into_dataclasses(
        rest, return_remaining_strings=True, look_for_args_file=False
    )
    if extra:
        raise ValueError(
            f"unknown arguments {' '.join(extra)}; student-trainer train --help lists the fields"
        )
    return tuple(parsed)


def _set_up_logging() -> None:
    """Rank 0 speaks for all: the others only say what ends them."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    is_first = os.environ.get("RANK", "0") == "0"
    logging.getLogger("student_trainer").setLevel(logging.INFO if is_first else logging.ERROR)


def _fail(message: str, *, code: int = 2) -> int:
    if os.environ.get("RANK", "0") != "0":
        # Usually all ranks fail alike. Rank 0 says it, torchrun then ends the others; one that
        # fails alone is still here a little later.
        time.sleep(_SPEAK_AFTER_S)
    print(f"student-trainer: {message}", file=sys.stderr)
    return code
