"""
The page of a run, in a real Chromium: what it shows, that it shows all texts as they are, and what it leaves out.

Every page is opened through `opened`, which fails on a console error, a page error and any request.
"""

import json
import socket
import subprocess
import sys
import time
from contextlib import closing, contextmanager
from copy import deepcopy
from pathlib import Path

import pytest

import history
import model as weights
import report
import train
from compare import gain
from envs.webarena_parts.browser import find_chromium

ROOT = Path(__file__).parents[1]
FLAGS = (
    "--no-sandbox --disable-gpu --disable-background-networking --disable-component-update --disable-sync "
    "--no-first-run --disable-quic"
).split()
needs_chromium = pytest.mark.skipif(
    find_chromium() is None, reason="Chromium is missing: install the package chromium"
)


# --- runs on paper ---


def line(step: int = 1, group: int = 0, sample: int = 0, **changes) -> dict:
    """A line of trajectories.jsonl: two turns, solved by even samples."""
    success = sample % 2 == 0
    return {
        "step": step, "split": "train", "env": "toy", "task": f"door-{group}", "category": "doors", "group": group,
        "sample": sample, "weights_version": step, "max_turns": 4, "end": "terminated" if success else "max_turns",
        "error": "", "success": success, "return": float(success),
        "turns": [
            {"observation": "A door.", "completion": "Thought: It is shut.\nAction: open door", "thought": "It is shut.",
             "action": "open door", "reward": 0.0},
            {"observation": f"Open, step {step}.", "completion": "I go", "thought": "I go", "action": "",
             "reward": float(success)},
        ],
        "last_observation": "Through." if success else "Still here.",
    } | changes  # fmt: skip


def step_metrics(step: int, **changes) -> dict:
    """A line of metrics.jsonl, two stages: four turns up to step 3, then eight."""
    return {
        "step": step, "max_turns": 4 if step <= 3 else 8, "success_rate": step / 10, "return_mean": step / 10,
        "turns_mean": 3.5, "entropy": 0.4, "approx_kl": 1e-4, "ref_kl": None, "clip_fraction_low": 0.01,
        "clip_fraction_high": 0.02, "error_fraction": 0.0, "grad_norm": 0.5, "errors": {},
    } | changes  # fmt: skip


def eval_record(rates: dict[str, float], **changes) -> dict:
    """A line of eval.jsonl, from each task's share of solved episodes."""
    rate = sum(rates.values()) / len(rates)
    return {
        "step": 0, "split": "test", "temperature": 1.0, "max_turns": 20, "tasks": len(rates),
        "episodes": 2 * len(rates), "errors": 0, "success_rate": rate, "success_interval": [rate - 0.1, rate + 0.1],
        "return_mean": rate, "turns_mean": 7.25, "ends": {"terminated": 3, "max_turns": 1},
        "pass_at": {"1": rate, "2": min(1.0, rate + 0.2)}, "by_category": {"toy/doors": rate}, "per_task": rates,
    } | changes  # fmt: skip


def a_run(folder: Path, trajectories=None, metrics=None, records=None, **config) -> Path:
    """A run's folder with what is given; six steps of two groups of four where nothing is."""
    folder.mkdir(parents=True)
    steps = range(1, 7)
    if trajectories is None:
        trajectories = [line(s, g, n) for s in steps for g in range(2) for n in range(4)]
    if metrics is None:
        metrics = [step_metrics(step) for step in steps]
    if records is None:
        before, after = {"a": 0.0, "b": 0.5, "c": 0.0}, {"a": 1.0, "b": 0.5, "c": 1.0}
        records = [
            eval_record(before),
            eval_record(before, step=3, split="dev"),
            eval_record(after, step=6),
        ]
    files = {"trajectories": trajectories, "metrics": metrics, "eval": records}
    for name, lines in files.items():
        text = "".join(json.dumps(one) + "\n" for one in lines)
        (folder / f"{name}.jsonl").write_text(text)
    (folder / "config.json").write_text(
        json.dumps({"algo": "grpo", "env_token": "secret"} | config)
    )
    return folder


def page_of(*runs: Path, **settings) -> Path:
    """The page of some runs, written beside the first."""
    html = runs[0].parent / "page.html"
    report.write(list(runs), html, **settings)
    return html


# --- a browser ---


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=find_chromium(), args=FLAGS)
        yield chromium
        chromium.close()


@contextmanager
def opened(browser, html: Path, width: int = 1280, scheme: str = "light"):
    """The page, open; when the test is through with it, nothing may have gone wrong or been fetched."""
    context = browser.new_context(
        viewport={"width": width, "height": 900}, color_scheme=scheme, reduced_motion="reduce"
    )
    page = context.new_page()
    page.set_default_timeout(30_000)
    wrong: list[str] = []
    page.on("console", lambda m: wrong.append(m.text) if m.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("dialog", lambda dialog: (wrong.append(dialog.message), dialog.dismiss()))
    page.on("request", lambda r: wrong.append(r.url) if r.url != html.as_uri() else None)
    page.goto(html.as_uri())
    try:
        yield page
        assert wrong == []
    finally:
        context.close()


def count(page) -> str:
    return page.locator("#count").inner_text().split(" of ")[0]


def wait_for_count(page, number: int) -> None:
    page.get_by_text(f"{number} of ", exact=False).and_(page.locator("#count")).wait_for()


def shown(page) -> str:
    """The heading of the trajectory that is open."""
    return page.locator("article h3").first.inner_text()


# --- reading what a run wrote ---


def test_numbers_become_json_whatever_they_are():
    assert [history.number(v) for v in (1, 0.123456789, True, None, "x", [1])] == [
        1,
        0.123457,
        None,
        None,
        None,
        None,
    ]
    assert [history.number(float(v)) for v in ("nan", "inf", "-inf")] == ["nan", "inf", "-inf"]
    assert history.number(123456789) == 123456789 and history.number(10**400) == str(10**400)


def test_json_in_a_page_holds_nothing_that_html_reads():
    text = "</script><!--&\u2028\u2029\ud800é"
    encoded = history.encode({text: [text]})
    assert not set("<>&") & set(encoded) and encoded.isascii()
    assert json.loads(encoded) == {text: [text]}


def test_a_line_that_is_no_object_is_left_out_and_said(tmp_path):
    file = tmp_path / "lines.jsonl"
    file.write_bytes(b'{"a": 1}\nnot json\n[2]\n\n{"b": "\xff"}\n{"c": 3}\n{"d": "cut')
    notes = []
    assert history.read_lines(file, notes) == [{"a": 1}, {"c": 3}]
    assert notes == [f"{file}: no JSON object in line 2, 3, 5, 7 (cut off): left out"]
    assert history.read_lines(tmp_path / "none.jsonl", notes) == [] and len(notes) == 1


def test_only_the_end_of_a_file_is_read_where_that_is_asked_for(tmp_path):
    file = tmp_path / "lines.jsonl"
    file.write_text('{"a": 1}\n{"a": 2}\n{"a": 3}\n')  # 9 bytes each
    read = lambda newest: [one["a"] for one in history.stream(file, [], newest)]
    assert [read(n) for n in (0, 8, 9, 10, 18, 27, 100)] == [
        [],
        [],
        [3],
        [3],
        [2, 3],
        [1, 2, 3],
        [1, 2, 3],
    ]


def test_the_interval_is_over_tasks_and_only_where_the_episodes_are_known():
    metrics = [step_metrics(step) for step in range(1, 8)]
    # two tasks, one always solved, one never: the mean of two draws is 0, 1/2 or 1
    split = {("toy", "a", 0): [True] * 8, ("toy", "b", 1): [False] * 8}
    columns = history.curves(metrics, {1: split, 2: split, 3: {("toy", "a", 0): [True, False]}}, [])
    assert (columns["success_low"][0], columns["success_high"][0]) == (0.0, 1.0)
    assert columns["success_low"][1] in (0.0, 0.25) and columns["success_high"][1] in (0.75, 1.0)
    assert columns["success_low"][3:] == [None] * 4  # step 4 has no trajectories
    assert columns["success_smooth"] == pytest.approx([0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5])


def test_long_runs_are_thinned_and_that_is_said(monkeypatch):
    monkeypatch.setattr(history, "MOST_STEPS", 10)
    notes = []
    columns = history.curves([step_metrics(step) for step in range(1, 26)], {}, notes)
    assert columns["step"] == [1, 4, 7, 10, 13, 16, 19, 22, 25]
    assert notes == ["of 25 training steps, curves show one in 3"]


def test_a_record_of_an_older_version_is_shown_as_far_as_it_goes(tmp_path):
    run = a_run(
        tmp_path / "old",
        trajectories=[{"step": 1, "turns": None}, {"turns": [3]}, line(tokens={"ids": [1]})],
        metrics=[
            {"step": 1},
            {"success_rate": 0.5},
            {"step": 2, "success_rate": None, "entropy": float("nan")},
        ],
        records=[{"step": 0}, {"step": 1, "success_interval": 3}],
    )
    data, items = history.gather([run])
    assert len(items) == 1 and len(data["evaluations"]) == 1
    assert data["runs"][0]["curves"]["step"] == [1, 2]
    assert data["runs"][0]["curves"]["entropy"] == [None, "nan"]
    assert data["notes"] == [
        f"{run / 'eval.jsonl'}: 1 lines of another form than ours: left out",
        f"{run / 'trajectories.jsonl'}: 2 lines of another form than ours: left out",
    ]


# --- what fits ---


def test_every_step_loses_as_much_as_any_other():
    """By hand: three steps of 4, 2 and 1 trajectories of 10 bytes (7 and separators), the first of each with tokens."""
    steps = [1, 1, 1, 1, 2, 2, 3]
    items = [
        ((0, "train", s), "x" * 7, "t" * 30 if i in (0, 4, 6) else "", [])
        for i, s in enumerate(steps)
    ]
    assert report.choose(items, 160) == ([0, 1, 2, 3, 4, 5, 6], {0, 4, 6})
    # 80 % of 150 hold all 7 texts; in the 80 bytes that are left there is room for two tokens of 30
    assert report.choose(items, 150) == ([0, 1, 2, 3, 4, 5, 6], {0, 4})
    # 80 % of 63 hold 5 texts: the first of each step, then the second of each
    assert report.choose(items, 63) == ([0, 1, 4, 5, 6], set())
    assert report.choose(items, 5) == ([], set())


def test_one_huge_trajectory_does_not_keep_the_others_out():
    items = [((0, "train", 1), "x" * n, "", []) for n in (1000, 8, 8)]
    assert report.choose(items, 100) == ([1, 2], set())


# --- the command, and refreshing ---


def test_what_cannot_be_drawn_is_said_in_a_line_with_code_2(tmp_path):
    (tmp_path / "empty").mkdir()
    command = [sys.executable, str(ROOT / "report.py")]
    done = subprocess.run([*command, "empty"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("report.py: empty holds nothing to show: expected lines in")
    assert done.stderr.count("\n") == 1 and list((tmp_path / "empty").iterdir()) == []


def test_the_command_writes_the_page_and_the_picture_and_says_where(tmp_path, capsys):
    a, b = a_run(tmp_path / "a"), a_run(tmp_path / "b")
    report.main(report.Config((a,)))
    report.main(report.Config((a, b), png=tmp_path / "curve.png"))
    said = capsys.readouterr().out.splitlines()
    assert said == [str(a / "report.html"), str(a / "compare.html"), str(tmp_path / "curve.png")]
    assert all(Path(file).stat().st_size > 1000 for file in said)
    assert not list(a.glob(".*"))


@pytest.mark.parametrize("settings", [{"runs": ()}, {"max_mb": 0.0}, {"max_mb": float("nan")}])
def test_a_flag_without_sense_is_refused(settings):
    with pytest.raises(ValueError):
        report.Config(**{"runs": (Path("a"),)} | settings)


def test_a_page_too_small_for_its_curves_is_refused_and_the_old_one_stays(tmp_path):
    run = a_run(tmp_path / "run")
    (tmp_path / "page.html").write_text("old")
    with pytest.raises(
        ValueError, match=r"--max-mb 0.01 is too small: without any trajectory .* 0.0\d MB"
    ):
        page_of(run, max_mb=0.01)
    assert (tmp_path / "page.html").read_text() == "old" and not list(tmp_path.glob(".*"))


def test_refreshing_waits_its_turn_and_never_ends_a_run(tmp_path, capsys, monkeypatch):
    run = a_run(tmp_path / "run")
    began = time.monotonic()
    due = report.refresh(run, share=0.02)
    first = (run / "report.html").read_bytes()
    took = time.monotonic() - began
    assert began < due <= began + took / 0.02
    assert "only the newest" not in first.decode()
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(step_metrics(7)) + "\n")
    assert report.refresh(run, time.monotonic() + 60) > time.monotonic() + 50
    assert (run / "report.html").read_bytes() == first  # too early
    report.refresh(run, newest=2000)
    assert "only the newest 0.002 MB" in (run / "report.html").read_text()
    second = (run / "report.html").read_bytes()
    monkeypatch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    report.refresh(run)
    assert "not written: OSError('disk full')" in capsys.readouterr().err
    assert (run / "report.html").read_bytes() == second and not list(run.glob(".*"))


@pytest.mark.parametrize("is_main", [True, False])
def test_a_save_refreshes_the_page_on_one_rank_and_changes_nothing_else(
    is_main, tmp_path, monkeypatch
):
    run = train.Run.__new__(train.Run)
    run.config, run.is_main, run.page_due = train.Config(), is_main, 0.0
    run.folder = a_run(tmp_path / "run")
    run.state, run.tokenizer, run.optimizers, run.modules = {"step": 6}, None, {}, {}
    monkeypatch.setattr(weights, "save_checkpoint", lambda *_: None)
    monkeypatch.setattr(weights, "on_rank_0", lambda make: make())  # there is no process group here
    before = {file: file.read_bytes() for file in run.folder.iterdir()}
    run.save()
    after = {file: file.read_bytes() for file in run.folder.iterdir()}
    assert (after.pop(run.folder / "report.html", None) is not None) == is_main
    assert after == before and (run.page_due > 0) == is_main


# --- the page ---


@needs_chromium
def test_the_curves_and_their_numbers(browser, tmp_path):
    metrics = [step_metrics(s, grad_norm=float("nan") if s == 3 else 0.5) for s in range(1, 7)]
    html = page_of(a_run(tmp_path / "first", metrics=metrics))
    assert "secret" not in html.read_text() and "env_token" not in html.read_text()
    with opened(browser, html) as page:
        assert page.title() == "first – report"
        titles = page.locator("#curves figcaption").all_inner_texts()
        names = [
            title.split("  ")[0].split(" not a")[0].split(" band")[0].strip() for title in titles
        ]
        assert names == [
            "Success",
            "Return",
            "Turns",
            "Entropy",
            "KL",
            "Clip fraction",
            "Errors",
            "Gradient norm",
        ]
        assert titles[-1].endswith("not a finite number at training step 3")
        success = page.locator("#curves svg[role=img]").first
        assert success.locator("rect.stage").count() == 2
        words = success.locator("text").all_text_contents()
        assert {"4 turns", "8 turns", "training step", "success rate"} <= set(words)
        success.focus()
        page.keyboard.press("ArrowLeft")  # the last step
        tip = page.locator("#tip").inner_text().split("\n")
        assert tip[0] == "training step 6" and "single steps: 0.6" in tip
        # mean of steps 2 to 6; every task is solved half of the time, so the interval has no width
        assert "training tasks, mean of 5 steps: 0.4 [0.5, 0.5]" in tip
        assert "test, sampled at temperature 1: 0.833 [0.733, 0.933]" in tip
        for _ in range(3):
            page.keyboard.press("ArrowLeft")
        tip = page.locator("#tip").inner_text().split("\n")
        assert (
            tip[0] == "training step 3"
            and "dev, sampled at temperature 1: 0.167 [0.0667, 0.267]" in tip
        )
        box = success.bounding_box()
        page.mouse.move(box["x"] + box["width"] - 20, box["y"] + 100)
        assert page.locator("#tip").inner_text().startswith("training step 6\n")


@needs_chromium
def test_before_and_after_in_a_table(browser, tmp_path):
    run = a_run(tmp_path / "run")
    records = history.read_lines(run / "eval.jsonl")
    mean, low, high = gain(records[0], records[2])
    with opened(browser, page_of(run)) as page:
        assert page.locator("#tables h3").all_inner_texts() == [
            "test, sampled at temperature 1", "dev, sampled at temperature 1",
        ]  # fmt: skip
        rows = [
            row.inner_text().replace("\xa0", " ").split("\t")
            for row in page.locator("#tables table").first.locator("tr").all()
        ]
        assert rows[0] == ["what\n", "step 0", "step 6"]
        table = {name.strip(): cells for name, *cells in rows[1:]}
        assert table["success"] == ["0.167 [0.067, 0.267]", "0.833 [0.733, 0.933]"]
        assert table["gain over the first"] == ["–", f"+{mean:.3f} [+{low:.3f}, +{high:.3f}]"]
        assert table["toy/doors"] == ["0.167", "0.833"] and table["ended by max_turns"] == [
            "1",
            "1",
        ]


@needs_chromium
def test_an_evaluation_at_several_turn_limits(browser, tmp_path):
    records = [
        {
            key: value
            for key, value in eval_record({"a": turns / 20, "b": 0.0}).items()
            if key != "step"
        }
        | {"max_turns": turns, "model": "out/x/checkpoints/best"}
        for turns in (20, 5, 10)
    ]
    run = a_run(tmp_path / "eval-001", trajectories=[], metrics=[], records=records)
    with opened(browser, page_of(run)) as page:
        assert not page.locator("#learning").is_visible()
        titles = page.locator("#scaling figcaption").all_inner_texts()
        assert [title.split()[0] for title in titles] == ["Test-time", "pass@k"]
        scaling, passes = page.locator("#scaling svg[role=img]").all()
        scaling.focus()
        page.keyboard.press("ArrowLeft")
        page.keyboard.press("ArrowLeft")
        assert page.locator("#tip").inner_text().split("\n")[0] == "turns an episode may take 10"
        assert ": 0.25 [0.15, 0.35]" in page.locator("#tip").inner_text()
        passes.focus()
        page.keyboard.press("ArrowLeft")
        assert "test, at most 20 turns: 0.7" in page.locator("#tip").inner_text()
        assert page.locator("#tables thead th").all_inner_texts()[1:] == [
            "at most 20 turns", "at most 5 turns", "at most 10 turns",
        ]  # fmt: skip
        assert "holds no trajectory" in page.locator("#shown").inner_text()


@needs_chromium
def test_filters_and_search(browser, tmp_path):
    lines = [
        line(s, g, n) for s in range(1, 7) for g in range(2) for n in range(4)
    ]  # 48, half of them solved
    special = line(3, 1, 9, task="window", end="error", error="server (down)", success=False)
    special["turns"][0]["thought"] = "Is it 100% [glass]? é"
    lines += [special, line(0, 0, 0, split="test")]
    with opened(browser, page_of(a_run(tmp_path / "run", trajectories=lines))) as page:
        assert page.locator("#count").inner_text() == "50 of 50 trajectories."
        choose = lambda box, label: page.locator(box).select_option(label=label)
        choose("#outcome", "success")
        assert count(page) == "25"
        choose("#split", "train")
        assert count(page) == "24"
        choose("#outcome", "no success")
        assert count(page) == "25"
        choose("#end", "error")
        assert (
            count(page) == "1"
            and "window" in shown(page)
            and "server (down)" in page.locator("article").inner_text()
        )
        for box in ("#outcome", "#end", "#split"):
            choose(box, "any")
        page.locator("#step").fill("2-3")
        wait_for_count(page, 17)
        page.locator("#step").fill("3")
        wait_for_count(page, 9)
        page.locator("#step").fill("three")
        wait_for_count(page, 50)
        assert page.locator("#step").get_attribute("aria-invalid") == "true"
        assert "40 or 1-20" in page.locator("#count").inner_text()
        page.locator("#step").fill("")
        page.locator("#task").fill("DOOR-1")
        wait_for_count(page, 24)
        page.locator("#task").fill("")
        for query, number in (
            ("OPEN, STEP 6", 8),
            ("100% [GLASS]? É", 1),
            ("server (d", 1),
            ("no such words", 0),
        ):
            page.locator("#search").fill(query)
            wait_for_count(page, number)
        assert "No trajectory passes" in page.locator("#shown").inner_text()
        page.locator("#search").fill("glass")
        wait_for_count(page, 1)
        assert page.locator("article mark").all_inner_texts() == ["glass"]


@needs_chromium
def test_keys(browser, tmp_path):
    with opened(browser, page_of(a_run(tmp_path / "run"))) as page:
        open_index = lambda: page.locator("article").first.get_attribute("data-index")
        press = page.keyboard.press
        assert open_index() == "0"
        press("j")
        press("j")
        press("k")
        assert open_index() == "1"
        assert page.locator("#list").bounding_box()["y"] < 900  # the list came into view
        page.locator("#list").focus()
        press("ArrowDown")
        assert open_index() == "2"
        press("End")
        assert open_index() == "47"
        active = page.locator("#list").get_attribute("aria-activedescendant")
        assert page.locator(f"#{active}").get_attribute("aria-selected") == "true"
        press("ArrowDown")  # there is no next one
        press("ArrowUp")
        assert open_index() == "46"
        press("Home")
        assert open_index() == "0"
        press("/")
        page.keyboard.type("jjk?")  # letters in a field are letters
        assert (
            page.locator("#search").input_value() == "jjk?"
            and not page.locator("#help").is_visible()
        )
        wait_for_count(page, 0)
        press("Escape")  # out of the field, which keeps its words
        assert page.evaluate("document.activeElement.tagName") == "BODY"
        assert page.locator("#search").input_value() == "jjk?"
        press("?")
        assert page.locator("#help").is_visible()
        press("j")  # nothing happens behind it
        press("Escape")
        assert not page.locator("#help").is_visible()
        press("/")
        page.keyboard.press("Control+a")
        press("Delete")
        wait_for_count(page, 48)


@needs_chromium
def test_two_of_a_group_side_by_side(browser, tmp_path):
    with opened(browser, page_of(a_run(tmp_path / "run"))) as page:
        page.keyboard.press("j")
        labels = page.locator("#beside option").all_inner_texts()
        assert labels[0] == "nothing" and [label.split(":")[0] for label in labels[1:]] == [
            "sample 0",
            "sample 2",
            "sample 3",
        ]
        page.keyboard.press("s")
        articles = page.locator("article").all()
        assert [a.get_attribute("data-index") for a in articles] == ["1", "0"]
        assert "Still here." in articles[0].inner_text() and "Through." in articles[1].inner_text()
        left, right = (a.bounding_box() for a in articles)
        assert left["y"] == right["y"] and left["x"] + left["width"] <= right["x"]
        page.locator("#beside").select_option(label=labels[3])
        assert page.locator("article").nth(1).get_attribute("data-index") == "3"
        page.locator("#beside").select_option("")
        assert page.locator("article").count() == 1
        page.locator("article .group button").nth(2).click()
        assert page.locator("article").get_attribute("data-index") == "2"


@needs_chromium
def test_greedy_and_sampled_episodes_of_a_task_are_no_group(browser, tmp_path):
    played = [line(split="test", sample=n, temperature=t) for t in (1.0, 0.0) for n in (0, 1)]
    with opened(browser, page_of(a_run(tmp_path / "run", trajectories=played))) as page:
        for index, kind in ((0, "sampled at temperature 1"), (2, "greedy")):
            page.locator("#list").press("Home")
            for _ in range(index):
                page.keyboard.press("j")
            assert kind in page.locator("article").inner_text()
            labels = page.locator("#beside option").all_inner_texts()
            assert [label.split(":")[0] for label in labels] == [
                "nothing",
                f"sample {1 - index % 2}",
            ]


# --- tokens ---


def with_tokens(ids: list[int]) -> dict:
    """Four tokens read, four sampled, the rest read; one of each kind of number."""
    n = len(ids) - 8
    return {
        "ids": ids,
        "loss_mask": [0] * 4 + [1] * 4 + [0] * n,
        "rollout_logprobs": [0.0] * 4 + [-0.5, -2.5, -0.25, float("nan")] + [0.0] * n,
        "old_logprobs": [0.0] * 4 + [-0.50000012, -2.5, -0.125, -1.0] + [0.0] * n,
        "advantages": [0.0] * 4 + [2.0, -1.0, 0.0, 2.0] + [0.0] * n,
    }


def alpha(page, token: int) -> tuple[float, bool]:
    """How strong a token's colour is, and whether it is blue (orange otherwise)."""
    color = page.locator(".token").nth(token).evaluate("e => getComputedStyle(e).backgroundColor")
    if color == "rgba(0, 0, 0, 0)":
        return 0.0, False
    red, _, blue, strength = (
        float(x) for x in color.replace("color(srgb ", "").rstrip(")").replace("/ ", "").split()
    )
    return strength, blue > red


@needs_chromium
def test_a_trajectory_that_the_trainer_did_not_score_has_no_difference_to_show(browser, tmp_path):
    tokens = with_tokens(list(range(20))) | {"old_logprobs": None}
    run = a_run(tmp_path / "run", trajectories=[line(tokens=tokens)])
    with opened(browser, page_of(run)) as page:
        page.keyboard.press("t")
        page.locator(".token").nth(4).hover()
        said = page.locator("#tip").inner_text().split("\n")
        assert said[2:5] == [
            "log-probability, sampler: -0.5",
            "log-probability, trainer: not scored",
            "sampler − trainer: not known",
        ]
        page.select_option("#measure", "difference")
        assert alpha(page, 4)[0] == 0 and page.locator(".token.broken").count() == 0


@needs_chromium
def test_episodes_under_other_turn_limits_are_no_group(browser, tmp_path):
    played = [line(split="test", sample=n, max_turns=turns) for turns in (4, 8) for n in (0, 1)]
    with opened(browser, page_of(a_run(tmp_path / "run", trajectories=played))) as page:
        labels = page.locator("#beside option").all_inner_texts()
        assert [label.split(":")[0] for label in labels] == ["nothing", "sample 1"]


@needs_chromium
def test_tokens_have_their_words_colours_and_numbers(browser, tmp_path, tokenizer):
    text = "Thought: I see the red key. 7\nAction: <go>"
    ids = tokenizer.encode(text)
    run = a_run(tmp_path / "run", trajectories=[line(tokens=with_tokens(ids)), line(sample=1)])
    tokenizer.save_pretrained(run / "checkpoints/step_1")
    with opened(browser, page_of(run)) as page:
        page.keyboard.press("t")
        tokens = page.locator(".token")
        assert (
            "".join(tokens.evaluate_all("all => all.map(e => e.textContent)")).replace("⏎", "")
            == text
        )
        assert [alpha(page, t)[0] for t in (3, 4, 7, 8)] == pytest.approx(
            [0, 0.27, 0.27, 0]
        )  # the mask
        assert [t.get_attribute("data-j") for t in page.locator(".token:not(.read)").all()] == [
            *"4567"
        ]
        tokens.nth(4).hover()
        word = tokenizer.decode(ids[4:5])
        assert page.locator("#tip").inner_text().split("\n") == [
            f'token 4: "{word}", id {ids[4]}', "loss mask 1: sampled", "log-probability, sampler: -0.5",
            "log-probability, trainer: -0.5", "sampler − trainer: 1.2e-7", "advantage: 2",
        ]  # fmt: skip
        tokens.nth(2).hover()
        assert "loss mask 0: read, not sampled" in page.locator("#tip").inner_text()
        tokens.nth(4).focus()
        for key in ("ArrowRight", "ArrowRight", "ArrowRight", "ArrowLeft"):
            page.keyboard.press(key)
        assert page.evaluate("document.activeElement.dataset.j") == "6"
        assert "sampler − trainer: -0.125" in page.locator("#tip").inner_text()
        page.keyboard.press("c")  # log-probability: 0 to -5
        assert [alpha(page, t)[0] for t in (3, 4, 5, 6)] == pytest.approx(
            [0, 0.05, 0.23, 0.02], abs=0.01
        )
        assert [t.get_attribute("data-j") for t in page.locator(".token.broken").all()] == [
            "7"
        ]  # the NaN
        tokens.nth(7).hover()
        assert "log-probability, sampler: nan" in page.locator("#tip").inner_text()
        page.locator("#measure").select_option("difference")
        assert [alpha(page, t) for t in (4, 5)] == [(0.0, False), (0.0, False)]
        assert alpha(page, 6) == (pytest.approx(0.45), False)  # the largest, and negative
        page.locator("#measure").select_option("advantage")
        assert alpha(page, 4) == (pytest.approx(0.45), True)
        assert alpha(page, 5) == (pytest.approx(0.23, abs=0.01), False)
        assert alpha(page, 6)[0] == 0 and alpha(page, 8)[0] == 0
        page.locator("#detailed").check()
        assert count(page) == "1"
        page.locator("#detailed").uncheck()
        page.keyboard.press("Escape")
        page.keyboard.press("j")
        assert "No token detail" in page.locator("article").inner_text()


@needs_chromium
def test_without_a_tokenizer_tokens_are_their_ids_and_the_page_says_so(browser, tmp_path):
    run = a_run(tmp_path / "run", trajectories=[line(tokens=with_tokens(list(range(10, 20))))])
    with opened(browser, page_of(run)) as page:
        page.keyboard.press("t")
        assert page.locator(".token").all_inner_texts()[:2] == ["⟨10⟩", "⟨11⟩"]
        assert "tokens are shown as their ids" in page.locator("#notes").inner_text()


def test_a_tokenizer_that_drops_leading_spaces_keeps_them_here(tmp_path):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({"▁a": 0, "▁go": 1, "ing": 2}, unk_token="▁a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    assert tokenizer.decode([1]) == "go"
    (tmp_path / "checkpoints/step_1").mkdir(parents=True)
    tokenizer.save(str(tmp_path / "checkpoints/step_1/tokenizer.json"))
    assert history.token_texts(tmp_path, {1, 2}) == {1: " go", 2: "ing"}


# --- strangers' texts ---

HOSTILE = [
    "<script>window.hacked = 1</script>",
    "</script><script>window.hacked = 1</script>",
    "\"onload='window.hacked=1' x=\"",
    "<img src=x onerror=window.hacked=1>",
    "--> <!-- <script> -->",
    "<!--<script>",
    "</script ><img src=x onerror='window.hacked = 1'>",
    "line\u2028and\u2029line &lt;b&gt; &amp; \\u003cb> \u202e reversed",
    "@@DATA@@ ${window.hacked = 1} `",
    "half a pair: \ud800",
]


@needs_chromium
@pytest.mark.parametrize("text", HOSTILE)
def test_a_strangers_text_is_shown_and_never_run(browser, tmp_path, tokenizer, text):
    hostile = line(
        env=text, task=text, category=text, error=text, end=text, split=text, last_observation=text
    )
    turn = {"observation": text, "completion": text, "thought": text, "action": text, "reward": 0.0}
    tokenizer, token = deepcopy(tokenizer), text.replace("\ud800", "?")
    tokenizer.add_tokens([token])  # a word of the vocabulary, too
    ids = tokenizer.encode("a b ") + [tokenizer.convert_tokens_to_ids(token)] * 8
    hostile |= {"turns": [turn], "tokens": with_tokens(ids)}
    records = [
        eval_record(
            {text: 0.0}, split=text, model=text, ends={text: 1}, by_category={text: 0.5}, step=step
        )
        for step in (0, 1)
    ]
    name = text.replace("/", "").encode("utf-8", "replace").decode()  # what a folder may be called
    run = a_run(tmp_path / name, [hostile, line()], [step_metrics(1)], records, model=text)
    tokenizer.save_pretrained(run / "checkpoints/step_1")
    (run / "metrics.jsonl").open("a").write("broken\n")  # a note with the folder's name
    with opened(browser, page_of(run)) as page:
        scripts = "document.querySelectorAll('script').length + 10 * document.querySelectorAll('img').length"
        assert page.evaluate(scripts) == 4
        assert page.evaluate("typeof window.hacked") == "undefined"
        # compared in the page, since half a surrogate pair can't leave it
        same = lambda where, text=text: page.evaluate(
            "([where, text]) => [...document.querySelectorAll(where)].map(e => e.textContent === JSON.parse(text))",
            [where, json.dumps(text)],
        )
        # at the end; observation, as written, thought, action of the turn
        assert same("article .turn dd .said") == [True] * 5
        assert same("article p.bad .said") == [True] and same("article h3 .category") == [True]
        assert same("article h3 .said", f"{text}/{text}") == [True, False]
        for box in ("#split option", "#end option"):
            assert same(box) == [False, True, False]
        assert sum(same("#tables th")) == 1  # the category
        assert page.evaluate("document.title").startswith(name[:4])
        assert page.locator("h1").evaluate("e => e.textContent") == name
        assert name in page.locator("#notes").text_content()
        page.keyboard.press("t")
        words = page.locator(".token").evaluate_all("all => all.map(e => e.textContent)")
        assert token in words
        page.locator(".token").nth(4).hover()
        page.locator("#search").fill(text[:12])
        wait_for_count(page, 1)
        assert page.evaluate(scripts) == 4 and page.evaluate("typeof window.hacked") == "undefined"


@needs_chromium
def test_the_policy_stops_what_the_page_itself_would_not(browser, tmp_path):
    """The second wall: even markup that got into the page, as it can't, runs nothing and fetches nothing."""
    server = socket.create_server(("127.0.0.1", 0))
    server.settimeout(0.5)
    html = page_of(a_run(tmp_path / "run"))
    inside = (
        "<script>window.hacked = 1</script><b onclick='window.hacked = 1' id=b>b</b>"
        f"<img src='http://127.0.0.1:{server.getsockname()[1]}/x' onerror='window.hacked = 1'>"
    )
    html.write_text(html.read_text().replace("<main>", f"<main>{inside}"))
    with server, closing(browser.new_context()) as context:
        page = context.new_page()
        page.goto(html.as_uri())
        page.locator("#b").click()
        with pytest.raises(TimeoutError):
            server.accept()
        assert page.evaluate("typeof window.hacked") == "undefined"
        assert page.locator("#count").inner_text().startswith("48 of 48")  # our own script did run


# --- size ---


@needs_chromium
def test_a_page_stays_in_its_size_and_says_what_it_left_out(browser, tmp_path):
    steps = range(1, 11)
    lines = [line(s, g, n) for s in steps for g in range(3) for n in range(4)]
    for one in lines:
        if one["group"] == 0:
            one["tokens"] = with_tokens(list(range(100, 200)))
    run = a_run(tmp_path / "run", lines, [step_metrics(s) for s in steps])
    whole = page_of(run).stat().st_size
    assert b"to stay within" not in page_of(run).read_bytes()

    html = page_of(run, max_mb=(whole - 20_000) / 1e6)  # most of the tokens fit
    assert html.stat().st_size <= whole - 20_000
    with opened(browser, html) as page:
        assert page.locator("#count").inner_text() == "120 of 120 trajectories."
        page.locator("#detailed").check()
        left = int(count(page))
        assert 0 < left < 40
        note = f"the token detail of {40 - left} of 40 trajectories is left out"
        assert note in page.locator("#notes").inner_text()

    small = page_of(a_run(tmp_path / "none", [], [step_metrics(s) for s in steps])).stat().st_size
    html = page_of(run, max_mb=(small + 40_000) / 1e6)
    assert html.stat().st_size <= small + 40_000
    with opened(browser, html) as page:
        left = int(count(page))
        assert 0 < left < 120
        assert (
            f"{120 - left} of 120 trajectories are left out" in page.locator("#notes").inner_text()
        )
        per_step = []
        for step in reversed(steps):  # the first is shown already, so it comes last
            page.locator("#step").fill(str(step))
            page.locator("article").get_by_text(f"train, step {step} ·").wait_for()
            per_step.append(int(count(page)))
        assert sum(per_step) == left and max(per_step) - min(per_step) <= 1


def test_the_size_holds_to_the_byte_for_many_short_trajectories(tmp_path):
    lines = [
        line(s, 0, n, turns=[], tokens=with_tokens([7] * 9)) for s in range(9) for n in range(400)
    ]
    run = a_run(tmp_path / "run", lines, [step_metrics(1)])
    whole = page_of(run).stat().st_size
    for bytes_left_out in (1, 10_000, 600_000):
        size = page_of(run, max_mb=(whole - bytes_left_out) / 1e6).stat().st_size
        assert whole - bytes_left_out - 5000 < size <= whole - bytes_left_out


@needs_chromium
def test_five_thousand_trajectories_are_a_short_list(browser, tmp_path):
    lines = [line(s, g, n) for s in range(1, 51) for g in range(10) for n in range(10)]
    with opened(browser, page_of(a_run(tmp_path / "run", lines))) as page:
        assert page.locator("#count").inner_text() == "5,000 of 5,000 trajectories."
        assert page.locator(".item").count() < 60
        assert page.evaluate("document.querySelectorAll('*').length") < 1500
        page.locator("#list").focus()
        page.keyboard.press("End")
        assert page.locator("article").get_attribute("data-index") == "4999"
        assert page.locator(".item[aria-selected=true]").get_attribute("aria-posinset") == "5000"
        page.locator("#list").evaluate("e => e.scrollTop = 2500 * 48")
        page.locator("#row-2503").click()
        assert page.locator("article").get_attribute("data-index") == "2503"
        page.locator("#search").fill("open, step 50")
        wait_for_count(page, 100)
        assert page.locator(".item").count() < 60


# --- several runs ---


@needs_chromium
def test_several_runs_in_one_page(browser, tmp_path):
    a = a_run(tmp_path / "x/a")
    b = a_run(tmp_path / "y/b", trajectories=[line(sample=n) for n in range(3)])
    twin = a_run(tmp_path / "z/a", metrics=[step_metrics(s, max_turns=12) for s in range(1, 4)])
    with opened(browser, page_of(a, b, twin)) as page:
        assert page.locator("#run option").all_inner_texts() == ["any", str(a), "b", str(twin)]
        legends = [
            legend.inner_text().split("\n") for legend in page.locator("#curves .legend").all()
        ]
        assert legends[0] == [str(a), "b", str(twin), "test, sampled", "test, greedy", "dev"]
        assert legends[1] == [str(a), "b", str(twin)]  # the return
        lines = (
            page.locator("#curves figure").first.locator("svg[role=img] .curve:not(.faint)").all()
        )
        colors = {one.evaluate("e => getComputedStyle(e).stroke") for one in lines}
        assert len(lines) == len(colors) == 3
        page.locator("#curves svg[role=img]").first.focus()
        page.keyboard.press("ArrowLeft")
        assert "b: training tasks, mean of 5 steps: 0.4" in page.locator("#tip").inner_text()
        assert page.locator("rect.stage").count() == 0
        assert "horizons differ" in page.locator("#learning-text").inner_text()
        header = page.locator("#tables thead").first.locator("th").all_inner_texts()[1:]
        assert header == [
            f"{a}, step 0",
            f"{a}, step 6",
            "b, step 0",
            "b, step 6",
            f"{twin}, step 0",
            f"{twin}, step 6",
        ]
        page.locator("#run").select_option(label="b")
        assert count(page) == "3" and "b · train, step 1" in page.locator("article").inner_text()


# --- looks ---

# Every text whose contrast with what lies behind it is below AA: 4.5 to 1, 3 to 1 where it is large.
CONTRAST = """() => {
  const parse = (color) => {
    const n = color.match(/[-+.e\\d]+/g).map(Number);
    const rgb = color.startsWith("color(") ? n.slice(0, 3).map((x) => 255 * x) : n.slice(0, 3);
    return [...rgb, n.length > 3 ? n[3] : 1];
  };
  const over = (top, below) => [0, 1, 2].map((i) => top[3] * top[i] + (1 - top[3]) * below[i]);
  const light = (rgb) => rgb.map((x) => x / 255).map((x) => (x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4))
    .reduce((sum, x, i) => sum + x * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (e) => {
    const chain = [];
    for (; e; e = e.parentElement) chain.unshift(parse(getComputedStyle(e).backgroundColor));
    return chain.reduce((below, top) => over(top, below), [255, 255, 255]);
  };
  const poor = [];
  let seen = 0;
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    const e = node.parentElement;
    if (!node.data.trim() || ["SCRIPT", "NOSCRIPT", "OPTION"].includes(e.tagName) || !e.checkVisibility() || e.closest(".hidden, .skip")) continue;
    const style = getComputedStyle(e);
    const below = behind(e);
    const text = over(parse(e.namespaceURI.endsWith("svg") ? style.fill : style.color), below);
    const [a, b] = [light(text), light(below)].sort((x, y) => y - x);
    const ratio = (a + 0.05) / (b + 0.05);
    seen++;
    if (ratio < (parseFloat(style.fontSize) >= 24 ? 3 : 4.5)) poor.push(`${node.data.trim().slice(0, 20)}: ${ratio.toFixed(2)}`);
  }
  return [seen, poor];
}"""


@needs_chromium
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 400])
def test_it_can_be_read_in_both_schemes_and_on_a_narrow_screen(
    browser, tmp_path, tokenizer, scheme, width
):
    long_word = "abcdefghij" * 30
    lines = [
        line(1, 0, n, task=long_word, category=long_word, error=long_word * (n == 1),
             tokens=with_tokens(tokenizer.encode(f"Thought: I see the red key. {long_word}")))
        for n in range(4)
    ]  # fmt: skip
    lines[0]["turns"][0] |= {"observation": long_word, "action": long_word}
    records = [
        eval_record({"a": 0.5, "b": 1.0}, by_category={f"toy/{long_word[:60]}": 0.5}, step=s)
        for s in (0, 6)
    ]
    runs = [
        a_run(tmp_path / f"run-{n}-{long_word[:40]}", lines, None, records, model=long_word)
        for n in range(3)
    ]
    tokenizer.save_pretrained(runs[0] / "checkpoints/step_1")
    with opened(browser, page_of(*runs), width, scheme) as page:
        background = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (background == "rgb(255, 255, 255)") == (scheme == "light")
        too_wide = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
        page.locator("#configs summary").first.click()
        for key in ("s", "t", "c", "c", "c"):
            assert page.evaluate(too_wide) <= 0, f"before {key}"
            seen, poor = page.evaluate(CONTRAST)
            assert seen > 100 and poor == [], f"before {key}"
            page.keyboard.press(key)
        assert page.locator("article").count() == 2 and page.evaluate(too_wide) <= 0
        seen, poor = page.evaluate(CONTRAST)
        assert seen > 100 and poor == []
        figure = page.locator("#curves figure").nth(1).bounding_box()
        assert figure["x"] >= 0 and figure["x"] + figure["width"] <= width


@needs_chromium
def test_everything_that_can_be_operated_has_a_name(browser, tmp_path, tokenizer):
    run = a_run(
        tmp_path / "run", trajectories=[line(tokens=with_tokens(list(range(12)))), line(sample=1)]
    )
    with opened(browser, page_of(run)) as page:
        page.keyboard.press("t")
        nameless = page.evaluate("""() => {
          const isNamed = (e) => e.labels?.length || e.getAttribute("aria-label") || e.getAttribute("aria-labelledby");
          const named = "input, select, section, [role=img], [role=listbox], [role=region], [role=group]";
          const silent = [...document.querySelectorAll("button")].filter((e) => !isNamed(e) && !e.textContent.trim());
          return [...document.querySelectorAll(named)].filter((e) => !isNamed(e)).concat(silent).map((e) => e.outerHTML);
        }""")
        assert nameless == []
        assert page.locator("html").get_attribute("lang") == "en"
        # what the Tab key reaches: one stop for all tokens
        assert page.locator(".token[tabindex='0']").count() == 1
