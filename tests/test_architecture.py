"""The house rules of the source tree, as guards that read it; the last tests show that each guard can fail.

A guard takes a source folder (the one that holds ``viva/``) and returns one line per violation.
"""

import ast
import functools
import inspect
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import pytest

from viva.cli import main

SRC = Path(__file__).resolve().parents[1] / "src"

MAX_FILE_LINES = 500
MAX_README_LINES = 119
MAX_FUNCTION_LINES = 70
MAX_PARAMETERS = 10
MAX_FILES_ENTERED = 60
"""On the way of a prompt from the command line to the first logged step, beside the engine's."""

CHAIN = ("conversation", "judging", "rewards", "selfplay", "experts", "run", "training")
"""Rooms in the order of the arrows: each may import those before it."""

ALLOWED: dict[str, frozenset[str]] = {
    "engine": frozenset(),
    **{room: frozenset(CHAIN[:index]) for index, room in enumerate(CHAIN)},
}
ALLOWED["run"] |= {"engine"}
ALLOWED["training"] |= {"engine"}
ALLOWED["testing"] = frozenset({*CHAIN, "engine"})
ALLOWED["tiny"] = frozenset()
ALLOWED["view"] = frozenset({*CHAIN, "engine"})
ALLOWED["eval"] = frozenset({*CHAIN, "engine"})
ALLOWED["doctor"] = frozenset({*CHAIN, "engine"})
ALLOWED["serve"] = frozenset({"conversation", "engine"})
ALLOWED["scaling"] = frozenset({"conversation", "judging", "rewards", "selfplay"})
ALLOWED["recipes"] = frozenset({*CHAIN, "doctor", "engine", "eval", "scaling", "serve", "tiny", "view"})
ALLOWED["api"] = frozenset({*CHAIN, "eval", "recipes", "threads", "view"})
ALLOWED["cli"] = frozenset({*CHAIN, "doctor", "engine", "eval", "tiny", "recipes", "view"})
ALLOWED["__main__"] = frozenset({"cli"})

HELPERS = {
    "sdk": set[str](),
    "threads": set[str](),
    "hub": set[str](),
    "model_files": {"hub"},
    "loopback": set[str](),
}
"""Single modules that rooms from the engine on use, and what they import themselves."""
for room in ("engine", "run", "training", "testing", "view", "eval", "doctor", "serve", "recipes", "cli"):
    ALLOWED[room] |= HELPERS.keys()
ALLOWED |= {helper: frozenset(imported) for helper, imported in HELPERS.items()}

FACES = frozenset(
    f"viva/{name}.py"
    for name in (
        "__init__",
        "engine/__init__",
        "engine/kernels/__init__",
        "rewards/__init__",
        "testing",
        "tiny/__init__",
    )
)
"""Modules whose names others are to use: each has a sorted and complete ``__all__``."""

BROAD_EXCEPTS = frozenset(
    {
        "viva/conversation/guard.py",
        "viva/conversation/sandbox.py",
        "viva/engine/scheduler.py",
        "viva/selfplay/user_code.py",
        "viva/serve/tinker_store.py",
        "viva/training/rollouts.py",
    }
)
"""Files with the one named boundary of their room that may keep any exception: as data, for its future, as the error
of a user's grader, or since a library raises nothing narrower (``tokenizers``, of steps that it cannot describe)."""


@dataclass(frozen=True, kw_only=True)
class Module:
    """One parsed source file."""

    name: str
    path: Path
    relative: str
    tree: ast.Module
    num_lines: int

    @property
    def room(self) -> str:
        parts = self.name.split(".")
        return parts[1] if len(parts) > 1 else ""

    @property
    def package(self) -> str:
        return self.name if self.path.name == "__init__.py" else self.name.rpartition(".")[0]


@functools.cache
def modules(src: Path) -> dict[str, Module]:
    found: dict[str, Module] = {}
    for path in sorted((src / "viva").rglob("*.py")):
        relative = path.relative_to(src)
        name = ".".join(relative.with_suffix("").parts).removesuffix(".__init__")
        text = path.read_text(encoding="utf-8")
        found[name] = Module(
            name=name,
            path=path,
            relative=relative.as_posix(),
            tree=ast.parse(text),
            num_lines=text.count("\n"),
        )
    return found


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def walk(node: ast.AST, *, type_checking: bool) -> Iterator[ast.AST]:
    """All nodes below, with or without the bodies of ``if TYPE_CHECKING``."""
    for child in ast.iter_child_nodes(node):
        if type_checking or not is_type_checking(child):
            yield child
            yield from walk(child, type_checking=type_checking)


def imports(module: Module, known: dict[str, Module], *, type_checking: bool) -> list[str]:
    """Modules of viva that a module imports, at its top or inside its functions."""
    targets: list[str] = []
    for node in walk(module.tree, type_checking=type_checking):
        if isinstance(node, ast.Import):
            targets += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = module.package.split(".")
                base = ".".join([*parents[: len(parents) - node.level + 1], *([base] if base else [])])
            names = [f"{base}.{alias.name}" for alias in node.names]
            targets += [name if name in known else base for name in names]
    return [target for target in targets if target.split(".")[0] == "viva"]


def layer_violations(src: Path) -> list[str]:
    known = modules(src)
    rows: list[str] = []
    for module in known.values():
        if module.room and module.room not in ALLOWED:
            rows.append(
                f"{module.relative}: {module.room!r} is no room of the house; give it a place in ALLOWED"
            )
            continue
        # the package itself is the public face: it names things of every room, and loads none of them
        for target in imports(module, known, type_checking=bool(module.room)):
            room = target.split(".")[1] if "." in target else ""
            if not room or room == module.room:
                continue
            if not module.room or room not in ALLOWED[module.room]:
                rows.append(f"{module.relative} imports {target}: the arrow points the wrong way")
    return rows


def cycle_violations(src: Path) -> list[str]:
    """Cycles of imports, found as a depth-first walk meets a module that is still open."""
    known = modules(src)
    graph = {
        name: sorted({t for t in imports(module, known, type_checking=False) if t in known and t != name})
        for name, module in known.items()
    }
    rows: list[str] = []
    closed: set[str] = set()

    def visit(name: str, trail: list[str]) -> None:
        if name in trail:
            rows.append("import cycle: " + " -> ".join([*trail[trail.index(name) :], name]))
        elif name not in closed:
            for target in graph[name]:
                visit(target, [*trail, name])
            closed.add(name)

    for name in graph:
        visit(name, [])
    return rows


def size_violations(src: Path) -> list[str]:
    rows: list[str] = []
    for module in modules(src).values():
        if module.num_lines > MAX_FILE_LINES:
            rows.append(f"{module.relative}: {module.num_lines} lines, at most {MAX_FILE_LINES}")
        for node in ast.walk(module.tree):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            where = f"{module.relative}:{node.lineno} {node.name}"
            num_lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if num_lines > MAX_FUNCTION_LINES:
                rows.append(f"{where}: {num_lines} lines, at most {MAX_FUNCTION_LINES}")
            arguments = node.args
            num_parameters = len(arguments.posonlyargs) + len(arguments.args) + len(arguments.kwonlyargs)
            if num_parameters > MAX_PARAMETERS:
                rows.append(f"{where}: {num_parameters} parameters, at most {MAX_PARAMETERS}")
    return rows


def export_order(name: str) -> tuple[int, list[str | int]]:
    """Constants, then classes, then the rest; digits inside names count as numbers (ruff's RUF022)."""
    kind = 0 if name.isupper() else 1 if name[:1].isupper() else 2
    return kind, [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def declared_exports(module: Module) -> list[str] | None:
    for node in module.tree.body:
        if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
            continue
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        if any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets):
            return list(ast.literal_eval(node.value))
    return None


def export_violations(src: Path) -> list[str]:
    """Public faces list what they hand on; in every other module a name without an underscore is public."""
    rows: list[str] = []
    for module in modules(src).values():
        exports = declared_exports(module)
        if exports is None:
            if module.relative in FACES:
                rows.append(f"{module.relative}: no __all__")
            continue
        if exports != sorted(set(exports), key=export_order):
            rows.append(f"{module.relative}: __all__ is not sorted: {sorted(set(exports), key=export_order)}")
        definitions = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        rows += [
            f"{module.relative}: {node.name} is public and not in __all__"
            for node in module.tree.body
            if isinstance(node, definitions) and not node.name.startswith("_") and node.name not in exports
        ]
    return rows


def name_violations(src: Path) -> list[str]:
    """Two classes of one name; each recipe calls its options `Config`."""
    places: dict[str, list[str]] = {}
    for module in modules(src).values():
        for node in module.tree.body:
            if isinstance(node, ast.ClassDef) and node.name != "Config":
                places.setdefault(node.name, []).append(module.relative)
    return [f"{name} in {', '.join(found)}" for name, found in places.items() if len(found) > 1]


def call_violations(src: Path) -> list[str]:
    """``print`` anywhere, and excepts outside the named boundaries that swallow every exception."""
    rows: list[str] = []
    for module in modules(src).values():
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
                rows.append(f"{module.relative}:{node.lineno} print")
            if isinstance(node, ast.ExceptHandler) and module.relative not in BROAD_EXCEPTS:
                if ast.unparse(node.body[-1]) == "raise":
                    continue
                caught = "" if node.type is None else ast.unparse(node.type)
                if not caught or re.search(r"\b(Base)?Exception\b", caught):
                    rows.append(f"{module.relative}:{node.lineno} broad except")
    return rows


_IMPORT_PROBE = """
import importlib, json, logging, os, pkgutil, sys, threading
package_dir = os.path.abspath(os.path.join(sys.argv[1], "viva")) + os.sep
rows = []
def blame(what):
    # the innermost module body that is being executed is the one that asked for it
    frame = sys._getframe(2)
    while frame is not None and frame.f_code.co_name != "<module>":
        frame = frame.f_back
    if frame is not None and os.path.abspath(frame.f_code.co_filename).startswith(package_dir):
        rows.append(f"{frame.f_globals['__name__']}:{frame.f_lineno} on import: {what}")
watched = ("os.putenv", "os.unsetenv", "socket.", "subprocess.Popen", "os.mkdir", "os.remove")
def hook(event, args):
    if event.startswith(watched):
        blame(event)
    elif event == "open" and isinstance(args[1], str) and set(args[1]) & set("wax+"):
        blame(f"open {args[0]} for writing")
def watch(owner, name, what):
    original = getattr(owner, name)
    def watched_call(*args):
        blame(what)
        return original(*args)
    setattr(owner, name, watched_call)
watch(logging.Logger, "addHandler", "a logging handler")
watch(threading.Thread, "start", "a thread")
sys.dont_write_bytecode = True
sys.addaudithook(hook)
import viva
names = ["viva"] + [found.name for found in pkgutil.walk_packages(viva.__path__, "viva.")]
for name in names:
    module = importlib.import_module(name)
    for export in getattr(module, "__all__", []):
        try:
            getattr(module, export)
        except (AttributeError, ImportError):
            rows.append(f"{name}: {export!r} is in __all__ and does not exist")
json.dump({"rows": rows, "num_modules": len(names)}, sys.stdout)
"""


def python(code: str, *arguments: str, **variables: str) -> str:
    """Run code in a clean interpreter and return what it writes."""
    command = [sys.executable, "-c", code, *arguments]
    environment = os.environ | variables
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def import_violations(src: Path) -> list[str]:
    """What importing every module changes outside itself, and exports that do not exist."""
    return json.loads(python(_IMPORT_PROBE, str(src), PYTHONPATH=str(src)))["rows"]


GUARDS: dict[str, Callable[[Path], list[str]]] = {
    "layers": layer_violations,
    "cycles": cycle_violations,
    "sizes": size_violations,
    "exports": export_violations,
    "names": name_violations,
    "calls": call_violations,
    "imports": import_violations,
}


@pytest.mark.parametrize("guard", GUARDS)
def test_the_source_tree_keeps_the_rule(guard: str) -> None:
    assert GUARDS[guard](SRC) == []


HEAVY = ("torch", "transformers", "datasets", "tinker", "tinker_cookbook", "peft", "numpy")


def test_the_readme_stays_short() -> None:
    assert len((SRC.parent / "README.md").read_text(encoding="utf-8").splitlines()) <= MAX_README_LINES


@pytest.mark.parametrize(
    "code",
    [
        "import viva",
        "import viva.cli",
        "import viva.engine, viva.view",
        "import viva.cli, contextlib\nwith contextlib.suppress(SystemExit): viva.cli.main(['--help'])",
        "import viva.cli; viva.cli.main(['recipes'])",
    ],
)
def test_light_entrances_load_no_heavy_package(code: str) -> None:
    loaded = python(f"{code}\nimport sys; sys.stdout.write('\\n' + ' '.join(sys.modules))").splitlines()[-1]
    assert not set(HEAVY) & set(loaded.split())


def test_a_run_loads_no_package_that_reads_data_files_unless_it_is_given_some() -> None:
    code = "import viva.recipes.loop, viva.recipes.math_efficiency, viva.recipes.critique_self_play, sys"
    loaded = set(python(f"{code}; print(*sys.modules)").split())
    assert "torch" in loaded
    assert not {"datasets", "pandas", "pyarrow"} & loaded


class Entered:
    """The files of the package whose functions are called, those of the engine and of imports left out."""

    def __init__(self) -> None:
        self.files: set[str] = set()
        self.is_logged = False
        """Whether the first step has been written to the log."""

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        name = code.co_filename.partition("/src/viva/")[2]
        if event != "call" or not name or self.is_logged or not code.co_flags & inspect.CO_OPTIMIZED:
            return
        self.is_logged = code.co_name == "write_step"
        if not name.startswith("engine/") and not is_importing(frame):
            self.files.add(name)


def is_importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_name == "<module>" and "/src/viva/" in frame.f_code.co_filename:
            return True
        frame = frame.f_back
    return False


def test_a_prompts_way_to_the_first_logged_step_enters_few_files(tmp_path: Path) -> None:
    entered = Entered()
    options = {
        **{"model_name": SRC / "viva/tiny/model", "log_path": tmp_path / "run"},
        **{"num_agents": 2, "batch_size": 2, "max_steps": 1, "max_tokens": 8, "max_rounds": 2},
    }
    line = ["train", "conversation_preference_rl", 'train_prompts=["2 + 3?"]']
    sys.setprofile(entered)
    try:
        assert main([*line, *(f"{name}={value}" for name, value in options.items())]) == 0
    finally:
        sys.setprofile(None)
    assert entered.is_logged
    assert {"cli.py", "conversation/coordinator.py", "training/loop.py"} <= entered.files
    assert len(entered.files) <= MAX_FILES_ENTERED, sorted(entered.files)


LONG_FUNCTION = "def f() -> None:\n" + "    pass\n" * MAX_FUNCTION_LINES
MANY_PARAMETERS = "def f(" + ", ".join(f"p{i}: int" for i in range(MAX_PARAMETERS + 1)) + ") -> None: ...\n"

SABOTAGE: list[tuple[str, dict[str, str], str]] = [
    ("layers", {"judging/a.py": "from viva.training import loop\n"}, "wrong way"),
    ("layers", {"judging/a.py": "def f() -> None:\n    import viva.training.loop\n"}, "wrong way"),
    ("layers", {"judging/a.py": "from ..rl import loop\n"}, "wrong way"),
    (
        "layers",
        {"rewards/a.py": "if TYPE_CHECKING:\n    from viva.engine.scheduler import Pump\n"},
        "wrong way",
    ),
    ("layers", {"training/a.py": "import viva.testing\n"}, "wrong way"),
    ("layers", {"eval/a.py": "from viva import recipes\n", "recipes/__init__.py": ""}, "wrong way"),
    ("layers", {"__init__.py": "from viva.training import loop\n"}, "wrong way"),
    ("layers", {"cellar/a.py": ""}, "no room of the house"),
    (
        "cycles",
        {"training/a.py": "import viva.training.b\n", "training/b.py": "from viva.training import a\n"},
        "viva.training.a -> viva.training.b",
    ),
    (
        "cycles",
        {
            "training/a.py": "def f():\n    import viva.training.b\n",
            "training/b.py": "import viva.training.a\n",
        },
        "import cycle",
    ),
    ("sizes", {"training/a.py": "\n" * (MAX_FILE_LINES + 1)}, "501 lines"),
    ("sizes", {"training/a.py": LONG_FUNCTION}, "71 lines"),
    ("sizes", {"training/a.py": MANY_PARAMETERS}, "11 parameters"),
    ("exports", {"testing.py": "X = 1\n"}, "no __all__"),
    ("exports", {"training/a.py": "__all__ = ['b', 'A']\nA = b = 1\n"}, "not sorted"),
    ("exports", {"training/a.py": "__all__ = []\nclass Open: ...\n"}, "Open is public"),
    ("exports", {"training/a.py": "__all__: list[str] = []\nasync def go(): ...\n"}, "go is public"),
    ("names", {"a.py": "class A: ...\n", "b.py": "class A: ...\n"}, "A in viva/a.py, viva/b.py"),
    ("calls", {"training/a.py": "def f():\n    print(1)\n"}, "training/a.py:2 print"),
    ("calls", {"training/a.py": "try: ...\nexcept (OSError, Exception):\n    x = 2\n"}, "broad except"),
    ("calls", {"training/a.py": "try: ...\nexcept:\n    x = 2\n"}, "broad except"),
    ("imports", {"training/a.py": "import os\nos.environ['VIVA_TEST_PROBE'] = '1'\n"}, "os.putenv"),
    ("imports", {"training/a.py": "import logging\nlogging.basicConfig()\n"}, "a logging handler"),
    ("imports", {"training/a.py": "import socket\nsocket.socket().close()\n"}, "socket."),
    ("imports", {"training/a.py": "import threading\nthreading.Thread(target=int).start()\n"}, "a thread"),
    ("imports", {"training/a.py": "open(__file__ + '.log', 'w').close()\n"}, "for writing"),
    ("imports", {"training/a.py": "__all__ = ['gone']\n"}, "'gone' is in __all__"),
]


@pytest.mark.parametrize(("guard", "files", "complaint"), SABOTAGE)
def test_a_guard_sees_the_violation_it_is_for(
    tmp_path: Path, guard: str, files: dict[str, str], complaint: str
) -> None:
    for name, text in {
        "__init__.py": "__all__ = []\n",
        "training/__init__.py": "",
        "training/loop.py": "",
        **files,
    }.items():
        path = tmp_path / "viva" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    rows = GUARDS[guard](tmp_path)
    assert len(rows) == 1
    assert complaint in rows[0]


def test_a_handler_that_raises_again_swallows_nothing(tmp_path: Path) -> None:
    (tmp_path / "viva").mkdir()
    (tmp_path / "viva" / "a.py").write_text("try:\n    x = 1\nexcept BaseException:\n    x = 2\n    raise\n")
    assert call_violations(tmp_path) == []


def test_a_type_checking_import_closes_no_cycle(tmp_path: Path) -> None:
    room = tmp_path / "viva" / "rl"
    room.mkdir(parents=True)
    (room / "a.py").write_text("import viva.training.b\n")
    (room / "b.py").write_text("if TYPE_CHECKING:\n    import viva.training.a\n")
    assert cycle_violations(tmp_path) == []
