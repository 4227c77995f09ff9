"""
WebArena: its grammar, tree, evaluators and tasks on paper; then its browser against pages that misbehave.

What every environment must do is in test_envs.py; here is what only this one does. No deployment of
WebArena is at hand: the bundled sites play its sites, on addresses of their own.
"""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest
from flask import Flask, request
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import envs
from env_server import EnvClient, EnvError, RemoteEpisode
from envs import webarena
from envs.webarena import Refused, WebArena, parse, read_keys
from envs.webarena_parts import browser, deployment, scores, sites, tasks, world
from envs.webarena_parts.browser import BrowserDied, elements, find_chromium
from envs.webarena_parts.scores import Judge, includes, is_exact, read_call, url_score
from envs.webarena_parts.world import PASSWORD, Databases

needs_chromium = pytest.mark.skipif(
    find_chromium() is None, reason="Chromium is missing: install the package chromium"
)
needs_configs = pytest.mark.skipif(
    not any(Path(p, "webarena/test.raw.json").exists() for p in sys.path),
    reason="WebArena's tasks are missing: pip install --no-deps libwebarena==0.0.5",
)
REPO = Path(__file__).parent.parent


# --- the grammar ---


@pytest.mark.parametrize(
    ("action", "read"),
    [
        ("click [12]", ("click", ("12",))),
        ("  CLICK  [12] ", ("click", ("12",))),
        ("```click [12]```", ("click", ("12",))),  # as WebArena's own prompts have it
        ("type [3] [desk lamp] [0]", ("type", ("3", "desk lamp", "0"))),
        ("type [3] [desk lamp]", ("type", ("3", "desk lamp", ""))),
        ("type [3] [a [b] c] [1]", ("type", ("3", "a [b] c", "1"))),
        ("type [3] [] [1]", ("type", ("3", "", "1"))),
        ("type [3] [two\nlines] [0]", ("type", ("3", "two lines", "0"))),
        ("press [Control+a]", ("press", ("Control+a",))),
        ("scroll [down]", ("scroll", ("down",))),
        ("new_tab", ("new_tab", ())),
        ("goto [http://shop.test/a?b=c]", ("goto", ("http://shop.test/a?b=c",))),
        ("stop [N/A]", ("stop", ("N/A",))),
        ("stop [[1, 2]]", ("stop", ("[1, 2]",))),
        ("stop", ("stop", ("",))),
    ],
)
def test_what_the_grammar_reads(action, read):
    assert parse(action) == read


@pytest.mark.parametrize(
    "action",
    [
        *("", "click", "click 12", "click [x]", "click [١٢]", "click [1234567]", "click [1] [2]"),
        *("type [1]", "type [x] [y] [1]", "scroll", "scroll [left]", "new_tab [1]", "tab_focus"),
        *("goto", "goto []", "goto [a b]", "stop now", "look", "click [1]\nclick [2]", "[1]"),
        "click [" + "1" * 5000 + "]",
    ],
)
def test_what_the_grammar_refuses(action):
    with pytest.raises(Refused):
        parse(action)


def test_half_a_surrogate_pair_is_typed_as_a_question_mark():
    assert parse("type [1] [a\ud800b] [1]") == ("type", ("1", "a?b", "1"))


@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.sampled_from([*webarena.FORMS, "[", "]", "[1]", "[a]", " ", "`"]) | st.text(max_size=4)
    )
)
def test_the_grammar_reads_or_refuses(parts):
    try:
        verb, arguments = parse(" ".join(parts))
    except Refused as refusal:
        assert str(refusal)
    else:
        assert verb in webarena.FORMS and all(part.encode() is not None for part in arguments)


def test_keys():
    assert read_keys("ctrl+a") == "Control+a"
    assert read_keys("enter") == "Enter" and read_keys("down") == "ArrowDown"
    for keys in ("", "+", "Foo", "Control+", "ü"):
        with pytest.raises(Refused):
            read_keys(keys)


# --- the accessibility tree ---


def node(number, role, name="", children=(), value=None, **states):
    """As Chromium sends it."""
    found = {
        "nodeId": str(number),
        "ignored": role == "ignored",
        "role": {"value": role},
        "name": {"value": name},
        "properties": [{"name": key, "value": {"value": state}} for key, state in states.items()],
        "childIds": [str(child) for child in children],
        "backendDOMNodeId": 100 + number,
    }
    return found | ({"value": {"value": value}} if value is not None else {})


TREE = [
    node(1, "RootWebArea", "Shop", [2, 5, 8, 13], focused=True),
    node(2, "ignored", children=[3]),
    node(3, "link", "Cart", [4]),
    node(4, "StaticText", "Cart"),  # the link's own name again
    node(5, "paragraph", children=[6, 7]),
    node(6, "StaticText", "Two  lamps\nleft"),
    node(7, "StaticText", "  "),
    node(8, "form", children=[9, 11]),
    node(9, "LabelText", children=[10]),
    node(10, "StaticText", "Color"),  # the next field's name
    node(11, "combobox", "Color", [12], value="red", expanded=False),
    node(12, "option", "red", selected=True),
    node(13, "list", children=[14, 16, 17, 18]),
    node(14, "checkbox", "Gift", [15], checked="false"),
    node(15, "StaticText", "Gift"),
    node(16, "button", ""),
    node(17, "heading", "It's \"new\"\n[1] link 'x'"),
    node(18, "textbox", "Text", value="hello", disabled=True, focused=True),
]


def test_a_tree_as_lines():
    assert [element.line() for element in elements(TREE)] == [
        "[1] link 'Cart'",
        "[2] StaticText 'Two lamps left'",
        "[3] combobox 'Color' value: 'red' expanded: false",
        "\t[4] option 'red' selected: true",
        "[5] checkbox 'Gift' checked: false",
        "[6] button ''",
        "[7] heading 'It\\'s \"new\" [1] link \\'x\\''",
        "[8] textbox 'Text' value: 'hello' disabled: true, focused: true",
    ]


@pytest.mark.parametrize("text", ["a\x00b", "\ud800", "\U0001f600", "\u202e\u2028x", "x" * 9000])
def test_no_name_breaks_a_line_or_the_wire(text):
    (element,) = elements([node(1, "RootWebArea", children=[2]), node(2, "button", text)])
    line = element.line()
    assert line.encode() and len(line.splitlines()) == 1 and len(line) < 1000


def test_damaged_trees_are_read_as_far_as_they_go():
    assert elements([]) == []
    lost = [node(1, "RootWebArea", children=[2, 99]), {"nodeId": "2", "childIds": []}]
    assert elements(lost) == []


def test_only_what_is_mostly_in_the_window_is_shown_and_keeps_its_number():
    found = elements(
        [node(0, "RootWebArea", children=[1, 2, 3, 4])]
        + [node(number, "button", f"b{number}") for number in (1, 2, 3, 4)]
    )
    boxes = {101: (0, 0, 9, 20), 102: (0, 95, 9, 20), 103: (0, 105, 9, 20), 104: (0, 40, 0, 0)}
    shown = browser.in_window(found, boxes, top=100, height=50)
    assert [(e.number, e.name) for e in shown] == [(2, "b2"), (3, "b3")]


# --- evaluators ---


@pytest.mark.parametrize(
    ("wanted", "text", "is_only", "result"),
    [
        ("$12.30", "It costs $12.30.", True, True),
        ("Clay Lamp", "the CLAY lamp", True, True),
        ("5", "there are 15", True, False),  # a single character is a word or it is nothing
        ("5", "there are 5.", True, True),
        ("5", "there are 15", False, True),
        ("65 |OR| 3", "3", True, True),
        ("65 |OR| 3", "13", True, False),
        ("a |OR| b", "xbx", False, True),
        ("'quoted'", '"quoted"', True, True),
        ("x", "", True, False),
    ],
)
def test_must_include(wanted, text, is_only, result):
    assert includes(wanted, text, is_only) is result


def test_exact_match_ignores_case_margins_and_one_pair_of_quotes():
    assert is_exact("Ann Lee", " 'ann lee' ") and not is_exact("Ann", "Ann Lee")


@pytest.mark.parametrize(
    ("reference", "url", "result"),
    [
        ("http://h:1/a/8", "http://h:1/a/8", True),
        ("http://h:1/a/8", "http://h:1/a/8/?x=1#y", True),
        ("http://h:1/a/8", "http://h:1/a/8/more", True),
        ("http://h:1/a/8", "http://h:1/a/81", False),
        ("http://h:1/a", "http://h:2/a", False),
        ("http://h/a?x=1&y=2", "http://h/a?y=2&x=1&z=3", True),
        ("http://h/a?x=1", "http://h/a?x=2", False),
        ("http://h/a?x=1", "http://h/a", False),
        ("http://h/a |OR| http://h/b", "http://h/b/c", True),
        ("http://h/a?x=1 |OR| http://h/b?x=2", "http://h/a?x=2", True),  # as WebArena pools them
        ("http://h/a |OR| http://h/b", "http://h/c", False),
    ],
)
def test_url_match(reference, url, result):
    assert url_score({"eval": {"reference_url": reference}}, url) is result


def test_helpers_are_read_and_never_run():
    call = "func:gitlab_get_project_memeber_role(__page__, 'ann-b')"
    assert read_call(call) == ("gitlab_get_project_memeber_role", ["ann-b"])
    assert read_call("func:shopping_get_latest_order_url()") == (
        "shopping_get_latest_order_url",
        [],
    )
    for text in ("func:", "f()", "func:__import__('os').system('id')"):
        with pytest.raises(ValueError):
            read_call(text)
    assert scores.post_url("http://r/f/books/12/a-title/-/comment/3") == "http://r/f/books/12/"
    assert scores.post_url("http://r/user/ann") == "http://r/user/ann"


def string_score(answers: dict, answer: str, judge=None) -> bool:
    config = {
        "intent": "Why?",
        "eval": {"reference_answers": answers, "string_note": "no such item"},
    }
    return asyncio.run(scores.string_score(config, answer, judge))


class Agreeable:
    """A judge for whom the reference must stand in the answer; remembers what it was asked."""

    def __init__(self):
        self.asked = []

    def agrees(self, question, reference, answer):
        self.asked.append((question, reference, answer))
        return reference.lower() in answer.lower()


def test_string_match_is_the_product_of_all_its_ways():
    both = {"exact_match": "A b", "must_include": ["a", "b"]}
    assert string_score(both, "a b") and not string_score(both, "a b c")
    assert not string_score({"must_include": ["a", "c"]}, "a b")
    with pytest.raises(ValueError, match="judge"):
        string_score({"fuzzy_match": ["x"]}, "x")
    judge = Agreeable()
    assert string_score({"fuzzy_match": ["x", "y"]}, "y and x", judge)
    assert not string_score({"fuzzy_match": ["x", "z"]}, "y and x", judge)
    assert string_score({"fuzzy_match": "N/A"}, "n/a", None)  # that much needs no judge
    assert not string_score({"fuzzy_match": "N/A"}, "42", judge)
    assert "no such item" in judge.asked[-1][1]


def test_the_judge_speaks_the_interface_of_openai(monkeypatch):
    app, seen = Flask("judge"), []

    @app.post("/v1/chat/completions")
    def complete():
        seen.append((request.headers.get("Authorization"), request.json))
        asked = json.loads(request.json["messages"][-1]["content"])
        says = {"yes": "Correct.", "no": "It is incorrect", "odd": "Hm."}[asked["answer"]]
        return {"choices": [{"message": {"content": says}}]}

    port = sites.serve(app)
    monkeypatch.delenv("WEBARENA_JUDGE_MODEL", raising=False)
    assert Judge.from_environment() is None
    monkeypatch.setenv("WEBARENA_JUDGE_MODEL", "some-model")
    monkeypatch.setenv("OPENAI_BASE_URL", f"http://127.0.0.1:{port}/v1/")
    monkeypatch.setenv("OPENAI_API_KEY", "key")
    judge = Judge.from_environment()
    assert judge.agrees("q", "r", "yes") and not judge.agrees("q", "r", "no")
    assert seen[0][0] == "Bearer key" and seen[0][1]["model"] == "some-model"
    with pytest.raises(RuntimeError, match="no verdict"):
        judge.agrees("q", "r", "odd")
    with pytest.raises(RuntimeError, match="answered"):
        Judge("m", f"http://127.0.0.1:{port}").agrees("q", "r", "yes")  # not its address


# --- bundled tasks ---


def test_the_bundled_tasks():
    found = tasks.tasks()
    sizes = Counter(task.split for task in found.values())
    assert sizes["train"] >= 60 and sizes["dev"] >= 20 and sizes["test"] >= 20
    assert len({task.category for task in found.values()}) == 8
    kinds = Counter(kind for task in found.values() for kind in task.config["eval"]["eval_types"])
    assert set(kinds) == set(scores.EVAL_TYPES) and min(kinds.values()) > 20
    for split in webarena.SPLITS:  # every template is in every split, and first come first
        names = [task.template.name for task in found.values() if task.split == split]
        assert set(names[: len(tasks.TEMPLATES)]) == {template.name for template in tasks.TEMPLATES}


def test_no_entity_and_no_wording_is_in_two_splits():
    entities: dict[tuple, set] = {}
    wordings: dict[str, set] = {}
    for task in tasks.tasks().values():
        kind = next((k for k in ("price", "path", "forum", "phone", "email") if k in task.case), "")
        entities.setdefault((kind or task.template.name, task.case["id"]), set()).add(task.split)
        wordings.setdefault(task.config["intent_template"], set()).add(task.split)
    assert all(len(splits) == 1 for splits in wordings.values())
    shared = {entity for entity, splits in entities.items() if len(splits) > 1}
    assert not {kind for kind, _ in shared} - {"forum"}  # a post's forum may hold another split's


def test_prices_and_points_have_no_ties():
    """Else "the cheapest" would be two."""
    for name in world.CATALOGUE:
        prices = [case["price"] for case in tasks.products(f"category = '{name}'")]
        assert len(set(prices)) == len(prices) == 12


def test_the_world_is_the_same_everywhere():
    digest = "import hashlib; from envs.webarena_parts.world import seed; print(hashlib.sha256(seed()).hexdigest())"
    seen = {
        subprocess.run(
            [sys.executable, "-c", digest],
            cwd=REPO,
            env={**os.environ, "PYTHONHASHSEED": number},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for number in "12"
    }
    assert len(seen) == 1


# --- bundled sites, without a browser ---


@pytest.fixture
def visit():
    """visit(site, path, ...) -> the text that a logged-in visitor gets."""
    databases = Databases()
    databases.open("one")
    databases.open("two")
    app = sites.make_app(databases)
    tokens = {episode: sites.sessions(databases, episode) for episode in ("one", "two")}

    def ask(site, path, episode="one", method="GET", **form):
        client = app.test_client(use_cookies=False)
        headers = {"X-Episode": episode, "Host": f"{site}.test"}
        headers["Cookie"] = f"session={tokens.get(episode, {}).get(site, '')}"
        return client.open(path, method=method, headers=headers, data=form or None)

    return ask


def test_pages_are_the_episodes_own(visit):
    assert visit("shop", "/product/3/wish", method="POST").status_code == 302
    name = tasks.products("id = 3")[0]["name"]
    assert name in visit("shop", "/wishlist").text
    assert name not in visit("shop", "/wishlist", episode="two").text
    assert visit("shop", "/", episode="three").status_code == 404
    assert visit("nowhere", "/").status_code == 404


def test_shop_and_cms_share_their_data(visit):
    visit("cms", "/product/3", method="POST", name="New <b>Name</b>", price="7.5", stock="3")
    page = visit("shop", "/product/3").text
    assert "New &lt;b&gt;Name&lt;/b&gt;" in page and "Price: $7.50" in page and "<b>" not in page


@pytest.mark.parametrize("text", ["<script>alert(1)</script>", "'\"><img src=x onerror=alert(1)>"])
def test_what_was_typed_comes_back_escaped(visit, text):
    visit("forum", "/f/chess/new", method="POST", title=text, body=text)
    visit("shop", "/account", method="POST", phone=text, city=text)
    visit("code", "/nora/tide-clock/issues/new", method="POST", title=text, body=text)
    pages = [
        visit("forum", "/f/chess"),
        visit("forum", f"/search?q={text}"),
        visit("shop", "/account"),
    ]
    pages += [visit("code", "/nora/tide-clock/issues"), visit("shop", f"/search?q={text}")]
    for page in pages:
        assert text not in page.text


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_no_request_crashes_a_site(visit, data):
    parts = "category product order orders search f new u issues members account cart review 1 99999999999999999999 Toys chess nora %00 %ff -1 vote up é".split()
    path = "/" + "/".join(data.draw(st.lists(st.sampled_from(parts), max_size=5)))
    fields = (
        "page q sort quantity stars text price stock status title body user role label bio".split()
    )
    values = st.text(max_size=5) | st.sampled_from(["-1", "1e999", "nan", "9" * 50, "5", "٣"])
    form = data.draw(st.dictionaries(st.sampled_from(fields), values, max_size=4))
    site, method = (
        data.draw(st.sampled_from(list(sites.NAMES))),
        data.draw(st.sampled_from(["GET", "POST"])),
    )
    answer = visit(site, path, method=method, **form)
    assert answer.status_code < 500, (site, path, method, form)


def test_logging_in_takes_the_right_password(visit):
    wrong = visit("forum", "/login", method="POST", user="lena", password="guess")
    assert "Wrong name or password" in wrong.text and "Set-Cookie" not in wrong.headers
    right = visit("forum", "/login", method="POST", user="lena", password=PASSWORD)
    assert right.status_code == 302 and "session=" in right.headers["Set-Cookie"]
    assert visit("cms", "/products", episode="one").status_code == 200
    stranger = sites.make_app(Databases(), episode="none").test_client()
    assert stranger.get("/", headers={"Host": "shop.test"}).status_code == 404


# --- WebArena's 812 tasks ---


@needs_configs
def test_all_configurations_are_read():
    configs = deployment.read_configs()
    assert len(configs) == 812
    addresses = {site: f"http://{site.replace('_', '-')}.example:80" for site in deployment.SITES}
    for config in configs:
        filled = deployment.with_addresses(config, addresses)
        assert not re.search(r"__[A-Z_]+__", json.dumps(filled).replace("__SSL__", ""))
        task = filled["eval"]
        assert set(task["eval_types"]) <= set(scores.EVAL_TYPES)
        assert set(task["reference_answers"] or {}) <= {
            "exact_match",
            "must_include",
            "fuzzy_match",
        }
        assert task.get("url_note") in (None, "GOLD in PRED")
        for check in task["program_html"] or ():
            assert set(check["required_contents"]) <= {"exact_match", "must_include"}
            for text in (check["url"], check["locator"]):
                if text.startswith("func:"):
                    assert read_call(text)[0] in {
                        *("reddit_get_post_url", "shopping_get_latest_order_url"),
                        *("gitlab_get_project_memeber_role",),
                        *("shopping_get_sku_latest_review_author",),
                        *("shopping_get_sku_latest_review_rating",),
                    }
            assert check["locator"].startswith(("", "document.", "[...document.", "func:"))


@needs_configs
def test_the_papers_test_split(monkeypatch):
    monkeypatch.delenv("WEBARENA_JUDGE_MODEL", raising=False)
    configs = {config["task_id"]: config for config in deployment.read_configs()}
    first = Counter(configs[number]["sites"][0] for number in deployment.PAPER_TEST)
    assert len(set(deployment.PAPER_TEST)) == 50
    assert first["shopping"] == 15 and first["shopping_admin"] == 15 and first["map"] == 10
    assert sum(deployment.needs_judge(configs[n]) for n in deployment.PAPER_TEST) == 14
    options = dict.fromkeys(deployment.SITES, "http://one.example")
    env = WebArena(source="deployment", **options)
    sizes = {split: len(env.tasks(split)) for split in webarena.SPLITS}
    # of dev's 40, those that change a site or need a judge are left out
    assert sizes["test"] == 50 - 14 and sizes["dev"] == 27 and sizes["train"] > 200
    assert sum(sizes.values()) + sum(env.left_out.values()) == 812
    assert any("judge" in reason for reason in env.left_out)
    everything = [task for split in webarena.SPLITS for task in env.tasks(split)]
    assert len(set(everything)) == len(everything)
    monkeypatch.setenv("WEBARENA_JUDGE_MODEL", "m")
    env = WebArena(source="deployment", changes="yes", **options)
    assert len(env.tasks("test")) == 50 and not env.left_out
    assert sum(len(env.tasks(split)) for split in webarena.SPLITS) == 812


@needs_configs
def test_sites_without_an_address_are_left_out(monkeypatch):
    for site in deployment.SITES:
        monkeypatch.delenv(site.upper(), raising=False)
    monkeypatch.setenv("REDDIT", "http://reddit.example:9999/")
    env = WebArena(source="deployment")
    assert {env.category(task) for split in webarena.SPLITS for task in env.tasks(split)} == {
        "reddit"
    }
    assert any("gitlab" in reason for reason in env.left_out)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"source": "x"}, "source"),
        ({"changes": "maybe"}, "changes"),
        ({"shopping": "http://h"}, "source=deployment"),
        ({"source": "deployment"}, "addresses"),
        ({"source": "deployment", "map": "host:3000"}, "map must be an address"),
        ({"source": "deployment", "map": "http://h/?x"}, "map must be an address"),
        ({"source": "deployment", "map": "http://h", "configs": "/no/file"}, "/no/file"),
    ],
)
def test_wrong_options_are_one_sentence(options, says, monkeypatch):
    for site in deployment.SITES:
        monkeypatch.delenv(site.upper(), raising=False)
    with pytest.raises(ValueError, match=says) as error:
        WebArena(**options)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("text", ["{}", "[1]", "not json", '[{"task_id": 1}]'])
def test_a_file_that_holds_no_tasks_is_named(tmp_path, text):
    path = tmp_path / "tasks.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=re.escape(str(path))):
        deployment.read_configs(str(path))


# --- the browser: bundled sites ---


@pytest.fixture
def make():
    """make(**options) -> an environment that is closed after the test."""
    made = []

    def make_one(**options) -> WebArena:
        made.append(WebArena(**options))
        return made[-1]

    yield make_one
    for env in made:
        env.close()


def start(env: WebArena, task: str) -> str:
    return env.reset(options={"task": task})[0]


def number_of(observation: str, name: str) -> str:
    """The number of the first element called so."""
    return re.search(rf"\[(\d+)\] \w+ {re.escape(repr(name))}", observation)[1]


@needs_chromium
@pytest.mark.slow
@pytest.mark.parametrize("template", tasks.TEMPLATES, ids=lambda template: template.name)
def test_every_template_asks_for_something_and_its_expert_does_it(make, template):
    env = make()
    chosen = {task.split: key for key, task in tasks.tasks().items() if task.template == template}
    for split, answer in (("dev", "done"), ("test", "")):
        observation = start(env, chosen[split])
        assert len(observation.splitlines()) < 45
        assert env.step(f"stop [{answer}]")[1:3] == (0.0, True), "it was done before it began"
    for key in chosen.values():
        start(env, key)
        for _, action in env.expert():
            _, reward, is_over, _, info = env.step(action)
            assert not info["invalid"]
        assert is_over and reward == 1.0


@needs_chromium
def test_what_one_episode_changes_no_other_sees(make):
    first, second = make(), make()
    for env in (first, second):
        start(env, "subscribe/chess")
    for _, action in first.expert():
        first.step(action)
    assert "button 'Unsubscribe'" in first._describe() and first._success
    observation = second.step("goto [http://forum.test/f/chess]")[0]
    assert "button 'Subscribe'" in observation
    assert "button 'Subscribe'" in (start(first, "subscribe/chess") and first.step("goto [http://forum.test/f/chess]")[0])  # fmt: skip


@needs_chromium
def test_tabs_history_scrolling_and_keys(make):
    env = make()
    start(env, "price/violet-hammer")
    assert env.step("go_back")[4]["invalid"]
    env.step("click [8]")
    assert "URL: http://shop.test/category/" in env._describe()
    assert "URL: http://shop.test/\n" in env.step("go_back")[0]
    assert "URL: http://shop.test/category/" in env.step("go_forward")[0]
    assert env.step("close_tab")[0] == "This is the only tab."
    observation = env.step("new_tab")[0]
    assert "URL: about:blank" in observation and "Tab 1 (current)" in observation
    assert "Tab 1 (current): Categories" in env.step("goto [http://shop.test/]")[0]
    assert "Tab 0 (current): " in env.step("tab_focus [0]")[0]
    assert env.step("tab_focus [2]")[4]["invalid"]
    env.step("tab_focus [1]")
    assert "Tab 1" not in env.step("close_tab")[0]
    search = number_of(env._describe(), "Search products")
    assert "value: 'lamp'" in env.step(f"type [{search}] [lamp] [0]")[0]
    assert "value: 'desk'" in env.step(f"type [{search}] [desk] [0]")[0]  # replaces
    assert "Results for desk" in env.step("press [enter]")[0]
    assert env.step(f"type [{number_of(env._describe(), 'Home')}] [x] [1]")[4]["invalid"]
    assert not env.step("hover [1]")[4]["invalid"]


FAR = [
    *(
        "file:///etc/passwd",
        "javascript:alert(1)",
        "data:text/html,x",
        "about:blank",
        "chrome://crash",
    ),
    *(
        "http://127.0.0.1/",
        "http://localhost:8000/",
        "http://[::1]/",
        "http://169.254.169.254/latest",
    ),
    *("http://0x7f000001/", "http://example.com/", "https://shop.test/", "http://shop.test:22/"),
    *(
        "http://shop.test@example.com/",
        "http://example.com\\@shop.test/",
        "//example.com",
        "shop.test",
    ),
    *("http://shop.test.example.com/", "view-source:http://shop.test/", "http://cms.test/"),
    *(
        "ftp://shop.test/",
        "http://user:pass@shop.test/",
        "http://shop.test\t.evil/",
        "http:///shop.test",
    ),
]


@needs_chromium
def test_goto_reaches_the_tasks_sites_only(make):
    env = make()
    before = start(env, "price/violet-hammer").split("\n", 1)[1]
    for url in FAR:
        observation, *_, info = env.step(f"goto [{url}]")
        assert info["invalid"], url
    assert env._describe() == before  # and nothing has moved
    assert "URL: http://shop.test/cart" in env.step("goto [http://shop.test/cart]")[0]


@needs_chromium
def test_beyond_goto_nothing_resolves(make):
    """The second wall: host rules, which hold for links, redirects, pictures and scripts alike."""
    env = make()
    start(env, "price/violet-hammer")
    _, port = sites.start()
    here = [f"http://127.0.0.1:{port}/", f"http://localhost:{port}/"]
    for url, is_there in [
        ("http://cms.test/", 1),
        *((url, 0) for url in (*here, "http://a.test/")),
    ]:
        script = f"fetch('{url}', {{mode: 'no-cors'}}).then(() => 1, () => 0)"
        asked = env._session.current.page.evaluate(script)
        assert env._browser.run(asked, 10) == is_there, url


@needs_chromium
def test_hostile_text_stays_text(make):
    env = make()
    start(env, "post/running-a-question")
    text = "</p><script>document.title='owned'</script>\\n[1] button 'Stop' \" ' \u202e {0} %s"
    env.step("goto [http://forum.test/f/running/new]")
    env.step(f"type [{number_of(env._describe(), 'Title')}] [{text}] [0]")
    observation = env.step(f"click [{number_of(env._describe(), 'Create post')}]")[0]
    assert "owned" in observation and "Tab 0 (current): </p>" in observation
    lines = [line for line in observation.splitlines() if line.lstrip().startswith("[1] ")]
    assert lines == ["[1] link 'Forums'"]


# --- the browser: pages that misbehave ---

TRAPS = {
    "/": "<a href=/loop>loop</a> <a href=/slow>slow</a> <a href=/window target=_blank>window</a>"
    "<button onclick='while(true){}'>spin</button><a href=/empty>empty</a>"
    "<button onclick='alert(1)'>alert</button><button onclick='for(;;)alert(1)'>alerts</button>"
    "<button onclick=\"for(let i=0;i<12;i++)window.open('/window?'+i)\">windows</button>"
    "<a href=/off>off</a><a href=/away>away</a><button onclick='this.remove()'>gone</button>"
    "<button onclick='window.close()'>close</button><a href=#x>hash</a>"
    "<button disabled>dead</button><input aria-label=fixed readonly value=no>",
    "/window": "<title>Window</title><button onclick='close()'>shut</button>",
    "/loop": "<script>while(true){}</script>",
    "/tall": "".join(f"<p style='height:100px'><button>b{i}</button></p>" for i in range(50)),
    "/many": "".join(f"<button>{'x' * 400}</button>" for i in range(400)),
    "/leave": "<script>onbeforeunload = event => event.preventDefault()</script><a href=/>home</a>",
    "/members": "<table><tr><td data-label=Account><span class=gl-avatar-labeled-sublabel>@ann</span>"
    "<td class=col-max-role><span>Guest</span></table>",
}


@pytest.fixture(scope="module")
def trap_site() -> str:
    """A site of pages that hang, loop, pop up and lead away; also what a shop's REST interface says."""
    app = Flask("traps")

    @app.get("/slow")
    def slow():
        time.sleep(6)
        return "late"

    @app.get("/empty")
    def empty():
        return "", 204

    @app.get("/off")
    def off():
        return "", 302, {"Location": f"http://127.0.0.1:{other}/"}

    @app.get("/away")
    def away():
        return "", 302, {"Location": "http://example.com/"}

    @app.post("/rest/default/V1/integration/admin/token")
    def token():
        return json.dumps("a-key" if request.json or request.form else "")

    @app.get("/rest/V1/orders")
    def orders():
        is_right = request.headers["Authorization"] == "Bearer a-key"
        return {"items": [{"increment_id": "000000007"}]} if is_right else ("", 401)

    @app.get("/rest/V1/products/<sku>/reviews")
    def reviews(sku: str):
        review = {"nickname": "Ann", "ratings": [{"rating_name": "Rating", "percent": 80}]}
        return [] if sku == "none" else [{"nickname": "Old", "ratings": []}, review]

    @app.get("/sales/order/view/order_id/7/")
    def order():
        return "<div id=x>Order 7</div>"

    @app.get("/f/books/12/")
    def post():
        return "<div class=submission__inner>A good book</div>"

    for path, page in TRAPS.items():
        app.add_url_rule(path, path, lambda page=page: f"<!doctype html>{page}")
    other = sites.serve(Flask("other"))
    return f"http://127.0.0.1:{sites.serve(app)}"


def task_of(url: str, number: int = 1, site: str = "reddit", **check) -> dict:
    check = {"eval_types": ["string_match"], "reference_answers": {"exact_match": "yes"}} | check
    check = {"reference_url": "", "program_html": []} | check
    config = {"sites": [site], "task_id": number, "start_url": url, "intent": "Do it."}
    return config | {"require_login": False, "geolocation": None, "eval": check}


@pytest.fixture
def trapped(make, trap_site, tmp_path, monkeypatch):
    """trapped(path) -> an environment whose task starts at that page of the trap site."""
    monkeypatch.setattr(webarena, "PAUSE", 0.0)
    monkeypatch.setattr(webarena.Deployment, "pause", 0.0)
    monkeypatch.setattr(webarena, "SECONDS", 3.0)

    def begin(path: str = "/", **check) -> WebArena:
        file = tmp_path / "tasks.json"
        file.write_text(json.dumps([task_of(f"{trap_site}{path}", **check)]))
        env = make(source="deployment", reddit=trap_site, shopping=trap_site, configs=str(file))
        env.first = env.reset(options={"task": env.tasks("train")[0]})[0]
        return env

    return begin


def click(env: WebArena, name: str) -> tuple:
    began = time.monotonic()
    result = env.step(f"click [{number_of(env._describe(), name)}]")
    assert time.monotonic() - began < 30  # whatever the page does
    return result


@needs_chromium
@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("loop", "does not answer"),  # its script never ends
        ("spin", "does not answer"),
        ("slow", "not complete"),
        ("off", "leads off the task's sites"),  # another port of the same host
        ("away", "ERR_NAME_NOT_RESOLVED"),
        ("empty", "button 'spin'"),  # no content: we stay
        ("alert", "button 'spin'"),
        ("close", "button 'spin'"),  # a script may not close what it has not opened
        ("hash", "/#x"),
        ("dead", "button 'spin'"),
    ],
)
def test_a_page_that_misbehaves_costs_a_turn_and_not_the_episode(trapped, name, says):
    env = trapped()
    observation, reward, is_over, _, _ = click(env, name)
    assert says in observation and not reward and not is_over
    assert "button 'spin'" in env.step(f"goto [{env._start_url}]")[0]


@needs_chromium
def test_windows_become_tabs_and_their_number_is_limited(trapped):
    env = trapped()
    observation = click(env, "window")[0]
    assert "Tab 1 (current): Window" in observation
    env.step("close_tab")
    click(env, "windows")
    assert 2 <= len(env._session.pages) <= browser.MAX_TABS
    assert env.step("stop [yes]")[1] == 1.0


@needs_chromium
def test_an_element_that_is_gone_is_a_refusal(trapped):
    env = trapped()
    stale = number_of(env._describe(), "gone")
    env._browser.run(env._session.current.page.evaluate("document.body.innerHTML = ''"), 5)
    observation, *_, info = env.step(f"click [{stale}]")
    assert info["invalid"] and "could not be done" in observation


@needs_chromium
def test_a_tall_page_is_seen_one_window_at_a_time(trapped):
    env = trapped("/tall")
    assert "'b0'" in env.first and "'b20'" not in env.first
    assert "scroll [down]" in env.available_actions()
    below = env.step("scroll [down]")[0]
    assert "'b0'" not in below and "'b8'" in below
    assert number_of(below, "b8") == "9"  # its number on the page, not in the window
    assert env.step("click [1]")[4]["invalid"]  # out of sight
    assert env.step("scroll [up]")[0] == env.first.split("\n", 1)[1]


@needs_chromium
def test_a_huge_page_is_cut(trapped):
    env = trapped("/many")
    assert len(env.first) < 25_000 and env.observation_space.contains(env.first)


@needs_chromium
def test_a_page_that_wants_to_be_kept_is_left(trapped):
    env = trapped("/leave")
    click(env, "home")
    assert "button 'spin'" in env._describe()


# --- every kind of check, on addresses as a deployment has them ---


def html(url: str, locator: str, **wanted) -> dict:
    page = {"url": url, "locator": locator, "required_contents": wanted}
    return {"eval_types": ["program_html"], "program_html": [page]}


CHECKS = [  # path, check, answer, score
    ("/", {"eval_types": ["url_match"], "reference_url": "__REDDIT__/"}, "", 1),
    ("/tall", {"eval_types": ["url_match"], "reference_url": "__REDDIT__/many"}, "", 0),
    ("/", {"reference_answers": {"must_include": ["a", "b"]}}, "b a", 1),
    ("/", html("__REDDIT__/window", "", must_include=["<title>Window"]), "", 1),
    ("/", html("__REDDIT__/window", "document.querySelector('button').outerText", exact_match="shut"), "", 1),
    ("/", html("last", "document.querySelector('[aria-label=fixed]').value", exact_match="no"), "", 1),
    ("/", html("last", "document.querySelector('.absent').value", must_include=["no"]), "", 0),
    ("/", html("last", "[...document.querySelectorAll('a')].map(e => e.textContent).join(' ')", must_include=["loop |OR| x", "hash"]), "", 1),
    ("/window", html("func:reddit_get_post_url('__last_url__')", "document.title", must_include=["Window"]), "", 1),
    ("/f/books/12/?c=3", html("func:reddit_get_post_url('__last_url__')", "document.querySelector('.submission__inner').outerText", must_include=["good book"]), "", 1),
    ("/", html("func:shopping_get_latest_order_url()", "document.querySelector('#x').outerText", exact_match="Order 7"), "", 1),
    ("/", html("last", "func:shopping_get_sku_latest_review_author('B1')", must_include=["Ann"]), "", 1),
    ("/", html("last", "func:shopping_get_sku_latest_review_rating('B1')", must_include=["80"]), "", 1),
    ("/", html("last", "func:shopping_get_sku_latest_review_rating('none')", must_include=["80"]), "", 0),
    ("/members", html("last", "func:gitlab_get_project_memeber_role(__page__, 'ann')", must_include=["Guest"]), "", 1),
    ("/members", html("last", "func:gitlab_get_project_memeber_role(__page__, 'bo')", must_include=["Guest"]), "", 0),
    ("/", {"eval_types": ["string_match", "url_match"], "reference_answers": {"exact_match": "x"}, "reference_url": "__REDDIT__/"}, "x", 1),
    ("/", {"eval_types": ["string_match", "url_match"], "reference_answers": {"exact_match": "x"}, "reference_url": "__REDDIT__/many"}, "x", 0),
]  # fmt: skip


@needs_chromium
@pytest.mark.parametrize(("path", "check", "answer", "score"), CHECKS)
def test_every_kind_of_check(trapped, path, check, answer, score):
    env = trapped(path, **check)
    assert env.step(f"stop [{answer}]")[1:3] == (float(score), True)


@needs_chromium
def test_preparing_a_page_before_it_is_checked(trapped):
    check = html("last", "document.title", exact_match="ready")
    check["program_html"][0]["prep_actions"] = ["document.querySelector('.none').click()"]
    assert trapped("/", **check).step("stop []")[1] == 0.0
    check["program_html"][0]["prep_actions"] = ["document.title = 'ready'"]
    assert trapped("/", **check).step("stop []")[1] == 1.0


@pytest.mark.parametrize("locator", ["func:open('/etc/passwd')", "alert(1)", "func:exit()"])
@needs_chromium
def test_an_unknown_helper_is_an_error_and_is_not_run(trapped, locator):
    env = trapped("/", **html("last", locator, must_include=["x"]))
    with pytest.raises(ValueError):
        env.step("stop []")


@needs_chromium
def test_the_bundled_sites_as_a_deployment(make, tmp_path, monkeypatch):
    """One server a site, on addresses of their own; log-in through the form, once for all episodes."""
    monkeypatch.setattr(webarena.Deployment, "pause", 0.0)
    databases = Databases()
    databases.open("shared")
    requests = Counter()
    addresses = {}
    for number, (site, (name, _, _)) in enumerate(tasks.SITES.items(), 2):
        hosts: dict[str, str] = {}
        app = sites.make_app(databases, hosts, episode="shared")
        app.before_request(lambda: requests.update([(request.method, request.path)]))
        host = f"127.0.0.{number}"
        port = sites.serve(app, host)
        hosts[f"{host}:{port}"] = site
        addresses[name] = f"http://{host}:{port}"
    users = {"shopping": "nora.lind@mail.test", "shopping_admin": "admin", "reddit": "nora", "gitlab": "nora"}  # fmt: skip
    monkeypatch.setattr(
        deployment, "LOGINS", {site: ("/login", user, PASSWORD) for site, user in users.items()}
    )
    chosen = ["phone/", "set-price/", "share/", "comment/"]
    found = [next(k for k in tasks.tasks() if k.startswith(name)) for name in chosen]
    file = tmp_path / "tasks.json"
    file.write_text(json.dumps([tasks.tasks()[key].config for key in found]))
    env = make(source="deployment", configs=str(file), **addresses)
    keys = [task for split in webarena.SPLITS for task in env.tasks(split)]
    assert len(keys) == 4 and list(env.expert()) == []
    for key in keys:
        bundled = next(
            k for k in found if tasks.tasks()[k].config["task_id"] == key.split("/", 1)[1]
        )
        original = tasks.tasks()[bundled]
        env.reset(options={"task": key})
        for _ in range(12):  # the bundled expert, told of the other addresses
            swap = {address: home for (name, _, home) in tasks.SITES.values() for address in [addresses[name]]}  # fmt: skip
            url = env._session.current.page.url
            for address, home in swap.items():
                url = url.replace(address, home)
            sight = tasks.Sight(url, env._elements, lambda *q: databases.query("shared", *q))
            _, action = original.template.advise(sight, original.case)
            for address, home in swap.items():
                action = action.replace(home, address)
            *_, info = env.step(action)
            assert not info["invalid"], action
            if env._over:
                break
        assert info["success"], key
    assert all(count == 1 for (method, path), count in requests.items() if (method, path[-6:]) == ("POST", "/login"))  # fmt: skip
    assert env.reset(options={"task": keys[0]}) and env.step(f"goto [{addresses['gitlab']}]")[4]["invalid"]  # fmt: skip


@needs_chromium
def test_a_log_in_that_fails_says_where(make, trap_site, tmp_path):
    file = tmp_path / "tasks.json"
    file.write_text(json.dumps([task_of(trap_site) | {"require_login": True}]))
    env = make(source="deployment", reddit=trap_site, configs=str(file))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deployment, "SECONDS", 1.0)
        patch.setattr(browser, "SECONDS", 2.0)
        with pytest.raises(RuntimeError, match="logging in at"):
            env.reset(options={"task": env.tasks("train")[0]})


# --- the process ---


def chromiums(process: psutil.Process) -> list[psutil.Process]:
    """Those below a process that were not started by another of them."""
    found = [child for child in process.children(recursive=True) if "chrom" in child.name()]
    return [child for child in found if child.parent() not in found]


@needs_chromium
def test_a_killed_browser_costs_its_episodes_only(make):
    first, second = make(), make()
    for env in (first, second):
        start(env, "subscribe/chess")
    for process in chromiums(psutil.Process()):
        process.send_signal(signal.SIGKILL)
    with pytest.raises(BrowserDied):
        first.step("click [1]")
    with pytest.raises(BrowserDied):
        first.step("click [1]")
    assert "Objective" in start(first, "subscribe/chess")  # the same object, a new browser
    assert [first.step(action)[1] for _, action in first.expert()][-1] == 1.0
    with pytest.raises(BrowserDied):
        second.step("click [1]")
    assert "Objective" in start(second, "subscribe/chess")


@needs_chromium
def test_a_server_outlives_its_browser(serve):
    client = EnvClient(serve(WebArena), timeout=60)
    episode = RemoteEpisode(client)
    episode.reset("subscribe/chess")
    for process in chromiums(psutil.Process()):
        process.send_signal(signal.SIGKILL)
    with pytest.raises(EnvError, match="environment_crash"):
        episode.step("click [1]")
    with RemoteEpisode(client) as episode:
        assert "Objective" in episode.reset("subscribe/chess")[0]


STARTED = """
import sys, time
import envs
env = envs.make("webarena")
env.reset(options={"task": "subscribe/chess"})
print("ready", flush=True)
time.sleep(float(sys.argv[1]))
"""


@needs_chromium
@pytest.mark.parametrize("ending", ["its own", "SIGTERM", "SIGKILL"])
def test_no_chromium_outlives_its_process(ending):
    seconds = "0" if ending == "its own" else "60"
    process = subprocess.Popen(
        [sys.executable, "-c", STARTED, seconds], cwd=REPO, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "ready\n"
    try:
        below = psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:  # it has ended already
        below = []
    if ending != "its own":
        assert chromiums(psutil.Process(process.pid))
        process.send_signal(getattr(signal, ending))
    process.wait(timeout=30)
    assert not psutil.wait_procs(below, timeout=20)[1]


def test_threads_share_one_browser_and_one_server(make):
    found, threads = [], []
    for _ in range(8):
        threads.append(threading.Thread(target=lambda: found.append(make()._source.browser())))
        threads[-1].start()
    for thread in threads:
        thread.join()
    assert len(set(map(id, found))) == 1


def test_a_missing_chromium_is_one_line(monkeypatch, tmp_path):
    monkeypatch.setattr(browser, "find_chromium", lambda: None)
    monkeypatch.setenv("PLAYWRIGHT_BROWSERS_PATH", str(tmp_path))
    env = WebArena()
    monkeypatch.setattr(env._source, "browser", lambda: browser.Browser("MAP * ~NOTFOUND"))
    with pytest.raises(ValueError, match="install") as error:
        env.reset(options={"task": "subscribe/chess"})
    assert "\n" not in str(error.value)


def test_the_name_in_envs():
    assert isinstance(envs.make("webarena"), WebArena)
