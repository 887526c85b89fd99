"""The house style, enforced: who imports whom, what is pure, how long things are, what is said.

Each rule reads one file and yields findings `path:line: what to do`. `tidy_tables` holds what is
allowed; `docs/style.md` says why. Rules are tried on bad snippets below: one that finds nothing
there would find nothing anywhere.
"""

from __future__ import annotations

import ast
import gc
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests import tidy_tables as house

ROOT = Path(__file__).parent.parent
PACKAGES = ("schemas", "controlplane", "sidecar", "router", "lab", "bench")
NOT_OURS = {"build", "dist", "node_modules", "run", "__pycache__"}

Function = ast.FunctionDef | ast.AsyncFunctionDef
Definition = Function | ast.ClassDef
Findings = Iterator[str]


class Source(NamedTuple):
    """One Python file: its path from the root, its text, and what it defines and imports.

    `definitions` are (node, the class or function around it or None), `imports` (line, module).
    """

    path: str
    text: str
    tree: ast.Module
    definitions: list[tuple[Definition, Definition | None]]
    imports: list[tuple[int, str]]

    def at(self, line: int, what: str) -> str:
        """Returns a finding."""
        return f"{self.path}:{line}: {what}"

    @property
    def module(self) -> str:
        """Its dotted name."""
        return self.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")

    @property
    def is_test(self) -> bool:
        """Whether it is below `tests`."""
        return self.path.startswith("tests/")


def read(path: str, text: str) -> Source:
    """Parses a file and gathers its definitions and imports, deferred ones too."""
    source = Source(path, text, ast.parse(text), [], [])
    waiting: list[tuple[ast.AST, Definition | None]] = [(source.tree, None)]
    while waiting:
        node, around = waiting.pop()
        if isinstance(node, Definition):
            source.definitions.append((node, around))
            around = node
        elif isinstance(node, ast.Import):
            source.imports.extend((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            source.imports.extend((node.lineno, name) for name in sorted(imported(source, node)))
        for block in ("body", "orelse", "finalbody", "handlers", "cases"):
            inside = getattr(node, block, ())
            if isinstance(inside, list):
                waiting += [(child, around) for child in inside]
    return source


def imported(source: Source, node: ast.ImportFrom) -> set[str]:
    """Returns the modules of `from … import …`: a submodule counts by its own name."""
    base = node.module or ""
    if node.level:
        package = source.module.split(".")
        package = package[: len(package) - node.level + source.path.endswith("__init__.py")]
        base = ".".join([*package, base]).rstrip(".")
    return {f"{base}.{alias.name}" if base in HOLDERS else base for alias in node.names}


HOLDERS = {"controlplane", "tests"}  # whose submodules have rules of their own


@cache
def files() -> list[str]:
    """Returns the paths of all files that could be ours."""
    found = []
    for folder, folders, names in os.walk(ROOT):
        folders[:] = [
            name
            for name in folders
            if name not in NOT_OURS
            and not name.endswith(".egg-info")
            and (not name.startswith(".") or name == ".ci")
        ]
        # In a working tree beside the first one, `.git` is a file, and none of ours.
        ours = [name for name in names if name != ".git"]
        found += [os.path.relpath(os.path.join(folder, name), ROOT) for name in ours]
    return sorted(found)


@cache
def sources() -> list[Source]:
    """Returns every Python file, parsed once for all rules."""
    gc.disable()  # a hundred thousand nodes and no cycle among them: collections only cost time
    try:
        return [
            read(path, (ROOT / path).read_text(encoding="utf-8"))
            for path in files()
            if path.endswith(".py")
        ]
    finally:
        gc.enable()


def within(name: str, prefixes: tuple[str, ...] | frozenset[str]) -> bool:
    """Says whether a dotted name is one of some names or below one."""
    return any(name == prefix or name.startswith(f"{prefix}.") for prefix in prefixes)


def fits(path: str, patterns: tuple[str, ...] | dict[str, str]) -> bool:
    """Says whether a path matches one of some patterns."""
    return any(fnmatch(path, pattern) for pattern in patterns)


def layer(module: str) -> str:
    """Returns the entry of FIRST_PARTY that a module belongs to, empty for tests."""
    fitting = [name for name in house.FIRST_PARTY if within(module, (name,))]
    return max(fitting, key=len, default="")


def is_foreign(module: str) -> bool:
    """Says whether a module is neither ours nor Python's."""
    top = module.split(".")[0]
    return top not in sys.stdlib_module_names and top not in {*PACKAGES, "tests"}


# --- rules


def imports_point_one_way(source: Source) -> Findings:
    """Packages know the layers below them only; `sidecar` and `router` never know each other."""
    home = layer(source.module)
    if not home:
        return
    for line, module in source.imports:
        if is_foreign(module) or module.split(".")[0] in sys.stdlib_module_names:
            continue
        own = tuple(name for name in house.ONLY_OWN if not within(source.module, (name,)))
        if within(module, own) or not within(module, house.FIRST_PARTY[home]):
            yield source.at(
                line, f"{home} must not import {module}; move what is shared below both"
            )


def inner_packages_need_little(source: Source) -> Findings:
    """`schemas` needs msgspec alone, the core four libraries that compute."""
    allowed = house.THIRD_PARTY.get(layer(source.module))
    if allowed is None:
        return
    for line, module in source.imports:
        if is_foreign(module) and module.split(".")[0] not in allowed:
            yield source.at(
                line, f"{layer(source.module)} may not use {module}; pass in the result"
            )


def a_foreign_library_has_its_file(source: Source) -> Findings:
    """Only an adapter meets a library, so that its quirks and its replacement stay in one place."""
    if layer(source.module) in {"", "bench"}:
        return
    for line, module in source.imports:
        top = module.split(".")[0]
        if not is_foreign(module) or top in house.EVERYWHERE:
            continue
        if not fits(source.path, house.FOREIGN.get(top, {})):
            homes = ", ".join(house.FOREIGN.get(top, {})) or "no file yet"
            yield source.at(
                line, f"{top} belongs to {homes}; call that, or add a reason to tidy_tables.FOREIGN"
            )


def pure_files_are_pure(source: Source) -> Findings:
    """No clock, I/O, environment, logging or shared randomness: the simulator runs this code."""
    if not fits(source.path, house.PURE):
        return
    for line, module in source.imports:
        if within(module, house.IMPURE_MODULES):
            yield source.at(line, f"{module} in a pure file; let the caller pass in what it yields")
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Global):
            yield source.at(node.lineno, "`global` in a pure file; keep state in an object")
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            if node.func.id in house.IMPURE_CALLS:
                yield source.at(node.lineno, f"{node.func.id}() in a pure file; return the value")
        elif isinstance(node, ast.ImportFrom) and node.module == "random":
            if any(alias.name not in house.SEEDED for alias in node.names):
                yield source.at(node.lineno, "shared randomness; take a seeded random.Random")
        elif isinstance(node, ast.Attribute):
            name = ".".join(ast.unparse(node).split(".")[-2:])
            if name in house.CLOCKS:
                yield source.at(node.lineno, f"{name} reads a clock; take the time as argument")
            elif name.startswith("random.") and node.attr not in house.SEEDED:
                yield source.at(node.lineno, f"{name}: take a seeded generator instead")


def nothing_is_too_long(source: Source) -> Findings:
    """One idea a function and a file: what fits on a screen, what is read in one sitting."""
    lines = source.text.count("\n")
    if lines > house.FILE_LINES_MAX:
        yield source.at(
            1, f"{lines} lines, at most {house.FILE_LINES_MAX}; give an idea its own file"
        )
    for node, _ in source.definitions:
        length = (node.end_lineno or 0) - node.body[0].lineno + 1  # a signature is no burden
        if isinstance(node, Function) and length > house.FUNCTION_LINES_MAX:
            limit = house.FUNCTION_LINES_MAX
            yield source.at(
                node.lineno, f"{node.name} has {length} lines, at most {limit}; name its parts"
            )


def what_is_public_is_explained(source: Source) -> Findings:
    """Every public module, class and function says what it promises."""
    if not source.is_test and not ast.get_docstring(source.tree):
        yield source.at(1, "the module has no docstring; say in a line what it is for")
    private = {
        node
        for node, around in source.definitions
        if node.name.startswith("_") or isinstance(around, Function)
    }
    for node, around in source.definitions:
        if node in private or around in private or said_elsewhere(node):
            continue
        if not ast.get_docstring(node):
            yield source.at(node.lineno, f"{node.name} has no docstring; say what it promises")


def said_elsewhere(node: Definition) -> bool:
    """Says whether a definition only varies one that has a docstring: a setter or an overload."""
    marks = {ast.unparse(mark).split(".")[-1] for mark in node.decorator_list}
    return bool(marks & {"setter", "overload", "override"})


def each_test_says_what_it_shows(source: Source) -> Findings:
    """A test's docstring begins with one sentence: what holds, not how it is checked."""
    if not source.is_test:
        return
    for node, around in source.definitions:
        if not node.name.startswith("test_") or isinstance(around, Function):
            continue
        first, _, _ = (ast.get_docstring(node) or "").partition("\n\n")
        if not first.endswith((".", "!", "?", "…")):
            yield source.at(node.lineno, f"{node.name} needs a docstring of one sentence")


def waiting_is_for_conditions(source: Source) -> Findings:
    """A sleep is either too short, and fails on a busy machine, or too long, on all others."""
    if not source.is_test or source.path in house.SLEEPERS or "sleep" not in source.text:
        return
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in {"time.sleep", "sleep"}:
            yield source.at(node.lineno, "sleeps; wait for the condition, with a deadline")


def everything_is_finished(source: Source) -> Findings:
    """No to-dos, stubs, skipped or excused tests: what is here works."""
    for line, word in spots(source.text, house.UNFINISHED):
        yield source.at(line, f"{word}: finish it, or file an issue and delete the mark")
    if not fits(source.path, house.SKIPPERS):
        for line, word in spots(source.text, house.EXCUSED):
            yield source.at(line, f"{word}: mend the test, or mark what it needs (pyproject)")


def machine_paths(path: str, text: str) -> Findings:
    """Nothing knows the machine that it was written on."""
    for line, word in spots(text, house.MACHINE):
        yield f"{path}:{line}: {word} exists on one machine only; make it relative"


def spots(text: str, words: list[str]) -> Iterator[tuple[int, str]]:
    """Yields the lines where some words occur."""
    for word in words:
        at = text.find(word)
        while at >= 0:
            yield text.count("\n", 0, at) + 1, word
            at = text.find(word, at + 1)


RULES: list[Callable[[Source], Findings]] = [
    imports_point_one_way,
    inner_packages_need_little,
    a_foreign_library_has_its_file,
    pure_files_are_pure,
    nothing_is_too_long,
    what_is_public_is_explained,
    each_test_says_what_it_shows,
    waiting_is_for_conditions,
    everything_is_finished,
]


# --- the house as it is


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_house_is_tidy(rule: Callable[[Source], Findings]) -> None:
    """No file breaks the rule; what does is named with what to do."""
    findings = [finding for source in sources() for finding in rule(source)]
    assert not findings, f"{rule.__doc__}\n" + "\n".join(findings)


def test_no_file_knows_the_machine_it_was_written_on() -> None:
    """Paths of one machine occur in no text file."""
    findings: list[str] = []
    for path in files():
        if Path(path).suffix in house.TEXT_SUFFIXES:
            text = (ROOT / path).read_text(encoding="utf-8", errors="replace")
            findings += machine_paths(path, text)
    assert not findings, "\n".join(findings)


def test_no_file_is_a_download_or_a_build() -> None:
    """Packages, archives, compiled code and logs lie about after work, and belong in no commit."""
    in_git = (ROOT / ".git").exists()  # what is ignored may lie about, as wheels for an image do
    listed = ["git", "-C", str(ROOT), "ls-files"]
    kept = subprocess.check_output(listed, text=True).splitlines() if in_git else files()
    strays = [path for path in kept if Path(path).suffix in house.STRAY_SUFFIXES]
    assert not strays, f"remove {', '.join(strays)}"


def test_the_packages_that_exist_are_the_packages_installed() -> None:
    """The names are generic, so pyproject lists them: each folder with code, and no other."""
    listed = pyproject()["tool"]["setuptools"]["packages"]
    found = {
        path.removesuffix("/__init__.py").replace("/", ".")
        for path in files()
        if path.endswith("/__init__.py") and path.split("/")[0] in PACKAGES
    }
    assert set(listed) == found, "mend [tool.setuptools] packages in pyproject.toml"
    bare = {
        source.path
        for source in sources()
        if source.path.split("/")[0] in PACKAGES
        and source.module.rpartition(".")[0] not in found
        and source.module not in found
    }
    assert not bare, "these are in a folder without __init__.py and would not be installed"


def test_what_is_imported_is_declared() -> None:
    """A library that only a developer's machine happens to have is not there for users."""
    project = pyproject()["project"]
    requirements = {"": project["dependencies"], **project["optional-dependencies"]}
    declared = {
        extra: {re.split(r"[\[<>=! ;]", each)[0] for each in listed}
        for extra, listed in requirements.items()
    }
    for source in sources():
        if layer(source.module) in {"", "bench"}:
            continue
        for line, module in source.imports:
            top = module.split(".")[0]
            if is_foreign(module):
                name = house.DISTRIBUTIONS.get(top, top)
                home = declared[house.OPTIONAL.get(top, "")]
                assert name in home, source.at(line, f"declare {name} in pyproject.toml")


def pyproject() -> dict[str, Any]:
    """Returns the project's settings."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


# --- the rules themselves

LONG = "def f():\n" + "    pass\n" * 71
BAD = [
    (imports_point_one_way, "schemas/x.py", "import controlplane.core.load"),
    (imports_point_one_way, "controlplane/core/x.py", "from controlplane.bus import setup"),
    (imports_point_one_way, "controlplane/core/x.py", "from controlplane import runtime"),
    (imports_point_one_way, "controlplane/core/x.py", "from ..bus import setup"),
    (imports_point_one_way, "router/x.py", "def f():\n    from sidecar.relay import Relay"),
    (imports_point_one_way, "sidecar/x.py", "if True:\n    import router.main"),
    (imports_point_one_way, "router/x.py", "from controlplane.cli import main"),
    (imports_point_one_way, "lab/x.py", "import tests.models"),
    (imports_point_one_way, "bench/x.py", "from tests.models import naive_index"),
    (inner_packages_need_little, "schemas/x.py", "import numpy as np"),
    (inner_packages_need_little, "controlplane/core/x.py", "import nats"),
    (a_foreign_library_has_its_file, "router/x.py", "import nats.aio.client"),
    (a_foreign_library_has_its_file, "sidecar/x.py", "try:\n    import orjson\nfinally:\n    pass"),
    (pure_files_are_pure, "controlplane/core/x.py", "import time"),
    (pure_files_are_pure, "controlplane/core/x.py", "def f():\n    from os import environ"),
    (pure_files_are_pure, "sidecar/relay.py", "import asyncio.events"),
    (pure_files_are_pure, "schemas/x.py", "print(1)"),
    (pure_files_are_pure, "schemas/x.py", "x = [open(p) for p in ()]"),
    (pure_files_are_pure, "schemas/x.py", "def f():\n    global x\n    x = 1"),
    (pure_files_are_pure, "schemas/x.py", "import random\nrandom.shuffle([])"),
    (pure_files_are_pure, "schemas/x.py", "from random import choice"),
    (pure_files_are_pure, "schemas/x.py", "np.random.rand()"),
    (pure_files_are_pure, "schemas/x.py", "import datetime\ndatetime.datetime.now()"),
    (nothing_is_too_long, "router/x.py", LONG),
    (nothing_is_too_long, "tests/x.py", f"class A:\n    async {LONG.replace('    ', '        ')}"),
    (nothing_is_too_long, "docs/x.py", "#\n" * 501),
    (what_is_public_is_explained, "lab/x.py", "x = 1"),
    (what_is_public_is_explained, "lab/x.py", '"""M."""\nclass A:\n    x = 1'),
    (
        what_is_public_is_explained,
        "lab/x.py",
        '"""M."""\nclass A:\n    """A."""\n    def f(self): ...',
    ),
    (each_test_says_what_it_shows, "tests/x.py", "def test_x(): ..."),
    (each_test_says_what_it_shows, "tests/x.py", 'async def test_x():\n    """no sentence"""'),
    (each_test_says_what_it_shows, "tests/x.py", 'def test_x():\n    """One\n\n    Two."""'),
    (waiting_is_for_conditions, "tests/x.py", "import time\ntime.sleep(1)"),
    (waiting_is_for_conditions, "tests/x.py", "from time import sleep\nsleep(1)"),
    (everything_is_finished, "router/x.py", f"x = 1\n# {house.UNFINISHED[0]}: better"),
    (everything_is_finished, "router/x.py", f"raise {house.UNFINISHED[-1]}"),
    (everything_is_finished, "tests/x.py", f"@pytest.{house.EXCUSED[1]}\ndef test_x(): ..."),
]

GOOD = [
    ("controlplane/core/x.py", '"""M."""\nimport random\nr = random.Random(1)\ndef _f(): ...'),
    ("controlplane/cli/x.py", '"""M."""\nfrom router import main\nimport typer'),
    ("router/x.py", '"""M."""\nfrom schemas.bus import Drain\nfrom controlplane.core import load'),
    ("lab/x.py", '"""M."""\nclass _A:\n    def f(self): ...\ndef _g():\n    def h(): ...'),
    ("tests/x.py", 'import zmq\ndef test_x():\n    """It holds."""'),
]


@pytest.mark.parametrize(("rule", "path", "text"), BAD)
def test_a_rule_finds_what_breaks_it(
    rule: Callable[[Source], Findings], path: str, text: str
) -> None:
    """Each kind of fault is found, by file and line."""
    findings = list(rule(read(path, text)))
    assert findings
    assert all(re.match(rf"{re.escape(path)}:\d+: ", finding) for finding in findings)


@pytest.mark.parametrize(("path", "text"), GOOD)
def test_the_rules_leave_good_code_alone(path: str, text: str) -> None:
    """What the house allows is not complained about."""
    assert [finding for rule in RULES for finding in rule(read(path, text))] == []


def test_machine_paths_are_found() -> None:
    """In any kind of text, with the line."""
    (finding,) = machine_paths("a.md", f"x\nsee {house.MACHINE[0]}main\n")
    assert finding.startswith("a.md:2: ")
