"""`python-stdlib`: a supervised data set that every Python already has on disk.

A first run should not wait for a download or a licence. The standard library is a few
thousand documented functions written by people: the signature and docstring are the
instruction, the body is the answer. CPython 3.11 gives about 4,000 samples.

What is taken: module-level functions and methods with a docstring and a body of 2 to 60
lines, prompt and answer within `MAX_PROMPT_CHARS` and `MAX_COMPLETION_CHARS`, each text
once. What is not: test packages, vendored code, files that do not parse, functions inside
functions (their text is already in the outer one), bodies on the line of their docstring.

The held-out split is taken by module, never by function: neighbours share helpers, names
and idioms, so a split inside a module would test memory.

Depends on: nothing outside the standard library. Knows nothing of tokenizers.
"""

import ast
import hashlib
import os
import sysconfig
import warnings
import zlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TypedDict

DATASET_NAME = "python-stdlib"
SPLITS = ("train", "test")
INSTRUCTION = "Write the body of this Python function.\n\n"

HELD_OUT_ONE_IN = 10
"""One module in ten, by the CRC-32 of its name, belongs to the `test` split."""

MIN_BODY_LINES = 2
"""Non-blank lines of a body. Below it the answer is a `pass` or one delegating call."""

MAX_BODY_LINES = 60
MAX_PROMPT_CHARS = 1_000
MAX_COMPLETION_CHARS = 2_000
"""With SmolLM2's tokenizer every pair fits in 1,024 tokens and four in five fit in 256."""

SKIPPED_PACKAGES = frozenset(
    {
        "__pycache__",
        "_pyrepl",
        "dist-packages",
        "idlelib",
        "idle_test",
        "lib-dynload",
        "lib2to3",
        "site-packages",
        "test",
        "tests",
        "turtledemo",
    }
)


class Sample(TypedDict):
    """One instruction and its answer.

    Attributes:
        prompt: the instruction, the signature and the docstring, as code; no final newline.
        completion: a newline and the body, indented as in a top-level function.
        sample_id: `module:qualname`, unique in the data set.
    """

    prompt: str
    completion: str
    sample_id: str


def load_stdlib_functions(split: str, *, seed: int = 0) -> list[Sample]:
    """Read the samples of one split, in an order that depends on `seed` alone.

    The order is a sort by a hash of seed and sample id, so that it is the same on every
    rank and machine with the same Python, and a sample keeps its neighbours when others
    are added.

    Raises:
        ValueError: the split is unknown, or this Python ships no library sources.
    """
    if split not in SPLITS:
        raise ValueError(f"{DATASET_NAME} has the splits {', '.join(SPLITS)}; got {split!r}")
    folder = Path(sysconfig.get_path("stdlib"))
    samples = [s for s in read_functions(folder) if is_held_out(s) == (split == "test")]
    if not samples:
        raise ValueError(
            f"no documented function found in the standard library of this Python ({folder}); "
            "install its sources (on Debian: the package python3, not python3-minimal)"
        )

    def rank(sample: Sample) -> bytes:
        return hashlib.sha256(f"{seed}:{sample['sample_id']}".encode()).digest()

    return sorted(samples, key=rank)


def is_held_out(sample: Sample) -> bool:
    """Tell whether the sample's module belongs to the `test` split."""
    module = sample["sample_id"].partition(":")[0]
    return zlib.crc32(module.encode()) % HELD_OUT_ONE_IN == 0


@cache
def read_functions(folder: Path) -> tuple[Sample, ...]:
    """Read every sample below a folder of sources, sorted by module and line.

    Read once per process: both splits come from the same pass (about 5 s on one core).
    """
    seen_texts: set[tuple[str, str]] = set()
    seen_ids: set[str] = set()
    samples = []
    for module, path in list_modules(folder):
        for sample in read_module(path, module=module):
            text = (sample["prompt"], sample["completion"])
            # A copied function would leak from one split to the other; a redefined one
            # (`if sys.platform == ...`) would give two samples one name.
            if text in seen_texts or sample["sample_id"] in seen_ids:
                continue
            seen_texts.add(text)
            seen_ids.add(sample["sample_id"])
            samples.append(sample)
    return tuple(samples)


def list_modules(folder: Path) -> list[tuple[str, Path]]:
    """List dotted module names with their files, sorted by name."""
    modules = []
    for root, folders, files in os.walk(folder):
        # In place, so that the walk never enters site-packages. Names that are no identifiers
        # are build leftovers (config-3.11-...), not packages.
        folders[:] = [f for f in folders if f.isidentifier() and f not in SKIPPED_PACKAGES]
        for name in files:
            stem, suffix = os.path.splitext(name)
            if suffix == ".py" and stem.isidentifier():
                parts = (*Path(root).relative_to(folder).parts, stem)
                modules.append((".".join(parts).removesuffix(".__init__"), Path(root, name)))
    return sorted(modules)


def read_module(path: Path, *, module: str) -> Iterator[Sample]:
    """Yield the samples of one source file; nothing from a file that does not parse."""
    try:
        source = path.read_bytes().decode("utf-8")
        with warnings.catch_warnings():
            # Old escape sequences in library code are not this user's business.
            warnings.simplefilter("ignore")
            tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return
    # Not splitlines(): that also cuts at form feeds, which the parser does not count.
    lines = source.replace("\r\n", "\n").split("\n")
    for qualname, function in walk_functions(tree.body, prefix=""):
        sample = split_function(function, lines, sample_id=f"{module}:{qualname}")
        if sample is not None:
            yield sample


def walk_functions(
    statements: list[ast.stmt], *, prefix: str
) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Yield functions of a body and of its classes, with their qualified names."""
    for statement in statements:
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield prefix + statement.name, statement
        elif isinstance(statement, ast.ClassDef):
            yield from walk_functions(statement.body, prefix=f"{prefix}{statement.name}.")
        elif isinstance(statement, (ast.If, ast.Try)):
            yield from walk_functions(statement.body, prefix=prefix)
            yield from walk_functions(statement.orelse, prefix=prefix)


def split_function(
    function: ast.FunctionDef | ast.AsyncFunctionDef, lines: list[str], *, sample_id: str
) -> Sample | None:
    """Cut one function after its docstring, or return None if the filters refuse it."""
    if ast.get_docstring(function, clean=False) is None or len(function.body) < 2:
        return None
    docstring_end = function.body[0].end_lineno
    function_end = function.end_lineno
    assert docstring_end is not None and function_end is not None, "a parsed node has an end"
    if function.body[1].lineno == docstring_end:
        return None
    indent = function.col_offset
    head = [unindent(line, indent) for line in lines[function.lineno - 1 : docstring_end]]
    body = [unindent(line, indent) for line in lines[docstring_end:function_end]]
    # The newline goes to the answer: byte-level tokenizers have one token for a newline
    # with its indentation, and a cut inside it would show the model a spelling that
    # never occurs in its training text.
    prompt = INSTRUCTION + "\n".join(head)
    completion = "\n" + "\n".join(body)
    num_body_lines = sum(1 for line in body if line.strip())
    if not MIN_BODY_LINES <= num_body_lines <= MAX_BODY_LINES:
        return None
    if len(prompt) > MAX_PROMPT_CHARS or len(completion) > MAX_COMPLETION_CHARS:
        return None
    return Sample(prompt=prompt, completion=completion, sample_id=sample_id)


def unindent(line: str, width: int) -> str:
    """Drop up to `width` leading blanks; a docstring line may have fewer."""
    margin = len(line) - len(line.lstrip(" \t"))
    return line[min(width, margin) :]
