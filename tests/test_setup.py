"""
What the repository promises about itself: flags that do something, pins that are true.

A script here is a file with a dataclass called Config, wherever it lies.
"""

import ast
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import types
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from functools import cache
from importlib import metadata
from pathlib import Path

import pytest
import tyro

import envs

ROOT = Path(__file__).parents[1]
SOURCES = [
    path
    for folder in ("", "envs", "envs/webarena_parts", "runs", "benchmarks", "tests")
    for path in (ROOT / folder).glob("*.py")
]


def is_script(path: Path) -> bool:
    return any(isinstance(node, ast.ClassDef) and node.name == "Config" for node in tree(path).body)


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


SCRIPTS = sorted(path.relative_to(ROOT).as_posix() for path in SOURCES if is_script(path))


@cache
def config_of(script: str) -> type:
    """The Config of a script, imported under a name that no other file has."""
    name = "script_" + script.removesuffix(".py").replace("/", "_")
    spec = importlib.util.spec_from_file_location(name, ROOT / script)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Config


def run(*command: str, cwd: Path = ROOT) -> subprocess.CompletedProcess:
    # We may be below `make test`: a make that we start must not take itself for a part of it.
    env = {
        key: value for key, value in os.environ.items() if not key.startswith(("MAKE", "MFLAGS"))
    }
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=120)


# --- flags ---


def imported_names(path: Path) -> set[str]:
    """Top-level names of all that a file imports, inside functions too."""
    names = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module.split(".")[0])
    return names


def local_imports(path: Path) -> set[Path]:
    """The files of ours that a file imports, directly or through others."""
    found, todo = set(), [path]
    while todo:
        names = imported_names(todo.pop())
        new = (
            {ROOT / f"{name}.py" for name in names if (ROOT / f"{name}.py").exists()}
            - found
            - {path}
        )
        found |= new
        todo += new
    return found


def attributes(node: ast.AST, of: str) -> set[str]:
    """x for every `of.x` and `self.of.x` that is read below a node."""
    return {
        part.attr
        for part in ast.walk(node)
        if isinstance(part, ast.Attribute)
        and of in (getattr(part.value, "id", None), getattr(part.value, "attr", None))
    }


def fields_read(script: str) -> set[str]:
    """The fields of its Config that a script uses. Checks in __post_init__ are not yet a use.

    Functions of other files count if they take any script's `config`: one without a type.
    """
    path = ROOT / script
    used = attributes(tree(path), "config")
    for file in (path, *local_imports(path)):
        # Its own Config, and the Play that train.py's and evaluate.py's are made of.
        names = ("Play", "Config") if file == path else ("Play",)
        for node in ast.walk(tree(file)):
            if isinstance(node, ast.ClassDef) and node.name in names:
                methods = [part for part in node.body if isinstance(part, ast.FunctionDef)]
                used |= set().union(
                    *(attributes(m, "self") for m in methods if m.name != "__post_init__")
                )
    for other in local_imports(path):
        for node in ast.walk(tree(other)):
            if isinstance(node, ast.FunctionDef) and any(
                argument.arg == "config" and argument.annotation is None
                for argument in node.args.args
            ):
                used |= attributes(node, "config")
    return used


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_flag_does_something(script):
    unused = {field.name for field in fields(config_of(script))} - fields_read(script)
    assert not unused, f"{script} reads {sorted(unused)} nowhere"


def test_an_unused_field_would_be_found(tmp_path, monkeypatch):
    """The negative control: a field that is checked and never used."""
    (tmp_path / "script.py").write_text(
        "class Config:\n    a: int\n    b: int\n    def __post_init__(self): assert self.b\n"
        "def main(config): print(config.a)\n"
    )
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    assert fields_read("script.py") == {"a"}


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_names_every_flag(script, capsys):
    with pytest.raises(SystemExit) as exit:
        tyro.cli(config_of(script), args=["--help"])
    assert exit.value.code == 0
    text = capsys.readouterr().out
    for field in fields(config_of(script)):
        name = field.name.replace("_", "-")
        is_positional = "Positional" in str(field.type)  # it has a place instead of a name
        assert is_positional or re.search(rf"--{name}(?![\w-])", text), f"no {name} in --help"


def test_a_flag_that_does_not_exist_ends_with_code_2():
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # each takes seconds, to import torch
        results = pool.map(lambda script: run(sys.executable, script, "--no-such-flag"), SCRIPTS)
    for script, done in zip(SCRIPTS, results, strict=True):
        assert done.returncode == 2, f"{script}: {done.stderr}"
        assert "--no-such-flag" in done.stderr and "Traceback" not in done.stderr


def commands_in(text: str) -> list[tuple[str, list[str]]]:
    """(script, flags) of every command in a shell script that starts one of ours."""
    found = []
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.split(
            re.sub(r'"\$@"|\$\{(CLONE|TRAIN|EVALUATE):-\}', "", line), comments=True
        )
        for position, word in enumerate(words):
            if word in SCRIPTS:
                flags = words[position + 1 :]
                end = next(
                    (i for i, flag in enumerate(flags) if flag in ("|", ">", "&", "&&", ";")),
                    len(flags),
                )
                found.append(
                    (word, [re.sub(r"\$\w+|\$\{\w+\}", "1", flag) for flag in flags[:end]])
                )
    return found


@pytest.mark.parametrize("name", sorted(path.name for path in (ROOT / "runs").glob("*.sh")))
def test_runs_use_flags_that_exist(name, monkeypatch):
    monkeypatch.setenv("SHOPPING", "http://127.0.0.1:7770")  # a deployment of WebArena's sites
    monkeypatch.setattr("evaluate.check_engine", lambda engine: None)  # vLLM need not be here
    found = commands_in((ROOT / "runs" / name).read_text())
    assert found, f"runs/{name} starts no script of ours"
    for script, flags in found:
        tyro.cli(config_of(script), args=flags)  # SystemExit, with its reason, where one is wrong


def test_a_file_without_an_environment_is_refused_in_a_sentence(monkeypatch):
    monkeypatch.setattr(envs, "NAMES", (*envs.NAMES, "hollow"))
    monkeypatch.setitem(sys.modules, "envs.hollow", types.ModuleType("envs.hollow"))
    with pytest.raises(ValueError, match=r"envs/hollow.py must define one gymnasium.Env class"):
        envs.make("hollow")


# --- dependencies ---


def pins(name: str) -> dict[str, str]:
    """{"torch": "2.13.0", ...}; every line is `name==version  # reason`, or a comment."""
    found = {}
    for line in (ROOT / name).read_text().splitlines():
        if line and not line.startswith("#"):
            match = re.fullmatch(r"([\w-]+)==([\w.]+) +# \S.*", line)
            assert match, f"{name}: not a pin with its reason: {line}"
            found[match[1].lower()] = match[2]
    return found


def version(package: str) -> str | None:
    """What is installed, without the "+cpu" of 2.13.0+cpu: any build will do."""
    try:
        return metadata.version(package).split("+")[0]
    except metadata.PackageNotFoundError:
        return None


@pytest.mark.parametrize("name", ["requirements.txt", "requirements-dev.txt"])
def test_what_is_installed_is_what_is_pinned(name):
    installed = {package: version(package) for package in pins(name)}
    assert installed == pins(name), "run `make test`, which installs what changed"


def test_every_import_is_pinned():
    ours = {path.stem for path in SOURCES} | {"envs", "runs", "benchmarks", "tests"}
    distributions = metadata.packages_distributions()
    for names, files in (
        (
            "requirements.txt",
            [path for path in SOURCES if path.parent.name not in ("benchmarks", "tests")],
        ),
        ("requirements.txt requirements-dev.txt", SOURCES),
    ):
        pinned = set().union(*(pins(name) for name in names.split()))
        for path in files:
            # vLLM has files of its own, for GPUs and for CPUs: where there is none, tests skip. wandb is a user's
            # choice, made with a flag; TRL and its datasets are for one benchmark, which says how to get them.
            optional = {"vllm", "wandb"} | (
                {"trl", "datasets"} if path.stem == "trl_step" else set()
            )
            for module in imported_names(path) - ours - set(sys.stdlib_module_names) - optional:
                packages = {package.lower() for package in distributions.get(module, [])}
                assert packages & pinned, (
                    f"{path.relative_to(ROOT)} imports {module}, which {names} lacks"
                )


@pytest.mark.parametrize(
    ("python", "says"),
    [
        (None, "was not found"),
        ("exit 1", "older than 3.11"),
        ('case "$2" in *ensurepip*) exit 1;; esac', "no venv module"),
    ],
)
def test_make_names_what_is_missing_in_one_line(tmp_path, python, says):
    for path in (ROOT / "Makefile", *ROOT.glob("requirements*.txt")):
        shutil.copy(path, tmp_path)
    if python:
        (tmp_path / "python").write_text(f"#!/bin/sh\n{python}\n")
        (tmp_path / "python").chmod(0o755)
    for target in ("train", "test"):
        done = run("make", target, "PYTHON=./python", cwd=tmp_path)
        assert done.returncode == 2 and says in done.stderr
        assert len((done.stdout + done.stderr).splitlines()) == 1


# --- files ---

# In pieces, so that this file does not contain them.
HOSTS = [
    f"{name}.{end}"
    for name, end in (
        ("pypi", "org"),
        ("pythonhosted", "org"),
        ("download.pytorch", "org"),
        ("npmjs", "org"),
        ("npmjs", "com"),
        ("deb.debian", "org"),
    )
]


def test_no_file_names_a_registry_host():
    """Where packages come from is the machine's choice: mirrors must work unchanged."""
    git = [
        "git",
        "-c",
        "safe.directory=*",
        "ls-files",
        "-z",
        "--cached",
        "--others",
        "--exclude-standard",
    ]
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout, so nobody knows which files are the repository's")
    listed = subprocess.run(git, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split(
        "\0"
    )
    for path in (ROOT / name for name in listed if name):
        if path.is_file():  # one that was deleted is listed until it is committed
            text = path.read_bytes().decode(errors="replace").lower()
            assert not [host for host in HOSTS if host in text], path
