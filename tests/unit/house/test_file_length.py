"""Oracle: the count of newlines. A file over the limit holds a second idea; give it its own."""

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
MAX_LINES = 400
FOLDERS = ("teacher_server", "student_trainer", "protos", "deploy", "tests", ".ci")


def hand_written_files() -> list[str]:
    """List them relative to the root, so that a test's name is the file's."""
    return sorted(
        str(path.relative_to(ROOT))
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*.py")
        if not path.stem.endswith(("_pb2", "_pb2_grpc"))
    )


@pytest.mark.parametrize("name", hand_written_files())
def test_no_hand_written_file_is_longer_than_400_lines(name: str) -> None:
    num_lines = (ROOT / name).read_bytes().count(b"\n")

    assert num_lines <= MAX_LINES, f"{name} has {num_lines} lines (limit {MAX_LINES}); split it"
