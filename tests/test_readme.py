"""What the README says of the repository must be so."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_every_file_of_the_table_exists_and_is_about_as_long_as_it_says():
    rows = re.findall(r"^\| `([\w/]+\.py)` \| (\d+) \|", README, re.MULTILINE)
    assert len(rows) >= 9
    for name, lines in rows:
        actual = len((ROOT / name).read_text().splitlines())
        assert abs(actual - int(lines)) <= 0.05 * actual, (
            f"{name} has {actual} lines, the README says {lines}"
        )


def test_every_flag_it_names_is_a_flag():
    source = "".join(
        (ROOT / f"{name}.py").read_text()
        for name in ("train", "evaluate", "sft", "env_server", "report")
    )
    others = {"help", "nproc", "generation-config"}  # tyro's, torchrun's, vLLM's
    for flag in set(re.findall(r"(?<![\w-])--([a-z][a-z-]+)", README)) - others:
        assert re.search(rf"^    {flag.replace('-', '_')}: ", source, re.MULTILINE), (
            f"--{flag} is no field of any Config"
        )


def test_every_metric_it_explains_is_written():
    source = "".join(
        (ROOT / f"{name}.py").read_text() for name in ("train", "records", "algorithms")
    )
    table = README.split("## What the numbers mean")[1].split("## ")[0]
    for name in re.findall(r"`([a-z_]+)`", table):
        assert name in source, f"{name} is explained, but no script writes it"


def test_no_placeholder_is_left():
    assert "@@" not in README
