"""The pages in docs/ must be true: what they tell a reader to write and to run is written and run here."""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "environment.md").read_text()


def blocks(language: str) -> list[str]:
    """The contents of the page's fenced blocks in a language, "" for those in none."""
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    return [text for name, text in fenced if name == language]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> Path:
    """A copy of the repository in which the page's environment has been saved, and no other file changed."""
    copy = tmp_path_factory.mktemp("docs") / "repo"
    skip = shutil.ignore_patterns(".*", "out", "__pycache__")
    shutil.copytree(ROOT, copy, ignore=skip)
    (program,) = blocks("python")
    (copy / "envs" / "lamps.py").write_text(program)
    return copy


def run(checkout: Path, command: str, typed: str = "") -> str:
    """A command of the page, with this interpreter for the reader's."""
    words = shlex.split(command.replace(".venv/bin/python", sys.executable))
    words = [
        str(found) for word in words for found in (sorted(checkout.glob(word)) if "*" in word else [word])
    ]  # fmt: skip
    done = subprocess.run(words, cwd=checkout, input=typed, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def test_no_placeholder_is_left():
    assert not any("@@" in page.read_text() for page in (ROOT / "docs").glob("*.md"))


def test_the_page_has_no_other_commands():
    contract, training = (text.strip().splitlines() for text in blocks(""))
    assert [len(contract), len(training)] == [2, 3]


def test_its_environment_keeps_the_contract(checkout):
    contract, play = blocks("")[0].strip().splitlines()
    said = run(checkout, contract + " -q -p no:cacheprovider")
    assert re.search(r"[2-9]\d passed", said) and "skipped" not in said, said
    assert "Say: press <1 to" in run(checkout, play, "look around\n")


@pytest.mark.slow
def test_its_expert_is_cloned_trained_and_evaluated(checkout):
    clone, train, evaluate = blocks("")[1].strip().splitlines()
    assert "starting policy" in run(checkout, clone + " --updates 2")
    said = run(checkout, train + " --steps 2 --interval 1 --keep-dead-groups --entropy-coef 0.01")
    assert "gain" in said
    assert (checkout / "out/lamps/metrics.jsonl").read_text().count("\n") == 2
    assert "12 turns" in run(checkout, evaluate.replace("step_120", "step_2"))
