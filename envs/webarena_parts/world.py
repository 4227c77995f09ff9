"""
The bundled sites' content: one small world in one SQLite database, the same on every machine.

    word lists  ->  people, products, orders, posts, projects  ->  seed()  ->  bytes of a database

    SCHEMA     the tables of all four sites; shop and CMS share theirs, so one's changes show in the other
    seed       the database that every episode starts from
    Databases  one copy in memory for every episode

Invented people and things, drawn from a generator with a fixed seed; the clock stands at NOW.
Read sites.py next.
"""

import functools
import random
import sqlite3
import threading

NOW = "2026-06-01"  # the date of whatever an agent makes
ME = "nora"  # who is logged in at the forum and the code host; at the shop it is customer 1
PASSWORD = "blue-kite-7"  # everybody's: no secret is kept in here

CATALOGUE = {  # two of each are sold, under different names
    "Lighting": "desk lamp, floor lamp, reading light, lantern, night light, candle holder",
    "Kitchen": "kettle, frying pan, bread knife, teapot, mixing bowl, cutting board",
    "Garden": "watering can, rake, spade, plant pot, garden hose, bird feeder",
    "Office": "stapler, notebook, desk organizer, fountain pen, paper tray, calendar",
    "Bedroom": "pillow, duvet, blanket, bed sheet, mattress cover, bedspread",
    "Bathroom": "bath mat, shower curtain, soap dish, towel, mirror, toothbrush holder",
    "Sports": "yoga mat, jump rope, dumbbell, tennis racket, football, water bottle",
    "Toys": "puzzle, kite, toy train, board game, teddy bear, marble run",
    "Music": "ukulele, tambourine, recorder, metronome, music stand, guitar strap",
    "Travel": "suitcase, backpack, neck pillow, travel mug, passport wallet, umbrella",
    "Pets": "dog bed, cat tower, leash, fish tank, hamster wheel, food bowl",
    "Tools": "hammer, screwdriver, tape measure, toolbox, spirit level, hand saw",
}
LOOKS = (
    "Amber Azure Black Bold Brass Bright Bronze Classic Clay Cobalt Copper Coral Cosy Crimson Dark "
    "Emerald Golden Green Grey Ivory Jade Large Lilac Linen Little Maple Marble Mint Misty Modern Nordic "
    "Oak Ocean Olive Orange Pearl Pine Plain Plum Purple Red Round Royal Ruby Rustic Sage Scarlet Silver "
    "Simple Slate Smart Soft Solid Striped Sunny Teal Tiny Velvet Vintage Violet Walnut White Willow Yellow"
).split()
FIRST = (
    "Nora Adam Bella Carl Dina Emil Freya Gus Hanna Ivan Jana Karl Lena Max Nils Olga Paul Rosa Sven Tara "
    "Uma Vera Will Xena Yara Zoe Anton Britt Clara David"
).split()
LAST = (
    "Lind Berg Costa Dahl Evans Frank Gruber Horn Iyer Jansen Koch Lopez Moser Novak Olsen".split()
)
CITIES = "Bergen Cork Delft Ghent Graz Lucca Lund Porto Riga Turku".split()
SAID = (  # reviews
    "Works well.", "Smaller than I thought.", "A fine present.", "It broke in a week.",
    "Good value.", "The colour is lovely.", "Arrived late.", "I would buy it again.",
)  # fmt: skip
STATUSES = ("pending", "processing", "shipped", "delivered", "canceled")
PAGES = (
    "About us", "Contact", "Delivery", "Returns", "Gift cards", "Careers",
    "Privacy", "Imprint", "Size guide", "Press", "Partners", "Repairs",
)  # fmt: skip
FORUMS = {
    "baking": "sourdough, rye bread, pie crust, cinnamon rolls",
    "books": "crime novels, short stories, old atlases, poetry",
    "chess": "endgames, openings, blitz games, chess clocks",
    "cycling": "chain oil, winter tyres, mountain passes, bike bags",
    "films": "silent films, film scores, documentaries, subtitles",
    "gardening": "tomatoes, compost, roses, slugs",
    "hiking": "rain jackets, trail maps, mountain huts, blisters",
    "painting": "oil colours, brushes, portraits, canvas",
    "photos": "tripods, night skies, old lenses, street scenes",
    "running": "marathons, running shoes, interval training, knees",
    "sailing": "knots, tides, small boats, harbours",
    "weather": "thunder, barometers, snow, fog",
}
ASKED = ("Tips for {}", "Beginner and {}", "My year with {}", "Who likes {}")
PROJECTS = (
    "atlas-tiles bread-timer cloud-sift dust-meter echo-log fern-db glow-cli hash-garden ice-cache jolt-queue "
    "kite-router leaf-parser moss-ui nest-config orbit-sync pine-auth quartz-plot rain-api snow-lint tide-clock "
    "umbra-theme vine-graph wren-mail yarn-spool"
).split()
DOES = ("draws maps", "keeps time", "reads logs", "stores keys", "checks style", "sends mail")
LANGUAGES = ("Python", "Rust", "Go", "C", "Java", "Ruby")
LABELS = ("bug", "feature", "docs", "question")
TROUBLES = (
    "Crash on start", "Slow search", "Wrong date format", "Missing manual page",
    "Dark mode", "Memory leak", "Typo in help", "Export to CSV", "Broken link", "Retry on timeout",
)  # fmt: skip
ROLES = ("Guest", "Reporter", "Developer", "Maintainer")

SCHEMA = """
create table sessions (token text primary key, site text, user text);
create table customers (id integer primary key, name text, email text, phone text, city text);
create table products (id integer primary key, name text, category text, price integer, stock integer);
create table reviews (id integer primary key, product integer, author text, stars integer, text text,
                      status text);
create table orders (id integer primary key, customer integer, date text, status text);
create table items (order_id integer, product integer, quantity integer);
create table cart (product integer primary key, quantity integer);
create table wishes (product integer primary key);
create table pages (id integer primary key, title text, content text);
create table users (name text primary key, bio text);
create table posts (id integer primary key, forum text, author text, title text, body text,
                    score integer, date text);
create table comments (id integer primary key, post integer, author text, text text);
create table votes (post integer primary key, value integer);
create table subscriptions (forum text primary key);
create table projects (id integer primary key, path text unique, about text, language text,
                       stars integer);
create table stars (project integer primary key);
create table issues (id integer primary key, project integer, number integer, title text, body text,
                     state text, label text, author text, assignee text);
create table members (project integer, user text, role text, primary key (project, user));
"""


@functools.cache
def seed() -> bytes:
    """A serialized SQLite database."""
    database, chance = sqlite3.connect(":memory:"), random.Random("a small world")
    database.executescript(SCHEMA)

    def insert(table: str, *values) -> int:
        marks = ", ".join("?" * len(values))
        return database.execute(f"insert into {table} values ({marks})", values).lastrowid

    def day() -> str:
        return f"2026-{chance.randrange(1, 6):02}-{chance.randrange(1, 29):02}"

    people = [f"{first} {LAST[i % len(LAST)]}" for i, first in enumerate(FIRST)]
    _fill_shop(insert, day, chance, people)
    users = [name.split()[0].lower() for name in people]
    for user in users:
        insert("users", user, f"Hello, I am {user}.")
    _fill_forum(insert, day, chance, users)
    _fill_code(insert, chance, users)
    database.commit()
    return database.serialize()


def _fill_shop(insert, day, chance: random.Random, people: list[str]) -> None:
    for name in people:
        email = f"{name.lower().replace(' ', '.')}@mail.test"
        insert(
            "customers",
            None,
            name,
            email,
            f"555-{chance.randrange(10**4):04}",
            chance.choice(CITIES),
        )
    wares = [(kind, thing) for kind, things in CATALOGUE.items() for thing in things.split(", ")]
    for kind, thing in wares:
        for look in chance.sample(LOOKS, 2):
            price, stock = chance.randrange(300, 12_000), chance.randrange(1, 90)
            product = insert("products", None, f"{look} {thing.title()}", kind, price, stock)
            stars = chance.sample(range(1, 6), 2)  # different, so that "the 2-star review" is one
            authors = chance.sample(people[1:], 3)
            for star, author in zip(stars, authors, strict=False):
                insert("reviews", None, product, author, star, chance.choice(SAID), "approved")
            if product % 5 == 0:
                insert("reviews", None, product, authors[2], 3, chance.choice(SAID), "pending")
    products = range(1, 2 * len(wares) + 1)
    for number in range(1001, 1091):
        customer = 1 if number % 5 == 0 else chance.randrange(2, len(people) + 1)
        insert("orders", number, customer, day(), chance.choice(STATUSES))
        for product in chance.sample(products, chance.randrange(1, 4)):
            insert("items", number, product, chance.randrange(1, 4))
    for title in PAGES:
        insert("pages", None, title, f"All there is to say on {title.lower()}.")


def _fill_forum(insert, day, chance: random.Random, users: list[str]) -> None:
    for forum, topics in FORUMS.items():
        titles = [asked.format(topic) for asked in ASKED for topic in topics.split(", ")]
        scores = chance.sample(range(2, 99), 12)  # different, so that the top post is one
        for title, score in zip(chance.sample(titles, 12), scores, strict=True):
            author, body = chance.choice(users[1:]), f"I have a lot to say on this. Part {score}."
            post = insert("posts", None, forum, author, title, body, score, day())
            for user in chance.sample(users[1:], chance.randrange(5)):
                insert(
                    "comments", None, post, user, chance.choice(("I agree.", "Why so?", "Thanks!"))
                )


def _fill_code(insert, chance: random.Random, users: list[str]) -> None:
    for index, name in enumerate(PROJECTS):
        owner, language = (ME if index % 3 else chance.choice(users[1:])), chance.choice(LANGUAGES)
        about = f"A {language} tool that {chance.choice(DOES)}."
        stars = chance.randrange(1, 900)
        project = insert("projects", None, f"{owner}/{name}", about, language, stars)
        insert("members", project, owner, "Owner")
        people = chance.sample([user for user in users[1:] if user != owner], 4)
        for user in people[:2]:
            insert("members", project, user, chance.choice(ROLES))
        for number, title in enumerate(chance.sample(TROUBLES, 6), 1):
            state, label = chance.choice(("open", "open", "closed")), chance.choice(LABELS)
            body = f"Seen with version 1.{chance.randrange(9)}."
            insert("issues", None, project, number, title, body, state, label, people[2], people[3])


class Databases:
    """A copy of the seed for every episode, in memory: nothing is left when it closes.

    One connection may be used by one thread at a time, so each comes with a lock.
    """

    def __init__(self):
        self._open: dict[str, tuple[sqlite3.Connection, threading.Lock]] = {}

    def open(self, episode: str) -> None:
        database = sqlite3.connect(":memory:", check_same_thread=False, isolation_level=None)
        database.deserialize(seed())
        database.row_factory = sqlite3.Row
        self._open[episode] = database, threading.Lock()

    def use(self, episode: str) -> tuple[sqlite3.Connection, threading.Lock] | None:
        return self._open.get(episode)

    def query(self, episode: str, sql: str, *values) -> list[sqlite3.Row]:
        database, lock = self._open[episode]
        with lock:
            return database.execute(sql, values).fetchall()

    def close(self, episode: str) -> None:
        database, lock = self._open.pop(episode, (None, None))
        if database is not None:
            with lock:
                database.close()
