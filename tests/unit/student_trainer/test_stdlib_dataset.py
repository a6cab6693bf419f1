"""Oracle: Python's own parser over the sources that the samples were cut from."""

import ast
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from student_trainer.stdlib_dataset import (
    INSTRUCTION,
    MAX_COMPLETION_CHARS,
    MAX_PROMPT_CHARS,
    SKIPPED_PACKAGES,
    SPLITS,
    Sample,
    load_stdlib_functions,
    read_functions,
)


def module_of(sample: Sample) -> str:
    return sample["sample_id"].partition(":")[0]


def code_of(sample: Sample) -> str:
    return sample["prompt"].removeprefix(INSTRUCTION) + sample["completion"]


def shape_of(function: ast.AST) -> str:
    """Everything but the text of constants: dedenting reaches into multi-line strings."""
    for node in ast.walk(function):
        if isinstance(node, ast.Constant) and isinstance(node.value, (str, bytes)):
            node.value = type(node.value)()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            node.decorator_list = node.decorator_list if node is not function else []
    return ast.dump(function)


def functions_of(module: str) -> set[str]:
    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.origin is not None
    tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {shape_of(node) for node in ast.walk(tree) if isinstance(node, kinds)}


@pytest.mark.parametrize("module", ["asyncio.queues", "textwrap", "json.decoder"])
def test_prompt_and_answer_join_to_a_function_of_the_module(module: str) -> None:
    samples = [s for split in SPLITS for s in load_stdlib_functions(split)]
    cut = [code_of(s) for s in samples if module_of(s) == module]
    originals = functions_of(module)

    assert cut
    for code in cut:
        (function,) = ast.parse(code).body
        assert shape_of(function) in originals


def test_every_sample_parses_and_is_cut_right_after_its_docstring() -> None:
    for sample in load_stdlib_functions("test"):
        (function,) = ast.parse(code_of(sample)).body
        (only,) = ast.parse(sample["prompt"].removeprefix(INSTRUCTION)).body

        assert isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef))
        assert isinstance(only, (ast.FunctionDef, ast.AsyncFunctionDef))
        assert ast.get_docstring(only) == ast.get_docstring(function)
        assert len(only.body) == 1 and len(function.body) > 1


def test_no_module_and_no_text_is_in_both_splits() -> None:
    train, test = load_stdlib_functions("train"), load_stdlib_functions("test")

    assert {module_of(s) for s in train}.isdisjoint(module_of(s) for s in test)
    assert {code_of(s) for s in train}.isdisjoint(code_of(s) for s in test)
    assert 0.03 < len(test) / len(train) < 0.3


def test_ids_are_unique_and_texts_within_their_limits() -> None:
    samples = [s for split in SPLITS for s in load_stdlib_functions(split)]

    assert len({s["sample_id"] for s in samples}) == len(samples) > 1_000
    assert max(len(s["prompt"]) for s in samples) <= MAX_PROMPT_CHARS
    assert max(len(s["completion"]) for s in samples) <= MAX_COMPLETION_CHARS
    for sample in samples:
        assert not SKIPPED_PACKAGES.intersection(module_of(sample).split("."))
        assert sample["completion"].startswith("\n") and not sample["prompt"].endswith("\n")


@pytest.mark.slow
def test_another_process_with_another_hash_seed_reads_the_same_order() -> None:
    program = (
        "from student_trainer.stdlib_dataset import load_stdlib_functions\n"
        "print(*(s['sample_id'] for s in load_stdlib_functions('test', seed=3)), sep='\\n')"
    )
    root = str(Path(__file__).parents[3])

    printed = subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONHASHSEED": "1", "PYTHONPATH": root},
        check=True,
        capture_output=True,
        text=True,
        timeout=100,
    ).stdout

    assert printed.split() == [s["sample_id"] for s in load_stdlib_functions("test", seed=3)]


def test_seed_changes_the_order_and_nothing_else() -> None:
    one = [s["sample_id"] for s in load_stdlib_functions("test", seed=1)]
    two = [s["sample_id"] for s in load_stdlib_functions("test", seed=2)]

    assert one != two
    assert sorted(one) == sorted(two)
    assert one == [s["sample_id"] for s in load_stdlib_functions("test", seed=1)]


def test_only_documented_functions_with_a_body_are_taken(tmp_path: Path) -> None:
    write_library(tmp_path)

    names = {s["sample_id"] for s in read_functions(tmp_path)}

    assert names == {f"m{i}:{name}" for i in range(8) for name in (f"f{i}", f"C{i}.method")}


def test_form_feeds_do_not_shift_the_cut(tmp_path: Path) -> None:
    text = '"""Doc."""\n\x0c\ndef f(x):\n    """Say x."""\n    y = x\n    return y\n'
    (tmp_path / "old.py").write_text(text)

    (sample,) = read_functions(tmp_path)

    assert sample["prompt"] == INSTRUCTION + 'def f(x):\n    """Say x."""'
    assert sample["completion"] == "\n    y = x\n    return y"


def test_a_copied_function_is_taken_once(tmp_path: Path) -> None:
    text = 'def f(x):\n    """Say x."""\n    y = x\n    return y\n'
    for name in ("first", "second"):
        (tmp_path / f"{name}.py").write_text(text)

    assert [s["sample_id"] for s in read_functions(tmp_path)] == ["first:f"]


def test_an_unknown_split_is_refused() -> None:
    with pytest.raises(ValueError, match=re.escape("has the splits train, test; got 'dev'")):
        load_stdlib_functions("dev")


def write_library(folder: Path) -> None:
    """Eight modules with two samples each, and everything that must not be taken."""
    for i in range(8):
        (folder / f"m{i}.py").write_text(
            f'def f{i}(x):\n    """Say {i}."""\n    y = x\n    return y + {i}\n\n'
            f'class C{i}:\n    def method(self):\n        """Do {i}."""\n'
            f"        self.x = {i}\n        return self\n\n"
            "def bare(x):\n    y = x\n    return y\n\n"
            'def short(x):\n    """Short."""\n    return x\n\n'
            'def inline(x):\n    """Inline."""; y = x; z = y\n    return z\n\n'
            'def only_doc(x):\n    """Nothing else."""\n'
        )
    (folder / "broken.py").write_text("def f(:\n")
    (folder / "latin.py").write_bytes(b"# -*- coding: latin-1 -*-\n# \xe9\n")
    for package in ("test", "idlelib", "site-packages"):
        (folder / package).mkdir()
        (folder / package / "m.py").write_text(
            'def f(x):\n    """Say."""\n    x += 1\n    return x\n'
        )
