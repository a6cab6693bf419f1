"""Regenerate the stubs and compare them with the committed ones, or write them.

The generator is old on purpose. grpcio-tools 1.62 writes code in the style of
protobuf 4.25, which every runtime from 5.29 to the newest 7.x imports; from 5.26 on
generated code checks the runtime's version and refuses an older one. It lives in a
venv of its own, because it needs protobuf < 5 and we run on a later one.

Uses the standard library alone, so `make protos` needs no torch.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROTOS = ROOT / "protos"
VENV = ROOT / ".venv-protos"
# grpcio-tools 1.62 imports pkg_resources, which setuptools 81 removed.
GENERATOR = ["grpcio-tools==1.62.3", "setuptools<81"]
NEWEST_PYTHON = (3, 12)
"""The last Python for which that generator has wheels."""


def find_python() -> str | None:
    """Return an interpreter that the generator has wheels for."""
    probe = f"import sys; sys.exit(not (3, 8) <= sys.version_info[:2] <= {NEWEST_PYTHON})"
    for name in (sys.executable, "python3", "python3.12", "python3.11"):
        try:
            if subprocess.run([name, "-c", probe], capture_output=True).returncode == 0:
                return name
        except FileNotFoundError:
            continue
    return None


def install_generator(python: str) -> None:
    """Make the generator's venv, unless the same generator is there already."""
    stamp = VENV / "generator.txt"
    wanted = "\n".join(GENERATOR)
    if stamp.exists() and stamp.read_text() == wanted:
        return
    pip = [VENV / "bin/python", "-m", "pip", "--disable-pip-version-check"]
    subprocess.run([python, "-m", "venv", "--clear", VENV], check=True)
    subprocess.run([*pip, "install", "--quiet", "--only-binary=:all:", *GENERATOR], check=True)
    stamp.write_text(wanted)


def generate(folder: Path) -> None:
    """Write the stubs of every .proto below `folder`."""
    outputs = [f"--{kind}_out={folder}" for kind in ("python", "pyi", "grpc_python")]
    sources = sorted(str(path.relative_to(PROTOS)) for path in PROTOS.rglob("*.proto"))
    protoc = [VENV / "bin/python", "-m", "grpc_tools.protoc"]
    subprocess.run([*protoc, f"-I{PROTOS}", *outputs, *sources], check=True)


def find_differences(fresh: Path) -> list[str]:
    """Name each stub that differs from the fresh one, is missing, or has lost its .proto."""
    names = {
        path.relative_to(folder)
        for folder in (fresh, PROTOS)
        for pattern in ("*_pb2.py", "*_pb2.pyi", "*_pb2_grpc.py")
        for path in folder.rglob(pattern)
    }
    differences = []
    for name in sorted(names):
        if not (fresh / name).exists():
            differences.append(f"protos/{name} is committed, but no .proto makes it; delete it")
        elif not (PROTOS / name).exists():
            differences.append(f"protos/{name} is missing; run make protos")
        elif (fresh / name).read_bytes() != (PROTOS / name).read_bytes():
            differences.append(f"protos/{name} differs from what its .proto makes; run make protos")
    return differences


def main() -> int:
    """Check, or with --write regenerate in place."""
    parser = argparse.ArgumentParser(description="Compare the committed stubs with fresh ones.")
    parser.add_argument("--write", action="store_true", help="regenerate in place")
    is_write = parser.parse_args().write

    python = find_python()
    if python is None:
        newest = ".".join(map(str, NEWEST_PYTHON))
        print(
            f"stubs NOT {'WRITTEN' if is_write else 'CHECKED'}: {GENERATOR[0]} has wheels up to "
            f"Python {newest}, and no such interpreter is on PATH; install python{newest}",
            file=sys.stderr,
        )
        # Not a failure of the check: a machine with a newer Python alone cannot change the
        # stubs either, and CI has an older one.
        return 1 if is_write else 0
    install_generator(python)
    if is_write:
        generate(PROTOS)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        generate(Path(folder))
        differences = find_differences(Path(folder))
    for difference in differences:
        print(difference, file=sys.stderr)
    if not differences:
        print("stubs: as their .proto files make them")
    return 1 if differences else 0


if __name__ == "__main__":
    sys.exit(main())
