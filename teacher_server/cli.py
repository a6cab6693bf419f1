"""`teacher-server`: serve a teacher, or ask one how it is.

    teacher-server serve --model PATH_OR_HUB_ID --dtype bfloat16 --port 50051
    teacher-server health --url localhost:50051

Every flag of `serve` has a variable, TEACHER_<FLAG>; the flag wins. A user's mistake is
one line on stderr and exit code 2, a fault while serving exit code 1.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import sys
import threading
from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

from teacher_server.config import ServeConfig
from teacher_server.scheduling.dispatcher import DEVICE_THREAD

USAGE = """usage: teacher-server COMMAND [options]

  serve   load a model and serve it: --model PATH_OR_HUB_ID
  health  exit 0 if the server at --url can serve, 1 if not

teacher-server COMMAND --help lists a command's options."""

ENVIRONMENT_PREFIX = "TEACHER_"


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
    commands = {"serve": _serve, "health": _health}
    if command not in commands:
        return _fail(f"command {command!r} is unknown; there are {', '.join(commands)}")
    return commands[command](arguments)


def parse_serve_config(
    arguments: Sequence[str], environment: Mapping[str, str] = os.environ
) -> ServeConfig:
    """Fill the configuration from flags and variables.

    Raises:
        ValueError: a flag is unknown or a value is refused.
    """
    from transformers import HfArgumentParser

    kinds: list[Any] = [ServeConfig]
    parser = HfArgumentParser(kinds, prog="teacher-server serve")
    defaults = {
        field.name: environment[name]
        for field in dataclasses.fields(ServeConfig)
        if (name := ENVIRONMENT_PREFIX + field.name.upper()) in environment
    }
    # argparse converts defaults that are strings as it converts flags.
    parser.set_defaults(**defaults)
    config, extra = parser.parse_args_into_dataclasses(
        list(arguments), return_remaining_strings=True, look_for_args_file=False
    )
    if extra:
        raise ValueError(
            f"unknown arguments {' '.join(extra)}; teacher-server serve --help lists the flags"
        )
    assert isinstance(config, ServeConfig)
    return config


def _serve(arguments: list[str]) -> int:
    try:
        config = parse_serve_config(arguments)
    except ValueError as exc:
        return _fail(str(exc))
    logging.basicConfig(
        level=config.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    from teacher_server.app import PortTaken, serve

    try:
        fault = asyncio.run(serve(config))
    except PortTaken as exc:
        return _fail(str(exc))
    if fault is None:
        _leave_if_still_loading()
        return 0
    # What goes wrong before a request was ever taken is what the user asked for.
    if isinstance(fault, ValueError | OSError):
        return _fail(f"{config.model} cannot be served: {_first_line(fault)}")
    logging.getLogger(__name__).critical("the teacher failed", exc_info=fault)
    return 1


def _leave_if_still_loading() -> None:
    """End the process under a device thread that cannot be stopped.

    A signal while the model loads: the interpreter would take torch apart under the thread's
    feet, and C++ would abort.
    """
    if any(thread.name == DEVICE_THREAD for thread in threading.enumerate()):
        logging.shutdown()
        os._exit(0)


def _health(arguments: list[str]) -> int:
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    from distill_wire.transport import channel_options

    parser = ArgumentParser(prog="teacher-server health")
    parser.add_argument("--url", default="localhost:50051", help="host:port of the server")
    parser.add_argument("--timeout-s", type=float, default=5.0)
    options = parser.parse_args(arguments)
    question = health_pb2.HealthCheckRequest(service="distill_wire.v1.Teacher")
    with grpc.insecure_channel(options.url, options=channel_options()) as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(question, timeout=options.timeout_s)
        except grpc.RpcError as exc:
            print(f"{options.url}: {exc.code().name}: {exc.details()}", file=sys.stderr)
            return 1
    status = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
    print(f"{options.url}: {status}")
    return 0 if answer.status == health_pb2.HealthCheckResponse.SERVING else 1


def _first_line(exc: BaseException) -> str:
    return str(exc).strip().split("\n")[0]


def _fail(message: str) -> int:
    print(f"teacher-server: {message}", file=sys.stderr)
    return 2
