"""
SearchQA's grader against adversaries, and its bundled questions against its own corpus.

That answers are unique, that no hop can be skipped and that splits share no entity is checked here
from the passages as they are, not from how they were made. What every environment must do is in
test_envs.py.
"""

import itertools
import json
import random
import re
import string
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from env_server import EnvClient, EnvError, RemoteEpisode, create_app, make_server
from envs import searchqa
from envs.searchqa import (
    CLASSES,
    KIND,
    SPLITS,
    Bm25,
    RetrieverError,
    SearchQA,
    exact_match,
    f1,
    normalise,
    terms,
    world,
)

QUESTIONS = [question for split in SPLITS for question in world().questions[split]]


def play(env: SearchQA, task: str) -> list[tuple]:
    env.reset(options={"task": task})
    return [(thought, action, *env.step(action)) for thought, action in env.expert()]


# --- comparing answers ---


def squad(text: str) -> str:
    """The usual normalisation as everybody has it, written down a second time."""
    text = "".join(char for char in text.lower() if char not in set(string.punctuation))
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


@given(st.text(st.sampled_from(string.printable), max_size=40) | st.lists(
    st.sampled_from(["the", "The", "a", "An", "Tallinn", "U.S.", "3.14", "1,000", "-", "$5", "A."])
).map(" ".join))  # fmt: skip
def test_on_ascii_it_is_the_usual_normalisation(text):
    if squad(text):  # what would be left with nothing is the documented exception
        assert normalise(text) == squad(text)


def test_normalise_by_hand():
    for text, expected in {
        "The Netherlands": "netherlands",
        "  new\tyork,\nNY. ": "new york ny",
        "118,918": "118918",
        "1,234.5": "12345",  # the usual rule, for better or worse: no answer of ours has a point
        ".is": "is",
        "theatre an-a": "theatre ana",
        "“Côte d’Ivoire”": "côte divoire",  # curly quotes are punctuation too
        "Ｆｕｌｌ ｗｉｄｔｈ": "full width",
        "ﬁve": "five",
        "STRASSE ẞ": "strasse ss",
        "Co\u0302te": "côte",  # composed and decomposed are one
        "Tal\u200blinn\ufeff": "tallinn",  # invisible
        "Tallinn\u00a0\u2003city\u2028": "tallinn city",
        "東京。": "東京",
        "the the": "the the",  # not nothing
        "A": "a",
        "!?": "",
        "": "",
    }.items():
        assert normalise(text) == expected, text


ADVERSARIES = [
    *(
        "",
        " ",
        ".",
        "!!!",
        "the",
        "the the",
        "a an the",
        "\x00",
        "\x00\x01\x7f",
        "\u200b",
        "\ud800",
    ),
    *("Tallin", "Tallinnn", "Tal linn", "T a l l i n n", "nnillaT", "Таllinn"),  # Cyrillic Ta
    *(
        "Tallinn or Riga",
        "Tallinn, Riga, Vilnius",
        "Tallinn\nRiga",
        "Tallinn\x00Riga",
        "Tallinn|Riga",
    ),
    *("Tallinn Tallinn", "not Tallinn", "Tallinn is the capital of Estonia", "Tallinn" * 1000),
    *("Estonia: The capital of Estonia is Tallinn.", "The capital of Estonia is Tallinn."),
    *(
        "*",
        ".*",
        "%s",
        "{}",
        "None",
        "null",
        "True",
        "golden_answers",
        "success",
        "[Tallinn, Riga]",
    ),
    *("Tallinn " + "x" * 10_000, "x " * 200_000, "\ufdfa" * 100_000, "𝕿" * 300_000),
]


@pytest.mark.parametrize("answer", ADVERSARIES, ids=lambda text: ascii(text[:30]))
def test_an_adversarial_answer_is_wrong_and_the_last(answer):
    env = SearchQA()
    env.reset(options={"task": "2hop/capital-of-country-with-calling-code/372"})
    start = time.monotonic()
    observation, reward, terminated, truncated, info = env.step(f"answer {answer}")
    assert time.monotonic() - start < 2
    assert (reward, terminated, truncated, info["success"]) == (0.0, True, False, False)
    assert 0.0 <= info["f1"] < 1.0
    assert observation == "Your answer is taken."
    # and there is no way to try again
    observation, reward, terminated, _, info = env.step("answer Tallinn")
    assert (reward, terminated, info["success"], info["invalid"]) == (0.0, True, False, True)


@pytest.mark.parametrize(
    "action",
    [
        *(
            "answer Tallinn",
            "ANSWER tallinn",
            "Answer: Tallinn.",
            "answer   the Tallinn!",
            "answer\tTallinn",
        ),
        *(
            ' answer "Tallinn" ',
            "answer Tal\u200blinn",
            "answer Ｔａｌｌｉｎｎ",
            "answer TALLINN\n",
        ),
    ],
)
def test_a_right_answer_may_be_dressed(action):
    env = SearchQA()
    env.reset(options={"task": "2hop/capital-of-country-with-calling-code/372"})
    assert env.step(action) == (
        *("Your answer is taken.", 1.0, True, False),
        {"success": True, "invalid": False, "f1": 1.0},
    )


def test_nothing_shown_tells_right_from_wrong():
    """The observations of a right and a wrong answer are the same, so no oracle."""
    seen = set()
    for answer in ("Tallinn", "Riga"):
        env = SearchQA()
        env.reset(options={"task": "2hop/capital-of-country-with-calling-code/372"})
        seen.add((env.step(f"answer {answer}")[0], env.step("search Estonia")[0]))
    assert len(seen) == 1


def test_numbers_with_separators():
    golden = ["118,918"]
    for answer in ("118,918", "118918", "118,918.", "118’918"):
        assert exact_match(answer, golden), answer
    for answer in ("118 918", "118", "918", "118,919", "0118918", "118,918 people", "1.18e5"):
        assert not exact_match(answer, golden), answer


def test_no_bundled_answer_depends_on_what_normalising_throws_away():
    for question in QUESTIONS:
        (answer,) = question.golden
        assert normalise(answer) and not re.search(r"\d\.\d", answer)
        assert exact_match(answer, question.golden) and f1(answer, question.golden) == 1.0


def test_any_golden_answer_will_do():
    golden = ["New York City", "NYC"]
    assert exact_match("nyc", golden) and not exact_match("nyc new york city", golden)
    assert not exact_match("", [""]) and not exact_match("?", ["!"])  # nothing equals nothing
    assert exact_match("the the", ["The The"]) and not exact_match("a", ["the"])
    assert exact_match("A", ["a"])  # vitamin A


def test_f1_by_hand():
    for answer, golden, expected in [
        ("Tallinn", ["Tallinn"], 1.0),
        ("the old Tallinn", ["Tallinn"], 2 / 3),
        ("Tallinn Tallinn", ["Tallinn"], 2 / 3),  # the second one has no partner
        ("New York", ["York New City"], 0.8),  # 2 of 2 and 2 of 3
        ("NYC", ["New York City", "N.Y.C."], 1.0),  # the nearest
        ("Riga", ["Tallinn"], 0.0),
        ("", ["Tallinn"], 0.0),
        ("!", ["?"], 0.0),
    ]:
        assert f1(answer, golden) == pytest.approx(expected), (answer, golden)


@given(st.text(max_size=30), st.text(max_size=30))
def test_match_and_f1_agree(answer, gold):
    assert exact_match(answer, [gold]) == exact_match(gold, [answer])
    assert f1(answer, [gold]) == f1(gold, [answer])
    if exact_match(answer, [gold]):
        assert f1(answer, [gold]) == 1.0
    assert normalise(normalise(answer)) == normalise(answer)


# --- the bundled world, from its passages alone ---

SENTENCE = re.compile(
    r"(?P<subject>.+): The (?P<relation>[A-Za-z ]+?) of (?P=subject) is (?P<value>.+?)( \(GeoNames\))?\."
)


@cache
def parsed() -> list[tuple[str, str, str]]:
    """(relation, subject, value) of every passage, read back from its text."""
    matches = [SENTENCE.fullmatch(passage) for passage in world().passages]
    return [match.group("relation", "subject", "value") for match in matches]


@cache
def places() -> dict[str, set[int]]:
    """In which passages each word occurs."""
    found = defaultdict(set)
    for index, passage in enumerate(world().passages):
        for word in terms(passage):
            found[word].add(index)
    return found


def passages_with(*names: str) -> set[int]:
    """Passages in which all these names occur in full, as they are written: AND is Andorra."""
    words = [places()[word] for name in names for word in terms(name)]
    candidates = set.intersection(*sorted(words, key=len))  # the rarest word first: it leaves few
    patterns = [re.compile(rf"(?<!\w){re.escape(name)}(?!\w)") for name in names]
    return {i for i in candidates if all(found.search(world().passages[i]) for found in patterns)}


def test_passages_are_short_regular_and_thousands():
    assert len(set(world().passages)) == len(world().passages) > 5000
    assert list(world().passages) == sorted(world().passages)
    assert {relation for relation, _, _ in parsed()} == set(KIND)
    for passage in world().passages:
        assert passage.isascii() and len(passage) <= 130, passage
        # what a title says once counts once in the index, so passages stay comparable
        assert len(searchqa.indexed(passage)) <= 20


def test_facts_that_anyone_can_check():
    facts = set(parsed())
    for fact in [
        ("capital", "Estonia", "Tallinn"),
        ("capital", "Brazil", "Brasilia"),
        ("calling code", "France", "33"),
        ("internet domain", "Iceland", ".is"),
        ("ISO code", "Germany", "DEU"),
        ("currency code", "Japan", "JPY"),
        ("continent", "Peru", "South America"),
        ("country", "Marseille", "France"),
        ("symbol", "iron", "Fe"),
        ("atomic number", "gold", "79"),
        ("crystal structure", "copper", "face-centred cubic"),
    ]:
        assert fact in facts
    subjects = Counter((relation, subject) for relation, subject, _ in facts)
    assert set(subjects.values()) == {1}  # each thing has one capital, one country, ...
    known = {(subject, relation): value for relation, subject, value in facts}
    for subject, relation in [
        ("Bulgaria", "currency code"),  # the euro since 2026, and both packages say BGN
        ("Kazakhstan", "capital"),  # both say Nur-Sultan, which is Astana again
        ("Bolivia", "capital"),
    ]:
        assert (subject, relation) not in known


def test_every_kind_of_thing_has_its_own_names():
    kinds = defaultdict(set)
    for relation, subject, value in parsed():
        kinds[" ".join(terms(subject))].add(KIND[relation])
        if relation == "capital":
            kinds[" ".join(terms(value))].add("city")
    shared = {name for name, found in kinds.items() if len(found) > 1}
    hops = [hop for question in QUESTIONS for hop in question.hops]
    cities = {hop.fact.value for hop in hops if hop.fact.relation == "capital"}
    cities |= {hop.fact.subject for hop in hops if KIND[hop.fact.relation] == "city"}
    # Capitals named like their country: no question goes through them.
    assert "singapore" in shared and not shared & {" ".join(terms(city)) for city in cities}


def test_answers_are_unique():
    """Following the words of a question through the passages leads to its golden answer alone."""
    forward, backward = defaultdict(set), defaultdict(set)
    for relation, subject, value in parsed():
        forward[relation, subject].add(value)
        backward[relation, value].add(subject)
    for question in QUESTIONS:
        names = {question.hops[0].known}
        for hop in question.hops:
            table = backward if hop.is_reverse else forward
            names = {found for name in names for found in table[hop.fact.relation, name]}
        assert names == set(question.golden), question.task


def test_questions_say_what_they_ask():
    """The text, read by a grammar of its own, names the start and the relations in order."""
    for question in QUESTIONS:
        phrase = re.fullmatch(r"(?:What is|Find|Name|I want to know) the (.+)[.?]", question.text)[
            1
        ]
        relations = []
        while match := re.fullmatch(rf"({'|'.join(KIND)}) of (?:the )?(.+)", phrase):
            relations.append((match[1], False))
            phrase = match[2]
        if match := re.fullmatch(rf"(country|element) with ({'|'.join(KIND)}) (.+)", phrase):
            relations.append((match[2], True))
            phrase = match[3]
        assert phrase == question.hops[0].known, question.text
        assert relations[::-1] == [(h.fact.relation, h.is_reverse) for h in question.hops]


def test_no_passage_lets_one_skip_a_hop():
    """Only neighbours on the way ever stand together in a passage, so every hop is a search."""
    for question in QUESTIONS:
        names = [question.hops[0].known, *(hop.found for hop in question.hops)]
        for i, j in itertools.combinations(range(len(names)), 2):
            if j - i > 1:
                assert not passages_with(names[i], names[j]), question.task
        for hop in question.hops:  # and each hop has its passage
            assert passages_with(hop.known, hop.found)


def test_searching_for_the_question_itself_is_not_enough():
    """For two and three hops the answer hardly ever turns up among what a lazy agent would read."""
    engine = Bm25(world().passages)
    found = Counter()
    for question in world().questions["test"]:
        shown = " ".join(normalise(line) for line in engine.search(question.text, 3))
        found[question.category] += f" {normalise(question.golden[0])} " in f" {shown} "
    assert found["1-hop"] >= 0.9 * 200
    assert found["2-hop"] + found["3-hop"] <= 0.05 * 400, found


def test_splits_share_no_entity():
    """Neither names, nor what lies between, nor answers: but for classes and numbers."""

    def entities(split: str) -> set[str]:
        names = set()
        for question in world().questions[split]:
            for hop in question.hops:
                names.add((KIND[hop.fact.relation], hop.fact.subject))
                if hop.fact.relation not in (*CLASSES, "population"):
                    kind = {"capital": "city", "country": "country"}.get(hop.fact.relation)
                    names.add((kind or hop.fact.relation, hop.fact.value))
                elif hop.is_reverse:  # a currency that stands for a country
                    names.add((hop.fact.relation, hop.fact.value))
        return names

    for one, other in itertools.combinations(SPLITS, 2):
        common = entities(one) & entities(other)
        assert {kind for kind, _ in common} <= {"calling code"}, common
        assert len(common) <= 2, common  # 1, of the United States and Canada; 47 and the like


def test_splits_share_no_name_in_their_texts():
    """The same from the words: what a test question says by name, no train question says."""
    names = {}
    for split in SPLITS:
        texts = world().questions[split]
        names[split] = {q.hops[0].known for q in texts if not q.hops[0].known.isdigit()}
        names[split] |= {
            answer for q in texts for answer in q.golden
            if q.hops[-1].fact.relation not in CLASSES and not re.fullmatch(r"[\d,]+", answer)
        }  # fmt: skip
    assert not names["train"] & names["test"]
    assert not names["train"] & names["dev"]
    assert not names["dev"] & names["test"]


def test_numbers_of_tasks():
    for split, least in {"train": 3000, "dev": 98, "test": 200}.items():
        count = Counter(question.category for question in world().questions[split])
        assert set(count) == {"1-hop", "2-hop", "3-hop"} and min(count.values()) >= least
    for split in SPLITS:  # the first fifty are a fair sample
        first = world().questions[split][:59]
        assert len({question.task.rpartition("/")[0] for question in first}) >= 55


@pytest.mark.parametrize(("split", "every"), [("train", 10), ("dev", 1), ("test", 1)])
def test_the_expert_solves_bundled_tasks(split, every):
    """In hops + 1 turns: each search finds its passage among the first three."""
    env = SearchQA()
    for task in env.tasks(split)[::every]:
        turns = play(env, task)
        assert turns[-1][-1]["success"], task
        assert len(turns) == int(task[0]) + 1, task
        for thought, action, *_ in turns:
            assert action.split(maxsplit=1)[1] in thought  # said before it is done


def test_hops_restricts_tasks():
    whole = SearchQA()
    assert len(whole.tasks("test")) == 600
    for hops, allowed in {"1": "1", 2: "2", "1,3": "13", "3,2,1": "123"}.items():
        env = SearchQA(hops=hops)
        for split in SPLITS:
            expected = [task for task in whole.tasks(split) if task[0] in allowed]
            assert env.tasks(split) == expected
    with pytest.raises(ValueError, match="2hop/capital-of-country-with-calling-code/372"):
        SearchQA(hops=1).category("2hop/capital-of-country-with-calling-code/372")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hops": "4"}, "hops must be"), ({"hops": ""}, "hops must be"), ({"hops": "1,"}, "hops must"),
        ({"hops": "one"}, "'one'"), ({"topk": "0"}, "topk must be"), ({"topk": "21"}, "topk must"),
        ({"topk": "³"}, "topk must"), ({"topk": "3.0"}, "topk"), ({"topk": True}, "topk"),
        ({"corpus": "c.jsonl"}, "questions"), ({"questions": "q.jsonl"}, "corpus or retriever"),
        ({"corpus": "c", "questions": "q", "retriever": "http://h/retrieve"}, "retriever"),
        ({"retriever": "localhost:8000"}, "http://"), ({"retriever": "ftp://h"}, "http://"),
        ({"retriever": "http://h/retrieve", "timeout": "0"}, "timeout"),
        ({"retriever": "http://h/retrieve", "timeout": "soon"}, "timeout"),
        ({"retriever": "http://h/retrieve", "timeout": "nan"}, "timeout"),
    ],
)  # fmt: skip
def test_a_wrong_option_is_one_sentence(options, message):
    with pytest.raises(ValueError, match=message) as error:
        SearchQA(**options)
    assert "\n" not in str(error.value)


# --- search ---


def test_search_by_hand():
    engine = Bm25(
        (
            "Iceland: The capital of Iceland is Reykjavik.",
            "Iceland: The continent of Iceland is Europe.",
            "Curaçao: The internet domain of Curaçao is .cw.",
            "Akureyri: The population of Akureyri is 19,219 (GeoNames).",
        )
    )
    for query, best in {
        "capital of Iceland": 0,
        "CAPITAL, ICELAND?": 0,
        "europe": 1,
        "curacao": 2,  # no accent needed
        "Curaçao": 2,
        ".cw": 2,
        "19219": 3,
        "19,219": 3,
    }.items():
        assert engine.search(query, 1) == [engine.passages[best]], query
    assert len(engine.search("the", 20)) == 4  # asks for more than there are
    for query in ("", "?!", "cw", "zzz", "東京"):  # the domain is .cw, and no word is
        assert engine.search(query, 3) == []
    # Equals come in an order of the query's own, the same every time.
    towns = tuple(f"Town {i}: It is small and old." for i in range(50))
    twins, others = Bm25(towns), Bm25(towns)
    assert twins.search("small", 50) == others.search("Small!", 50) != twins.search("old", 50)
    assert sorted(twins.search("small", 50)) == sorted(towns)


@given(st.lists(st.sampled_from("red green blue small large old new".split()), max_size=6))
@settings(max_examples=50)
def test_the_best_are_those_of_a_full_sort(words):
    chance = random.Random(7)
    vocabulary = "red green blue small large old new house tree".split()
    passages = tuple(" ".join(chance.choices(vocabulary, k=6)) for _ in range(200))
    engine, query = full_engine(passages), " ".join(words)
    scores = engine._index.get_scores(terms(query)).round(3) if words else [0.0] * 200
    key = searchqa.number(" ".join(terms(query)))
    ranked = sorted(
        (-score, searchqa.number(passage) ^ key, passage)
        for score, passage in zip(scores, passages, strict=True)
        if score > 0
    )
    for topk in (1, 3, 20):
        assert engine.search(query, topk) == [passage for *_, passage in ranked[:topk]]


full_engine = cache(Bm25)


def test_one_index_serves_the_whole_process():
    """Thirty-two threads want it at once, and it is made once."""
    searchqa.load_engine.cache_clear()
    envs_ = [SearchQA(hops="1") for _ in range(32)]
    for env in envs_:
        env.reset(seed=0)
    with ThreadPoolExecutor(32) as pool:
        shown = set(pool.map(lambda env: env.step("search capital of Estonia")[0], envs_))
    assert len(shown) == 1 and searchqa.load_engine.cache_info().misses == 1


def test_topk_is_how_many_passages_come_back():
    for topk in (1, 2, "5", 20):
        env = SearchQA(topk=topk)
        env.reset(seed=0)
        assert len(env.step("search capital")[0].splitlines()) == int(topk)


@pytest.mark.parametrize(
    "action",
    ["search", "search ", "search ?!", "look Estonia", "Tallinn", "search " + "x" * 1001, ""],
)
def test_what_is_neither_search_nor_answer_changes_nothing(action):
    env = SearchQA()
    env.reset(options={"task": "2hop/capital-of-country-with-calling-code/372"})
    before = env.available_actions()
    observation, reward, terminated, _, info = env.step(action)
    assert (reward, terminated, info["invalid"], info["success"]) == (0.0, False, True, False)
    assert "search <query>" in observation and "answer <text>" in observation
    assert env.available_actions() == before


def test_a_search_without_result_is_no_mistake():
    env = SearchQA()
    env.reset(seed=0)
    observation, *_, info = env.step("search qqqq")
    assert observation == "No passage matches." and not info["invalid"]


def test_step_before_reset_is_the_callers_mistake():
    with pytest.raises(ValueError, match="reset"):
        SearchQA().step("search Estonia")
    assert SearchQA().available_actions() == [] and list(SearchQA().expert()) == []


# --- your own files ---

CORPUS = [
    {"id": "0", "title": "Loch Ness", "text": "Loch Ness is a lake\nin Scotland, 37 km long."},
    {"id": "1", "contents": '"Ben Nevis"\nBen Nevis is the highest mountain of Scotland.'},
    {"id": "2", "title": "", "text": "Whisky is made of barley."},
    {"id": "3", "title": None, "text": "Half a pair \ud800 hurts no one."},
]
ASKED = [
    {
        "id": "nq_1",
        "question": "how long is loch ness",
        "golden_answers": ["37 km", "37 kilometres"],
    },
    {
        "question": "What is whisky\nmade of?",
        "golden_answers": ["barley"],
        "metadata": {"type": "food"},
    },
]


def write(path: Path, lines: list) -> str:
    path.write_text(
        "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    )
    return str(path)


@pytest.fixture
def own(tmp_path) -> dict[str, str]:
    return {
        "corpus": write(tmp_path / "corpus.jsonl", CORPUS),
        "questions": write(tmp_path / "asked.jsonl", ["", *ASKED, ""]),
    }


def test_own_corpus_and_questions(own):
    env = SearchQA(**own)
    tasks = [task for split in SPLITS for task in env.tasks(split)]
    assert sorted(tasks) == ["asked/3", "nq_1"]  # an id of its own, or file and line
    observation, info = env.reset(options={"task": "nq_1"})
    assert observation == "Question: how long is loch ness" and info["category"] == "question"
    assert (
        env.step("search Loch Ness")[0] == "Loch Ness: Loch Ness is a lake in Scotland, 37 km long."
    )
    assert env.step("answer 37 kilometres")[-1]["success"]
    observation, info = env.reset(options={"task": "asked/3"})
    assert observation == "Question: What is whisky made of?" and info["category"] == "food"
    assert env.step("search highest mountain")[0].startswith("Ben Nevis: Ben Nevis is the highest")
    env.step("search pair")[0].encode()  # what can't be sent has become a question mark
    assert env.step("search whisky")[0] == "Whisky is made of barley."
    assert not env.step("answer rye")[-1]["success"]


def test_own_questions_have_no_expert_and_say_so(own):
    env = SearchQA(**own)
    env.reset(options={"task": "nq_1"})
    assert env.available_actions() == []
    with pytest.raises(ValueError, match="no expert"):
        env.expert()


def test_a_file_is_dealt_the_same_on_every_machine(tmp_path):
    lines = [{"question": f"Question {i}?", "golden_answers": ["x"]} for i in range(400)]
    lines += [{"question": "question 7", "golden_answers": ["y"]}]  # as good as the same
    path = write(tmp_path / "q.jsonl", lines)
    env = SearchQA(questions=path, retriever="http://127.0.0.1:9/retrieve")
    tasks = {split: env.tasks(split) for split in SPLITS}
    assert {split: len(found) for split, found in tasks.items()} == {
        "train": 310,
        "dev": 51,
        "test": 40,
    }
    assert any({"q/8", "q/401"} <= set(found) for found in tasks.values())
    assert tasks["dev"][:3] == ["q/6", "q/15", "q/16"]


def test_a_folder_has_a_file_for_each_split(tmp_path):
    for split, count in {"train": 3, "test": 2}.items():
        lines = [{"question": f"{split} {i}?", "golden_answers": ["x"]} for i in range(count)]
        write(tmp_path / f"{split}.jsonl", lines)
    env = SearchQA(questions=str(tmp_path), retriever="http://127.0.0.1:9/retrieve")
    assert env.tasks("train") == ["train/1", "train/2", "train/3"]
    assert env.tasks("dev") == [] and env.tasks("test") == ["test/1", "test/2"]


def test_a_long_passage_is_cut_where_one_can_see_it(tmp_path):
    corpus = write(tmp_path / "c.jsonl", [{"title": "Long", "text": "word " * 1000}])
    questions = write(tmp_path / "q.jsonl", ASKED)
    env = SearchQA(corpus=corpus, questions=questions)
    env.reset(options={"task": "nq_1"})
    observation = env.step("search word")[0]
    assert len(observation) == searchqa.MAX_PASSAGE and observation.endswith(" word  ...")


GOOD = json.dumps(ASKED[0])


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([GOOD, "{"], "line 2 is not JSON"),
        ([GOOD, "", "[1]"], "line 3 must be a JSON object"),
        ([GOOD, "null"], "line 2 must be a JSON object, got None"),
        (["[" * 100_000], "line 1 is not JSON"),
        ([{"question": "q"}], "line 1: \"golden_answers\" must be a list"),
        ([{"question": "q", "golden_answers": "x"}], "line 1: \"golden_answers\" must be a list"),
        ([{"question": "q", "golden_answers": []}], "line 1: \"golden_answers\" must be a list"),
        ([{"question": "q", "golden_answers": ["x", 3]}], "a golden answer must be text, got 3"),
        ([{"question": "q", "golden_answers": [" "]}], "a golden answer must be text"),
        ([{"golden_answers": ["x"]}], "line 1: \"question\" must be text, got None"),
        ([{"question": " ", "golden_answers": ["x"]}], "\"question\" must be text"),
        ([GOOD, GOOD], "line 2: .* line 1 has the id 'nq_1' too"),
        ([], "no questions"),
        (["\n\n"], "no questions"),
    ],
)  # fmt: skip
def test_a_bad_questions_file_is_one_sentence(tmp_path, own, lines, message):
    path = write(tmp_path / "bad.jsonl", lines)
    env = SearchQA(corpus=own["corpus"], questions=path)  # building reads nothing
    with pytest.raises(ValueError, match=message) as error:
        env.tasks("train")
    assert "\n" not in str(error.value) and "bad.jsonl" in str(error.value)
    assert len(str(error.value)) < 400


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([CORPUS[0], '{"title": "x"'], "line 2 is not JSON"),
        ([CORPUS[0], {"title": "x"}], "line 2: \"text\" must be text, got None"),
        ([{"title": 3, "text": "x"}], "line 1: \"title\" must be text, got 3"),
        ([{"contents": ["x"]}], "line 1: \"contents\" must be text"),
        (["7"], "line 1 must be a JSON object, got 7"),
        ([], "no passages"),
    ],
)  # fmt: skip
def test_a_bad_corpus_is_one_sentence(tmp_path, own, lines, message):
    env = SearchQA(corpus=write(tmp_path / "bad.jsonl", lines), questions=own["questions"])
    with pytest.raises(ValueError, match=message) as error:
        env.tasks("train")  # what a server asks for first
    assert "\n" not in str(error.value) and "bad.jsonl" in str(error.value)


def test_files_that_can_not_be_read(tmp_path, own):
    (tmp_path / "latin.jsonl").write_bytes('{"question": "é"}'.encode("latin-1"))
    (tmp_path / "empty").mkdir()
    for name, message in {
        "missing.jsonl": "can't read .*missing.jsonl: No such file",
        "latin.jsonl": "line 1 is not JSON",
        "empty": "none of train.jsonl",
    }.items():
        with pytest.raises(ValueError, match=message) as error:
            SearchQA(corpus=own["corpus"], questions=str(tmp_path / name)).tasks("train")
        assert "\n" not in str(error.value)


def test_a_byte_order_mark_is_no_error(tmp_path, own):
    (tmp_path / "bom.jsonl").write_bytes(b"\xef\xbb\xbf" + GOOD.encode())
    assert SearchQA(corpus=own["corpus"], questions=str(tmp_path / "bom.jsonl")).category("nq_1")


def test_a_bad_file_stops_the_server_with_one_line(tmp_path):
    command = [sys.executable, "env_server.py", "--env", "searchqa", "--port", "0", "--options"]
    options = [f"questions={write(tmp_path / 'q.jsonl', ['{'])}", "retriever=http://127.0.0.1:9/r"]
    run = subprocess.run(
        [*command, *options],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=Path(__file__).parents[1],
    )
    assert run.returncode != 0 and "q.jsonl line 1 is not JSON" in run.stderr
    assert "Traceback" not in run.stderr


# --- a remote retriever ---


class Retriever(BaseHTTPRequestHandler):
    """Search-R1's server in a few lines, over our own index; `behave` makes it misbehave."""

    protocol_version = "HTTP/1.1"
    engine = None
    behave = None
    asked: list = []

    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append((self.path, request))
        status, body = 200, None
        if type(self).behave:
            status, body = type(self).behave(self)
        if body is None:
            lines = [self.engine.search(query, request["topk"]) for query in request["queries"]]
            body = json.dumps(
                {
                    "result": [
                        [self.entry(i, text) for i, text in enumerate(found)] for found in lines
                    ]
                }
            ).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def entry(self, rank: int, line: str) -> dict:
        title, _, text = line.partition(": ")
        return {
            "document": {"id": str(rank), "contents": f'"{title}"\n{text}'},
            "score": 9.0 - rank,
        }

    def log_message(self, *_):
        pass


@pytest.fixture
def retriever():
    Retriever.engine = searchqa.load_engine("", "", 20.0)
    Retriever.behave, Retriever.asked = None, []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Retriever)
    server.handle_error = lambda *_: None  # clients that hang up are what some tests are about
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/retrieve"
    server.shutdown()
    server.server_close()


def test_a_remote_retriever_serves_as_well(retriever):
    """Over the same index the same passages come back, so the expert solves everything."""
    remote, local = SearchQA(retriever=retriever, topk=2), SearchQA(topk=2)
    for task in random.Random(0).sample(local.tasks("test"), 10):
        assert play(remote, task) == play(local, task)
    path, request = Retriever.asked[0]
    assert path == "/retrieve"
    assert request == {"queries": [request["queries"][0]], "topk": 2, "return_scores": True}
    # Without scores, some servers answer with the documents themselves.
    body = json.dumps({"result": [[{"id": "0", "contents": '"Oslo"\nOslo is a city.'}]]}).encode()
    Retriever.behave = lambda _: (200, body)
    assert remote.step is not None and remote.reset(seed=0)
    assert remote.step("search Oslo")[0] == "Oslo: Oslo is a city."


BAD_REPLIES = {
    "a true status": (500, b"out of memory"),
    "not found": (404, b"{}"),
    "a redirect": (302, b""),
    "no JSON": (200, b"<html>"),
    "not UTF-8": (200, b"\xff\xfe\xff"),
    "another shape": (200, b'{"results": []}'),
    "no list": (200, b'{"result": 3}'),
    "no result for the query": (200, b'{"result": []}'),
    "too many results": (200, b'{"result": [[], []]}'),
    "entries of a wrong kind": (200, b'{"result": [["text"]]}'),
    "no document": (200, b'{"result": [[{"score": 1}]]}'),
    "an empty document": (200, b'{"result": [[{"document": {"contents": " "}}]]}'),
    "nesting": (200, b"[" * 100_000),
    "an array": (200, b"[]"),
}


@pytest.mark.parametrize("name", BAD_REPLIES)
def test_a_bad_reply_is_an_error_and_no_wrong_answer(name, retriever):
    Retriever.behave = lambda _: BAD_REPLIES[name]
    env = SearchQA(retriever=retriever)
    env.reset(seed=0)
    with pytest.raises(RetrieverError, match="127.0.0.1") as error:
        env.step("search Oslo")
    assert "\n" not in str(error.value) and len(str(error.value)) < 600
    Retriever.behave = None  # it recovers, and so does the episode
    assert env.step("search capital of Estonia")[0].startswith("Estonia: The capital of Estonia")


def hang(handler):
    time.sleep(6)
    return 200, None


def drip(handler):
    handler.send_response(200)
    handler.send_header("Content-Length", "1000000")
    handler.end_headers()
    with pytest.raises(OSError):  # until the client hangs up
        for _ in range(100):
            handler.wfile.write(b" ")
            time.sleep(0.05)
    return 200, b""


@pytest.mark.parametrize("behave", [hang, drip])
def test_a_deadline_holds(behave, retriever):
    Retriever.behave = behave
    env = SearchQA(retriever=retriever, timeout="0.3")
    env.reset(seed=0)
    start = time.monotonic()
    with pytest.raises(RetrieverError, match="no reply from"):
        env.step("search Oslo")
    assert 0.2 < time.monotonic() - start < 4


def test_nobody_listens():
    env = SearchQA(retriever="http://127.0.0.1:9/retrieve", timeout=2)
    env.reset(seed=0)
    with pytest.raises(RetrieverError, match="no reply from http://127.0.0.1:9"):
        env.step("search Oslo")


def test_the_server_turns_it_into_a_500(retriever):
    """An episode whose retriever failed is an error, which rollout.py plays again: not a failure."""
    Retriever.behave = lambda _: (503, b"busy")
    app = create_app(lambda: SearchQA(retriever=retriever), name="searchqa")
    server = make_server(app, "127.0.0.1", 0)
    threading.Thread(target=server.run, daemon=True).start()
    client = EnvClient(f"http://127.0.0.1:{server.effective_port}")
    episode = RemoteEpisode(client)
    episode.reset(client.tasks("test")[0])
    with pytest.raises(EnvError, match="503") as error:
        episode.step("search Oslo")
    assert (error.value.status, error.value.code) == (500, "environment_crash")
    assert client.health()["episodes"] == 0
    app.extensions["episodes"].close_all()
    server.close()
