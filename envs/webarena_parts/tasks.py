"""
Tasks on the bundled sites, in WebArena's own JSON, each template with its expert.

    an entity of the world  ->  a template  ->  {"intent", "start_url", "eval", ...}  +  advise(sight)

    Sight      what an expert may look at: the page that the agent sees, and the episode's data
    Template   three wordings (train, dev, test), what to check, and how to get there
    TEMPLATES  all of them
    tasks      {id: task}, dealt so that no product, order, post or project is in two splits

An expert has no memory: `advise` reads the page anew each turn, the last step of the way first, so it
finds back from wherever a detour led. Read sites.py first, envs/webarena.py next.
"""

import functools
import random
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from envs.webarena_parts.world import (
    CATALOGUE,
    FORUMS,
    LABELS,
    LOOKS,
    PASSWORD,
    ROLES,
    STATUSES,
    seed,
)

SITES = {  # WebArena's name, its placeholder, and the address here
    "shop": ("shopping", "__SHOPPING__", "http://shop.test"),
    "cms": ("shopping_admin", "__SHOPPING_ADMIN__", "http://cms.test"),
    "forum": ("reddit", "__REDDIT__", "http://forum.test"),
    "code": ("gitlab", "__GITLAB__", "http://code.test"),
}
SIZES = {"train": 9, "dev": 3, "test": 3}  # of a template, at most
Advice = tuple[str, str]  # thought, action
Case = dict  # what a template is about: "id" deals it into a split, "key" names the task


@dataclass(frozen=True)
class Sight:
    """The current page as the agent sees it."""

    url: str
    elements: list  # of browser.Element, in view
    query: Callable[..., list]  # (sql, *values) -> rows of the episode's data

    def at(self, site: str, path: str) -> bool:
        return self.url.split("?")[0] == SITES[site][2] + path

    def find(self, role: str, name: str):
        return next((e for e in self.elements if (e.role, e.name) == (role, name)), None)

    def click(self, role: str, name: str) -> Advice | None:
        found = self.find(role, name)
        return found and (f"I click {name}.", f"click [{found.number}]")

    def first_link(self, after: str) -> Advice | None:
        """The first link below the one called `after`."""
        names = [e.name for e in self.elements if e.role == "link"]
        below = names[names.index(after) + 1 :] if after in names else []
        return self.click("link", below[0]) if below else None

    def search(self, what: str, text: str) -> Advice | None:
        """Unless the box is not there, or its results are what we see."""
        found = self.find("searchbox", f"Search {what}")
        return found and (f"I search for {text}.", f"type [{found.number}] [{text}] [1]")

    def fill(self, label: str, text: str) -> Advice | None:
        """None when the field holds the text already."""
        found = self.find("textbox", label)
        is_hidden = found and found.value and set(found.value) == {"•"}  # a password
        if not found or found.value == ("•" * len(text) if is_hidden else text):
            return None
        return f"{label} is {text}.", f"type [{found.number}] [{text}] [0]"

    def choose(self, label: str, option: str) -> Advice | None:
        found, there = self.find("combobox", label), self.find("option", option)
        if not found or not there or found.value == option:
            return None
        return f"{label} is {option}.", f"click [{there.number}]"

    def next_page(self, site: str, path: str) -> Advice | None:
        return self.click("link", "Next page") if self.at(site, path) else None

    def go(self, site: str) -> Advice:
        url = SITES[site][2]
        return f"I go to {url}.", f"goto [{url}]"

    def menu(self, site: str, name: str) -> Advice:
        """A link of the site's menu."""
        return (self.url.startswith(SITES[site][2]) and self.click("link", name)) or self.go(site)

    def holds(self, sql: str, *values) -> bool:
        return bool(self.query(sql, *values))


def stop(answer: str, thought: str = "") -> Advice:
    return thought or f"The answer is {answer}.", f"stop [{answer}]"


def done() -> Advice:
    return stop("done", "It is done.")


@dataclass(frozen=True)
class Template:
    """One kind of task.

    name      begins the task's id
    site      where it starts
    intents   for train, dev and test; {} are filled from the case
    cases     all there are
    check     case -> WebArena's "eval"
    advise    (sight, case) -> the expert's next thought and action
    changes   whether it changes the site's data
    signed_in whether the agent is logged in at the start
    """

    name: str
    site: str
    intents: tuple[str, str, str]
    cases: Callable[[], list[Case]]
    check: Callable[[Case], dict]
    advise: Callable[[Sight, Case], Advice | None]
    changes: bool = True
    signed_in: bool = True
    also: tuple[str, ...] = ()  # other sites that it needs


# --- what to check, in WebArena's form ---


def checks(kinds: list[str], answers: dict | None = None, url: str = "", pages=()) -> dict:
    return {
        "eval_types": kinds,
        "reference_answers": answers,
        "reference_url": url,
        "program_html": list(pages),
    }


def says(answer: str) -> dict:
    return checks(["string_match"], {"exact_match": answer})


def mentions(*answers: str) -> dict:
    return checks(["string_match"], {"must_include": list(answers)})


def is_at(site: str, path: str) -> dict:
    return checks(["url_match"], url=SITES[site][1] + path) | {"url_note": "GOLD in PRED"}


def shows(site: str, path: str, *texts: str, last: bool = False) -> dict:
    url = "last" if last else SITES[site][1] + path
    locator = "document.querySelector('#main').outerText"
    wanted = {"must_include": list(texts)}
    page = {"url": url, "locator": locator, "required_contents": wanted}
    return checks(["program_html"], pages=[page])


def has(site: str, path: str, selector: str, attribute: str, text: str) -> dict:
    locator = f"document.querySelector('{selector}').{attribute}"
    page = {
        "url": SITES[site][1] + path,
        "locator": locator,
        "required_contents": {"exact_match": text},
    }
    return checks(["program_html"], pages=[page])


# --- what tasks are about ---


@functools.cache
def rows(sql: str) -> list[Case]:
    database = sqlite3.connect(":memory:")
    database.deserialize(seed())
    database.row_factory = sqlite3.Row
    found = [dict(row) for row in database.execute(sql)]
    database.close()
    return found


def pick(case: Case, purpose: str, options) -> str:
    """Something of its own for every case, the same each time."""
    return random.Random(f"{purpose} {case['key']}").choice(options)


def products(where: str = "true") -> list[Case]:
    return [row | {"key": row["name"]} for row in rows(f"select * from products where {where}")]


def cases_of(sql: str, key: str, **extra: Callable[[Case], object]) -> Callable[[], list[Case]]:
    """Rows of a query; `extra` are more fields, each made from those before it."""

    def cases() -> list[Case]:
        found = []
        for row in rows(sql):
            case = dict(row)
            case["key"] = key.format(**case)
            for name, make in extra.items():
                case[name] = make(case)
            found.append(case)
        return found

    return cases


def dollars(case: Case) -> str:
    return f"${case['price'] // 100}.{case['price'] % 100:02}"


PRODUCTS = "select * from products"
REVIEWED = (
    "select products.*, author, stars from reviews join products on product = products.id "
    "where status = 'approved' group by product"
)
MINE = "select * from orders where customer = 1"
POSTS = "select * from posts"
ISSUES = (
    "select projects.id, path, number, title, state, label, assignee, issues.author from issues "
    "join projects on project = projects.id where number = 1 + (projects.id % 6)"
)
SAID_OF_PRODUCTS = (
    "Just what I needed.",
    "Too heavy for me.",
    "My sister loves it.",
    "The box was damaged.",
    "It does its job.",
    "Better than the old one.",
)
COMMENTS = (
    "I never tried that.",
    "Good question.",
    "Please tell us more.",
    "That helped me a lot.",
    "I see it the other way.",
)
TITLES = ("A question", "Something new", "Help wanted", "Looking for company", "A small report")
TEXTS = (
    "What do you think of it?",
    "I start next week.",
    "Who would like to join?",
    "It went better than hoped.",
)
BUGS = (
    "Build fails",
    "Button does nothing",
    "Login loop",
    "Wrong total",
    "Empty page",
    "Tests are slow",
)
BODIES = ("It happens every time.", "Since the last update.", "Only on Mondays.")


def categories() -> list[Case]:
    found = []
    for number, name in enumerate(CATALOGUE):
        wares = sorted(products(f"category = '{name}'"), key=lambda case: case["price"])
        found.append(
            {
                "id": number,
                "key": name,
                "name": name,
                "low": wares[0]["name"],
                "high": wares[-1]["name"],
            }
        )
    return found


def unsold() -> list[Case]:
    things = [thing for part in CATALOGUE.values() for thing in part.split(", ")]
    sold = {case["name"] for case in products()}
    names = [f"{LOOKS[7 * i % len(LOOKS)]} {thing.title()}" for i, thing in enumerate(things)]
    return [
        {"id": i, "key": name, "name": name} for i, name in enumerate(names) if name not in sold
    ]


def forums() -> list[Case]:
    found = []
    for number, name in enumerate(FORUMS):
        top = max(rows(f"select * from posts where forum = '{name}'"), key=lambda p: p["score"])
        case = {"id": number, "key": name, "forum": name, "post": top["id"], "title": top["title"]}
        found.append(case)
    return found


def new_posts() -> list[Case]:
    """Three a forum, of its split."""
    return [
        case | {"key": f"{case['forum']} {title}", "title": title, "body": text}
        for case in forums()
        for title, text in zip(
            TITLES, random.Random(case["forum"]).sample(TEXTS * 2, 5), strict=True
        )
    ]


def phones() -> list[Case]:
    numbers = random.Random("phones").sample(range(10**4), 60)
    return [
        {"id": i, "key": f"555-{number:04}", "phone": f"555-{number:04}"}
        for i, number in enumerate(numbers)
    ]


def invitations() -> list[Case]:
    found = []
    for project in rows("select * from projects"):
        members = {row["user"] for row in rows(f"select user from members where project = {project['id']}")}  # fmt: skip
        others = [
            row["name"] for row in rows("select name from users") if row["name"] not in members
        ]
        case = project | {"key": project["path"]}
        found.append(case | {"user": pick(case, "user", others), "role": pick(case, "role", ROLES)})
    return found


def shared_projects() -> list[Case]:
    return [
        project | {"key": project["path"], "forum": list(FORUMS)[project["id"] % len(FORUMS)]}
        for project in rows("select * from projects")
    ]


# --- ways ---


def to_product(s: Sight, c: Case) -> Advice | None:
    return s.click("link", c["name"]) or s.search("products", c["name"]) or s.go("shop")


def to_post(s: Sight, c: Case) -> Advice | None:
    return s.click("link", c["title"]) or s.search("posts", c["title"]) or s.go("forum")


def to_forum(s: Sight, c: Case) -> Advice | None:
    return s.click("link", f"f/{c['forum']}") or s.menu("forum", "Forums")


def to_project(s: Sight, c: Case) -> Advice | None:
    return s.click("link", c["path"]) or s.search("projects", c["path"]) or s.go("code")


def in_project(s: Sight, c: Case, *ways: Advice | None) -> Advice | None:
    """Whichever way is open inside the project's pages; else to the project."""
    is_inside = s.url.startswith(f"{SITES['code'][2]}/{c['path']}")
    return (is_inside and next(filter(None, ways), None)) or to_project(s, c)


def in_cms(s: Sight, menu: str, what: str, name: str, link: str) -> Advice:
    """Open an entry of one of the CMS's lists, through its search box."""
    is_there = s.at("cms", f"/{menu.lower()}")
    return (
        (is_there and (s.click("link", link) or s.search(what, name)))
        or (s.url.startswith(SITES["cms"][2]) and s.click("link", menu))
        or s.go("cms")
    )


def first(*ways: Advice | None) -> Advice | None:
    return next(filter(None, ways), None)


# --- experts ---


def product_price(s: Sight, c: Case):
    if s.at("shop", f"/product/{c['id']}"):
        return stop(dollars(c))
    return to_product(s, c)


def cheapest(s: Sight, c: Case):
    path = f"/category/{c['name']}"
    if s.url == SITES["shop"][2] + path + "?sort=low":
        return stop(c["low"])
    if s.at("shop", path):
        return s.click("link", "Lowest price first")
    return (s.at("shop", "/") and s.click("link", c["name"])) or s.menu("shop", "Home")


def dearest(s: Sight, c: Case):
    path = f"/category/{c['name']}"
    if s.url == SITES["shop"][2] + path + "?sort=high":
        return s.click("link", c["high"])
    if s.find("heading", c["high"]):
        return done()
    if s.at("shop", path):
        return s.click("link", "Highest price first")
    return (s.at("shop", "/") and s.click("link", c["name"])) or s.menu("shop", "Home")


def review_author(s: Sight, c: Case):
    if s.at("shop", f"/product/{c['id']}"):
        return stop(c["author"])
    return to_product(s, c)


def my_order(s: Sight, c: Case):
    if s.at("shop", f"/order/{c['id']}"):
        return stop(c["status"])
    return (
        s.click("link", f"Order {c['id']}")
        or s.next_page("shop", "/orders")
        or s.menu("shop", "My orders")
    )


def show_product(s: Sight, c: Case):
    return done() if s.at("shop", f"/product/{c['id']}") else to_product(s, c)


def not_sold(s: Sight, c: Case):
    if s.find("heading", f"Results for {c['name']}"):
        return stop("N/A", f"There is no {c['name']}.")
    return s.search("products", c["name"]) or s.go("shop")


def add_to_cart(s: Sight, c: Case):
    held = s.query("select quantity from cart where product = ?", c["id"])
    if held and held[0]["quantity"] == c["count"]:
        return done()
    if held:
        return s.click("button", f"Remove {c['name']}") or s.menu("shop", "Cart")
    if s.at("shop", f"/product/{c['id']}"):
        return s.fill("Quantity", str(c["count"])) or s.click("button", "Add to cart")
    return to_product(s, c)


def add_to_wishes(s: Sight, c: Case):
    if s.holds("select * from wishes where product = ?", c["id"]):
        return done()
    on_page = s.at("shop", f"/product/{c['id']}")
    return (on_page and s.click("button", "Add to wish list")) or to_product(s, c)


def write_review(s: Sight, c: Case):
    sql = "select * from reviews where product = ? and stars = ? and text = ?"
    if s.holds(sql, c["id"], c["stars"], c["text"]):
        return done()
    if s.at("shop", f"/product/{c['id']}/review"):
        return first(
            s.choose("Stars", str(c["stars"])),
            s.fill("Review", c["text"]),
            s.click("button", "Send review"),
        )
    on_page = s.at("shop", f"/product/{c['id']}")
    return (on_page and s.click("link", "Write a review")) or to_product(s, c)


def change_phone(s: Sight, c: Case):
    if s.holds("select * from customers where id = 1 and phone = ?", c["phone"]):
        return done()
    if s.at("shop", "/account"):
        return s.fill("Phone", c["phone"]) or s.click("button", "Save")
    return s.menu("shop", "My account")


def customer_email(s: Sight, c: Case):
    if s.at("cms", f"/customer/{c['id']}"):
        return stop(c["email"])
    return in_cms(s, "Customers", "customers", c["name"], c["name"])


def stock(s: Sight, c: Case):
    if s.at("cms", f"/product/{c['id']}"):
        return stop(str(c["stock"]))
    return in_cms(s, "Products", "products", c["name"], c["name"])


def set_price(s: Sight, c: Case):
    if s.holds("select * from products where id = ? and price = ?", c["id"], c["cents"]):
        return done()
    if s.at("cms", f"/product/{c['id']}"):
        return s.fill("Price", c["new"]) or s.click("button", "Save")
    return in_cms(s, "Products", "products", c["name"], c["name"])


def set_status(s: Sight, c: Case):
    if s.holds("select * from orders where id = ? and status = ?", c["id"], c["new"]):
        return done()
    if s.at("cms", f"/order/{c['id']}"):
        return s.choose("Status", c["new"]) or s.click("button", "Save")
    return in_cms(s, "Orders", "orders", str(c["id"]), f"Order {c['id']}")


def approve_review(s: Sight, c: Case):
    if s.holds("select * from reviews where id = ? and status = 'approved'", c["review"]):
        return done()
    if s.at("cms", f"/review/{c['review']}"):
        return s.click("button", "Approve")
    return in_cms(s, "Reviews", "reviews", c["name"], f"pending: 3 stars for {c['name']}")


def rename_page(s: Sight, c: Case):
    if s.holds("select * from pages where id = ? and title = ?", c["id"], c["new"]):
        return done()
    if s.at("cms", f"/page/{c['id']}"):
        return s.fill("Title", c["new"]) or s.click("button", "Save")
    return in_cms(s, "Pages", "pages", c["title"], c["title"])


def post_author(s: Sight, c: Case):
    if s.at("forum", f"/f/{c['forum']}/{c['id']}"):
        return stop(c["author"])
    return to_post(s, c)


def top_post(s: Sight, c: Case):
    path = f"/f/{c['forum']}"
    if s.at("forum", f"{path}/{c['post']}"):
        return done()
    if s.url == SITES["forum"][2] + path + "?sort=top":
        return s.first_link("Top posts")
    return (s.at("forum", path) and s.click("link", "Top posts")) or to_forum(s, c)


def new_post(s: Sight, c: Case):
    made = s.query("select * from posts where author = 'nora' and forum = ? and title = ? and body = ?", c["forum"], c["title"], c["body"])  # fmt: skip
    path = f"/f/{c['forum']}"
    if made:
        return done() if s.at("forum", f"{path}/{made[0]['id']}") else to_post(s, c)
    if s.at("forum", f"{path}/new"):
        return first(
            s.fill("Title", c["title"]), s.fill("Text", c["body"]), s.click("button", "Create post")
        )
    return (s.at("forum", path) and s.click("link", "New post")) or to_forum(s, c)


def upvote(s: Sight, c: Case):
    if s.holds("select * from votes where post = ? and value = 1", c["id"]):
        return done()
    on_page = s.at("forum", f"/f/{c['forum']}/{c['id']}")
    return (on_page and s.click("button", "Upvote")) or to_post(s, c)


def add_comment(s: Sight, c: Case):
    if s.holds("select * from comments where post = ? and text = ?", c["id"], c["text"]):
        return done()
    if s.at("forum", f"/f/{c['forum']}/{c['id']}"):
        return s.fill("Comment", c["text"]) or s.click("button", "Add comment")
    return to_post(s, c)


def subscribe(s: Sight, c: Case):
    if s.holds("select * from subscriptions where forum = ?", c["forum"]):
        return done()
    at_forum = s.at("forum", f"/f/{c['forum']}")
    return (at_forum and s.click("button", "Subscribe")) or to_forum(s, c)


def set_bio(s: Sight, c: Case):
    if s.holds("select * from users where name = ? and bio = ?", c["name"], c["bio"]):
        return done()
    if s.at("forum", "/profile"):
        return s.fill("Biography", c["bio"]) or s.click("button", "Save")
    if s.at("forum", "/login"):
        return first(
            s.fill("Username", c["name"]),
            s.fill("Password", PASSWORD),
            s.click("button", "Log in"),
        )
    return s.menu("forum", "My profile")


def assignee(s: Sight, c: Case):
    if s.at("code", f"/{c['path']}/issues/{c['number']}"):
        return stop(c["assignee"])
    return in_project(s, c, s.click("link", c["title"]), s.click("link", "Issues"))


def star_count(s: Sight, c: Case):
    if s.at("code", f"/{c['path']}"):
        return stop(str(c["stars"]))
    return to_project(s, c)


def new_issue(s: Sight, c: Case):
    sql = "select * from issues where project = ? and title = ? and label = ? and body = ?"
    if s.holds(sql, c["id"], c["title"], c["label"], c["body"]):
        return done()
    if s.at("code", f"/{c['path']}/issues/new"):
        return first(
            s.fill("Title", c["title"]),
            s.choose("Label", c["label"]),
            s.fill("Description", c["body"]),
            s.click("button", "Create issue"),
        )
    return in_project(s, c, s.click("link", "New issue"), s.click("link", "Issues"))


def close_issue(s: Sight, c: Case):
    sql = "select * from issues where project = ? and number = ? and state = 'closed'"
    if s.holds(sql, c["id"], c["number"]):
        return done()
    if s.at("code", f"/{c['path']}/issues/{c['number']}"):
        return s.click("button", "Close issue")
    return in_project(s, c, s.click("link", c["title"]), s.click("link", "Issues"))


def star(s: Sight, c: Case):
    if s.holds("select * from stars where project = ?", c["id"]):
        return done()
    on_page = s.at("code", f"/{c['path']}")
    return (on_page and s.click("button", "Star")) or to_project(s, c)


def invite(s: Sight, c: Case):
    sql = "select * from members where project = ? and user = ? and role = ?"
    if s.holds(sql, c["id"], c["user"], c["role"]):
        return done()
    if s.at("code", f"/{c['path']}/members"):
        return first(
            s.fill("Username", c["user"]), s.choose("Role", c["role"]), s.click("button", "Invite")
        )
    return in_project(s, c, s.click("link", "Members"))


def share(s: Sight, c: Case):
    """Read the project's page, then write the post: two sites."""
    path = f"/f/{c['forum']}"
    made = s.query("select * from posts where title = ? and body = ? and forum = ?", c["path"], c["about"], c["forum"])  # fmt: skip
    if made:
        at_post = s.at("forum", f"{path}/{made[0]['id']}")
        return done() if at_post else to_post(s, {"title": c["path"]})
    if s.at("forum", f"{path}/new"):
        return first(
            s.fill("Title", c["path"]), s.fill("Text", c["about"]), s.click("button", "Create post")
        )
    if s.at("code", f"/{c['path']}"):
        url = SITES["forum"][2]
        return f"It says: {c['about']} I go to {url}.", f"goto [{url}]"
    if s.url.startswith(SITES["forum"][2]):
        return (s.at("forum", path) and s.click("link", "New post")) or to_forum(s, c)
    return to_project(s, c)


# --- templates ---

# fmt: off
TEMPLATES = (
    Template("price", "shop",
        ("What is the price of the {name}?", "How much does the {name} cost?", "Tell me what I would pay for one {name}."),
        cases_of(PRODUCTS, "{name}"), lambda c: mentions(dollars(c)), product_price, changes=False),
    Template("cheapest", "shop",
        ("What is the cheapest product in {name}?", "Which product in {name} has the lowest price?", "Name the least expensive product of the category {name}."),
        categories, lambda c: says(c["low"]), cheapest, changes=False),
    Template("dearest", "shop",
        ("Show me the most expensive product in {name}.", "Open the page of the product in {name} with the highest price.", "Bring up whatever costs most in the category {name}."),
        categories, lambda c: is_at("shop", f"/product/{products(f'''name = '{c['high']}' ''')[0]['id']}"), dearest, changes=False),
    Template("reviewer", "shop",
        ("Who gave the {name} {stars} stars?", "Which customer's review of the {name} has {stars} stars?", "Name the author of the {stars} star review of the {name}."),
        cases_of(REVIEWED, "{name}"), lambda c: says(c["author"]), review_author, changes=False),
    Template("my-order", "shop",
        ("What is the status of my order {id}?", "How far is my order {id}?", "Look up the state of order {id} for me."),
        cases_of(MINE, "{id}"), lambda c: says(c["status"]), my_order, changes=False),
    Template("show-product", "shop",
        ("Show me the {name}.", "Open the page of the {name}.", "Bring up the {name} in the shop."),
        cases_of(PRODUCTS, "{name}"), lambda c: is_at("shop", f"/product/{c['id']}"), show_product, changes=False),
    Template("not-sold", "shop",
        ("What is the price of the {name}? Answer N/A if it is not sold.", "How much is the {name}? If there is none, answer N/A.", "Tell me the price of one {name}, or N/A where the shop has none."),
        unsold, lambda c: says("N/A"), not_sold, changes=False),
    Template("cart", "shop",
        ("Add {count} of the {name} to my cart.", "Put {count} of the {name} into my cart.", "I want {count} of the {name} in the cart."),
        cases_of(PRODUCTS, "{name}", count=lambda c: pick(c, "count", range(2, 10))),
        lambda c: has("shop", "/cart", f"#item-{c['id']}", "outerText", f"{c['count']} x {c['name']}"), add_to_cart),
    Template("wish", "shop",
        ("Add the {name} to my wish list.", "Put the {name} on my wish list.", "I wish for the {name}: note it on the list."),
        cases_of(PRODUCTS, "{name}"), lambda c: shows("shop", "/wishlist", c["name"]), add_to_wishes),
    Template("review", "shop",
        ('Review the {name} with {stars} stars and the text "{text}"', 'Give the {name} {stars} stars and write "{text}"', 'Write "{text}" as a review of the {name}, with {stars} stars.'),
        cases_of(PRODUCTS, "{name}", stars=lambda c: pick(c, "stars", range(1, 6)), text=lambda c: pick(c, "text", SAID_OF_PRODUCTS)),
        lambda c: shows("shop", f"/product/{c['id']}", f"{c['stars']} stars from Nora Lind: {c['text']}"), write_review),
    Template("phone", "shop",
        ("Change my phone number to {phone}.", "My new phone number is {phone}: update my account.", "Set the phone of my account to {phone}."),
        phones, lambda c: has("shop", "/account", '[name="phone"]', "value", c["phone"]), change_phone),
    Template("email", "cms",
        ("What is the email of the customer {name}?", "Under which email is {name} registered?", "Give me the email address of {name}."),
        cases_of("select * from customers where id > 1", "{name}"), lambda c: says(c["email"]), customer_email, changes=False),
    Template("stock", "cms",
        ("How many of the {name} are in stock?", "What is the stock of the {name}?", "Count what is left of the {name}."),
        cases_of(PRODUCTS, "{name}"), lambda c: says(str(c["stock"])), stock, changes=False),
    Template("set-price", "cms",
        ("Set the price of the {name} to {new}.", "Change the price of the {name} to {new}.", "The {name} must cost {new} from now on."),
        cases_of(PRODUCTS, "{name}", cents=lambda c: pick(c, "price", range(12_050, 20_000, 50)), new=lambda c: f"{c['cents'] // 100}.{c['cents'] % 100:02}"),
        lambda c: has("cms", f"/product/{c['id']}", '[name="price"]', "value", c["new"]), set_price),
    Template("set-status", "cms",
        ("Set the status of order {id} to {new}.", "Change order {id} to {new}.", "Order {id} is {new} now: update it."),
        cases_of("select * from orders", "{id}", new=lambda c: pick(c, "status", [s for s in STATUSES if s != c["status"]])),
        lambda c: has("cms", f"/order/{c['id']}", '[name="status"]', "value", c["new"]), set_status),
    Template("approve", "cms",
        ("Approve the pending review of the {name}.", "Let the pending review of the {name} appear.", "A review of the {name} is pending: approve it."),
        cases_of("select products.*, reviews.id as review, author from reviews join products on product = products.id where status = 'pending'", "{name}"),
        lambda c: shows("shop", f"/product/{c['id']}", f"3 stars from {c['author']}"), approve_review),
    Template("rename", "cms",
        ("Rename the page {title} to {new}.", "Change the title of the page {title} to {new}.", "The page {title} must be called {new}."),
        cases_of("select * from pages", "{title}", new=lambda c: f"{pick(c, 'title', ('All about', 'More on', 'Facts on'))} {c['title'].lower()}"),
        lambda c: has("cms", f"/page/{c['id']}", '[name="title"]', "value", c["new"]), rename_page),
    Template("author", "forum",
        ('Who wrote the post "{title}"?', 'Which user posted "{title}"?', 'Name the author of "{title}".'),
        cases_of(POSTS, "{title}"), lambda c: says(c["author"]), post_author, changes=False),
    Template("top-post", "forum",
        ("Open the top post of f/{forum}.", "Show me the post in f/{forum} with the most points.", "Bring up the best rated post of f/{forum}."),
        forums, lambda c: is_at("forum", f"/f/{c['forum']}/{c['post']}"), top_post, changes=False),
    Template("post", "forum",
        ('Post in f/{forum} with the title "{title}" and the text "{body}"', 'Create a post in f/{forum}: title "{title}", text "{body}"', 'Write "{body}" in f/{forum} under the title "{title}"'),
        new_posts, lambda c: shows("forum", "", f"Posted by nora in f/{c['forum']}", c["title"], c["body"], last=True), new_post),
    Template("upvote", "forum",
        ('Upvote the post "{title}".', 'Give the post "{title}" an upvote.', 'Vote for "{title}".'),
        cases_of(POSTS, "{title}"), lambda c: shows("forum", f"/f/{c['forum']}/{c['id']}", "your vote 1"), upvote),
    Template("comment", "forum",
        ('Comment "{text}" on the post "{title}".', 'Add the comment "{text}" to the post "{title}".', 'Answer the post "{title}" with "{text}"'),
        cases_of(POSTS, "{title}", text=lambda c: pick(c, "comment", COMMENTS)),
        lambda c: shows("forum", f"/f/{c['forum']}/{c['id']}", f"nora says: {c['text']}"), add_comment),
    Template("subscribe", "forum",
        ("Subscribe to f/{forum}.", "Make me a subscriber of f/{forum}.", "I want to follow f/{forum}: subscribe."),
        forums, lambda c: shows("forum", f"/f/{c['forum']}", "Unsubscribe"), subscribe),
    Template("bio", "forum",
        (f'Log in as {{name}} with the password {PASSWORD} and change the biography to "{{bio}}"', f'Sign in (user {{name}}, password {PASSWORD}) and set the biography to "{{bio}}"', f'Be {{name}}, password {PASSWORD}, and write "{{bio}}" as biography.'),
        cases_of("select rowid as id, name from users where name != 'nora'", "{name}", bio=lambda c: pick(c, "bio", ("I like tea.", "Away until May.", "Ask me about boats.", "New in town."))),
        lambda c: has("forum", "/profile", '[name="bio"]', "value", c["bio"]), set_bio, signed_in=False),
    Template("assignee", "code",
        ('Who is assigned to the issue "{title}" of {path}?', 'Which user takes care of the issue "{title}" in {path}?', 'Name the assignee of "{title}" in the project {path}.'),
        cases_of(ISSUES, "{path}"), lambda c: says(c["assignee"]), assignee, changes=False),
    Template("stars", "code",
        ("How many stars has {path}?", "What is the number of stars of {path}?", "Count the stars of the project {path}."),
        cases_of("select * from projects", "{path}"), lambda c: says(str(c["stars"])), star_count, changes=False),
    Template("issue", "code",
        ('Create the issue "{title}" in {path} with the label {label} and the description "{body}"', 'Open an issue in {path}: title "{title}", label {label}, description "{body}"', 'Report "{title}" to {path}, labelled {label}, described as "{body}"'),
        cases_of("select * from projects", "{path}", title=lambda c: pick(c, "bug", BUGS), label=lambda c: pick(c, "label", LABELS[1:]), body=lambda c: pick(c, "body", BODIES)),
        lambda c: shows("code", f"/{c['path']}/issues/7", c["title"], f"Label: {c['label']}", c["body"]), new_issue),
    Template("close", "code",
        ('Close the issue "{title}" of {path}.', 'The issue "{title}" in {path} is solved: close it.', 'Mark "{title}" in the project {path} as closed.'),
        cases_of("select projects.id, path, number, title from issues join projects on project = projects.id where state = 'open' group by project", "{path}"),
        lambda c: shows("code", f"/{c['path']}/issues/{c['number']}", "State: closed"), close_issue),
    Template("star", "code",
        ("Star the project {path}.", "Give {path} a star.", "Add {path} to my starred projects."),
        cases_of("select * from projects", "{path}"), lambda c: shows("code", "/starred", c["path"]), star),
    Template("invite", "code",
        ("Invite {user} to {path} as {role}.", "Make {user} a {role} of {path}.", "Add the user {user} to the members of {path}, role {role}."),
        invitations, lambda c: shows("code", f"/{c['path']}/members", f"{c['user']} is {c['role']}"), invite),
    Template("share", "code",
        ('Post in f/{forum} at http://forum.test with the title "{path}", and as text the description of the project {path}.', 'Tell f/{forum} at http://forum.test of {path}: its path is the title, its description the text.', 'Write a post in f/{forum} at http://forum.test; title "{path}", text what the project {path} says of itself.'),
        shared_projects, lambda c: shows("forum", "", f"Posted by nora in f/{c['forum']}", c["path"], c["about"], last=True), share, also=("forum",)),
)
# fmt: on


@dataclass(frozen=True)
class Task:
    split: str
    category: str  # "shop find", "shop change", ...
    config: dict  # WebArena's JSON
    template: Template
    case: Case


@functools.cache
def tasks() -> dict[str, Task]:
    """All tasks by id. Templates take turns, so the first k of a split are a fair sample of it."""
    ranked = []
    for number, template in enumerate(TEMPLATES):
        count = Counter()  # how many of this template each split has so far
        for key, task in _tasks_of(number, template):
            ranked.append((count[task.split], number, key, task))
            count[task.split] += 1
    return {key: task for _, _, key, task in sorted(ranked, key=lambda entry: entry[:3])}


def _tasks_of(number: int, template: Template) -> Iterator[tuple[str, Task]]:
    parts: dict[str, list[Case]] = {split: [] for split in SIZES}
    for case in template.cases():
        parts[("test", "train", "train", "train", "train", "dev")[case["id"] % 6]].append(case)
    for (split, size), intent in zip(SIZES.items(), template.intents, strict=True):
        chosen = random.Random(f"{template.name} {split}").sample(
            parts[split], min(size, len(parts[split]))
        )
        for case in chosen:
            key = f"{template.name}/{case['key'].lower().replace(' ', '-').replace('/', '.')}"
            kind = "change" if template.changes else "find"
            config = _config(number, template, case, intent)
            yield key, Task(split, f"{template.site} {kind}", config, template, case)


def _config(number: int, template: Template, case: Case, intent: str) -> dict:
    name, placeholder, _ = SITES[template.site]
    return {
        "sites": [name, *(SITES[site][0] for site in template.also)],
        "task_id": f"{template.name}/{case['key']}",
        "require_login": template.signed_in,
        "storage_state": None,
        "start_url": placeholder,
        "geolocation": None,
        "intent_template": intent,
        "instantiation_dict": case,
        "intent": intent.format(**case),
        "require_reset": False,
        "eval": template.check(case),
        "intent_template_id": number,
    }
