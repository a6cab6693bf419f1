"""A tiny teacher behind a real socket, and a plain client of the wire."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.teacher import Client, RunningTeacher, running_teacher
from tests.support.tiny_models import make_tiny_llama


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("model"), seed=1)


@pytest.fixture(scope="module")
def teacher(folder: Path) -> Iterator[RunningTeacher]:
    with running_teacher(folder, dtype="float32", head_chunk_tokens=7) as running:
        yield running


@pytest.fixture
def client(teacher: RunningTeacher) -> Iterator[Client]:
    with Client(teacher.url) as connected:
        yield connected
