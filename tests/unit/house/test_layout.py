"""Oracle: the files themselves, read as text. What the linters cannot say about the house."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = ("teacher_server", "student_trainer", "protos/distill_wire")


def package_files(pattern: str) -> list[str]:
    """List them relative to the root, so that a test's name is the file's."""
    return sorted(
        str(path.relative_to(ROOT)) for name in PACKAGES for path in (ROOT / name).rglob(pattern)
    )


def hand_written_files() -> list[str]:
    return [name for name in package_files("*.py") if "_pb2" not in name]


@pytest.mark.parametrize("package", PACKAGES)
def test_every_package_is_there_and_typed(package: str) -> None:
    assert (ROOT / package / "__init__.py").is_file()
    assert (ROOT / package / "py.typed").is_file()


@pytest.mark.parametrize("name", hand_written_files())
def test_every_module_says_what_it_is(name: str) -> None:
    assert ast.get_docstring(ast.parse((ROOT / name).read_bytes())), f"{name} has no docstring"


def test_no_module_is_called_utils() -> None:
    found = [name for name in hand_written_files() if Path(name).stem in ("util", "utils")]

    assert found == [], "name each module after what it holds"


def test_every_proto_has_its_stubs() -> None:
    protos = package_files("*.proto")

    assert protos
    for proto in protos:
        for suffix in ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py"):
            assert (ROOT / (proto.removesuffix(".proto") + suffix)).is_file(), proto + suffix


@pytest.mark.parametrize("name", package_files("*_pb2.py"))
def test_message_stubs_are_in_the_style_that_any_runtime_imports(name: str) -> None:
    text = (ROOT / name).read_text()

    assert "# Protobuf Python Version: 4.25." in text
    assert "runtime_version" not in text, f"{name} refuses older runtimes; run make protos"


@pytest.mark.parametrize("name", package_files("*_pb2_grpc.py"))
def test_service_stubs_ask_for_no_newer_grpc(name: str) -> None:
    assert "_version" not in (ROOT / name).read_text(), "made by a newer grpcio-tools"


def test_the_changelog_speaks_of_the_wire() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()

    assert re.search(r"^#+ Wire$", text, re.MULTILINE)


@pytest.mark.parametrize("module", ["distill_wire.frame", "distill_wire.errors"])
def test_frames_and_errors_load_without_torch(module: str) -> None:
    # A fresh interpreter: this one may have torch loaded already.
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    command = [sys.executable, "-c", code]

    done = subprocess.run(command, env={"PYTHONPATH": str(ROOT / "protos")}, timeout=60)

    assert done.returncode == 0
