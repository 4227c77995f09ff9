"""
Four small sites in one Flask app: a shop, its CMS, a forum and a code host.

    Host names the site  ->  the path gets that site's prefix  ->  a route  ->  HTML without a script
    X-Episode names the data  ->  a copy of world.seed() that nobody else sees

    Markup helpers   link, listing, form: whatever a page is made of, escaped
    routes           by site; a change answers with a redirect, so that going back repeats nothing
    make_app, serve  the app, and a server for it on a thread

Pages are lean on purpose: a list shows PER_PAGE entries, so that all fits into one screen and a small
model can read it. What a user typed comes back escaped. Read world.py first, tasks.py next.
"""

import functools
import threading
from collections.abc import Callable
from urllib.parse import quote, urlencode

import waitress
from flask import Flask, Response, abort, g, redirect, request
from markupsafe import Markup

from envs.webarena_parts.world import (
    CATALOGUE,
    LABELS,
    ME,
    NOW,
    PASSWORD,
    ROLES,
    STATUSES,
    Databases,
)

HOSTS = {f"{site}.test": site for site in ("shop", "cms", "forum", "code")}
PER_PAGE = 8
MAX_TEXT = 2000  # characters kept of a form's field
NAMES = {"shop": "Corner Shop", "cms": "Shop Admin", "forum": "Town Forum", "code": "Code Host"}
MENUS = {
    "shop": {"Home": "/", "My orders": "/orders", "Cart": "/cart", "Wish list": "/wishlist", "My account": "/account"},
    "cms": {"Products": "/products", "Orders": "/orders", "Customers": "/customers", "Reviews": "/reviews", "Pages": "/pages"},
    "forum": {"Forums": "/", "My profile": "/profile"},
    "code": {"Projects": "/", "Starred": "/starred", "My issues": "/issues"},
}  # fmt: skip
SEARCHES = {"shop": "products", "forum": "posts", "code": "projects"}
STYLE = "body{font:13px/1.25 sans-serif;margin:6px}ul{padding:0;margin:4px 0}li{list-style:none}h1{font-size:15px;margin:4px 0}p{margin:3px 0}nav a,li a{margin-right:8px}form{margin:3px 0}"


# --- pages ---


def html(text: str, *values, **named) -> Markup:
    """HTML whose {} are filled with escaped text."""
    return Markup(text).format(*values, **named)


def joined(parts) -> Markup:
    return Markup("\n").join(parts)


def link(text: str, url: str) -> Markup:
    return html('<a href="{}">{}</a>', url, text)


def paragraph(text: str) -> Markup:
    return html("<p>{}</p>", text)


def button(text: str, url: str) -> Markup:
    """A button that changes something."""
    return html('<form method="post" action="{}"><button>{}</button></form>', url, text)


def field(label: str, name: str, value: str = "", kind: str = "text") -> Markup:
    if kind == "area":
        text = '<p><textarea name="{}" aria-label="{}" rows="2" cols="60">{}</textarea></p>'
        return html(text, name, label, value)
    text = '<p><input name="{}" aria-label="{}" type="{}" value="{}" size="40"></p>'
    return html(text, name, label, kind, value)


def choice(label: str, name: str, options, chosen: str = "") -> Markup:
    marks = joined(
        html("<option{}>{}</option>", Markup(" selected") if option == chosen else "", option)
        for option in options
    )
    return html('<p><select name="{}" aria-label="{}">{}</select></p>', name, label, marks)


def form(url: str, done: str, *fields: Markup) -> Markup:
    text = '<form method="post" action="{}">{}<button>{}</button></form>'
    return html(text, url, joined(fields), done)


def listing(rows: list, show: Callable, nothing: str = "Nothing here.") -> Markup:
    """The page of rows that ?page= asks for, with links to its neighbours."""
    number = min(max(given("page", 1, int), 1), max(-(-len(rows) // PER_PAGE), 1))
    shown = rows[(number - 1) * PER_PAGE : number * PER_PAGE]
    parts = [html("<ul>{}</ul>", joined(html("<li>{}</li>", show(row)) for row in shown))]
    for text, other in (("Previous page", number - 1), ("Next page", number + 1)):
        if 1 <= other <= -(-len(rows) // PER_PAGE):
            query = urlencode({**request.args, "page": other})
            parts.append(link(text, f"{site_path()}?{query}"))
    return joined(parts) if rows else paragraph(nothing)


def page(title: str, *blocks: Markup, status: int = 200) -> Response:
    site = g.site
    menu = [link(text, url) for text, url in MENUS[site].items()] if site != "cms" or g.user else []
    search = ""
    if site in SEARCHES:
        search = html(
            '<form action="/search"><input type="search" name="q" aria-label="Search {}"></form>',
            SEARCHES[site],
        )
    text = html(
        '<!doctype html><html lang="en"><head><title>{title} - {name}</title><style>{style}</style>'
        '<link rel="icon" href="data:,"></head><body><nav>{menu}</nav>{search}<main id="main">'
        '<h1 id="title">{title}</h1>{blocks}</main></body></html>',
        title=title,
        name=NAMES[site],
        style=Markup(STYLE),
        menu=joined(menu),
        search=search,
        blocks=joined(blocks),
    )
    return Response(text, status, {"Cache-Control": "no-store"})


def money(cents: int) -> str:
    return f"${cents // 100}.{cents % 100:02}"


# --- the request ---


def query(sql: str, *values) -> list:
    return g.database.execute(sql, values).fetchall()


def one(sql: str, *values):
    """The row there must be."""
    return (query(sql, *values) or abort(404))[0]


def given(name: str, default="", kind: type = str):
    """What the form or the address says, cut and of its type, or the default."""
    text = request.values.get(name, "").strip()[:MAX_TEXT]
    try:
        return kind(text[:9] if kind is int else text) if text else default
    except ValueError:
        return default


def site_path() -> str:
    return quote(request.path.removeprefix(f"/{g.site}") or "/")


def signed_in(route: Callable) -> Callable:
    """Visitors are sent to the log-in page first."""

    @functools.wraps(route)
    def guarded(*args, **values):
        return route(*args, **values) if g.user else redirect("/login")

    return guarded


# --- the shop ---


def add_shop(app: Flask) -> None:
    """Give the app the routes of shop.test: catalogue, search, cart, orders, reviews, wishes."""

    def product_row(row) -> Markup:
        return link(row["name"], f"/product/{row['id']}") + money(row["price"])

    @app.get("/shop/")
    def shop_home():
        return page(
            "Categories", listing_all(CATALOGUE, lambda name: link(name, f"/category/{name}"))
        )

    @app.get("/shop/category/<name>")
    def category(name: str):
        order = {"low": "price", "high": "price desc"}.get(given("sort"), "id")
        rows = query(f"select * from products where category = ? order by {order}", name)
        if not rows:
            abort(404)
        sorts = [link("Lowest price first", "?sort=low"), link("Highest price first", "?sort=high")]
        return page(name, *sorts, listing(rows, product_row))

    @app.get("/shop/search")
    def search_products():
        rows = query(
            "select * from products where instr(lower(name), lower(?)) order by id", given("q")
        )
        found = listing(rows, product_row, "No product is called that.")
        return page(f"Results for {given('q')}", found)

    @app.get("/shop/product/<int:number>")
    def product(number: int):
        row = one("select * from products where id = ?", number)
        reviews = query(
            "select * from reviews where product = ? and status = 'approved' order by id", number
        )
        add = form(f"/product/{number}/cart", "Add to cart", field("Quantity", "quantity", "1"))
        return page(
            row["name"],
            paragraph(f"Price: {money(row['price'])}"),
            add,
            button("Add to wish list", f"/product/{number}/wish"),
            link("Write a review", f"/product/{number}/review"),
            listing_all(
                reviews, lambda r: f"{r['stars']} stars from {r['author']}: {r['text'][:200]}"
            ),
        )

    @app.post("/shop/product/<int:number>/cart")
    @signed_in
    def add_to_cart(number: int):
        one("select * from products where id = ?", number)
        quantity = min(max(given("quantity", 1, int), 1), 99)
        query("insert into cart values (?, ?) on conflict do update set quantity = min(99, quantity + excluded.quantity)", number, quantity)  # fmt: skip
        return redirect("/cart")

    @app.post("/shop/product/<int:number>/wish")
    @signed_in
    def add_wish(number: int):
        one("select * from products where id = ?", number)
        query("insert or ignore into wishes values (?)", number)
        return redirect("/wishlist")

    @app.route("/shop/product/<int:number>/review", methods=["GET", "POST"])
    @signed_in
    def write_review(number: int):
        row = one("select * from products where id = ?", number)
        if request.method == "GET":
            stars = choice("Stars", "stars", "54321", "5")
            return page(f"Review of {row['name']}", form(f"/product/{number}/review", "Send review", stars, field("Review", "text", kind="area")))  # fmt: skip
        name = one("select name from customers where id = ?", int(g.user))["name"]
        stars = min(max(given("stars", 5, int), 1), 5)
        query("insert into reviews values (null, ?, ?, ?, ?, 'approved')", number, name, stars, given("text"))  # fmt: skip
        return redirect(f"/product/{number}")

    @app.get("/shop/cart")
    @signed_in
    def cart():
        rows = query("select * from cart join products on product = id")
        total = paragraph(f"Total: {money(sum(r['price'] * r['quantity'] for r in rows))}")
        shown = listing(
            rows,
            lambda r: (
                html('<span id="item-{}">{} x {}</span>', r["id"], r["quantity"], r["name"])
                + button(f"Remove {r['name']}", f"/cart/{r['id']}")
            ),
        )
        return page("Cart", shown, *([total, button("Place order", "/cart/order")] if rows else []))

    @app.post("/shop/cart/<int:number>")
    @signed_in
    def remove(number: int):
        query("delete from cart where product = ?", number)
        return redirect("/cart")

    @app.post("/shop/cart/order")
    @signed_in
    def place_order():
        if not query("select * from cart"):
            return redirect("/cart")
        query("insert into orders values (null, ?, ?, 'pending')", int(g.user), NOW)
        number = one("select max(id) as id from orders")["id"]
        query("insert into items select ?, product, quantity from cart", number)
        query("delete from cart")
        return redirect(f"/order/{number}")

    @app.get("/shop/orders")
    @signed_in
    def my_orders():
        rows = query("select * from orders where customer = ? order by id desc", int(g.user))
        return page(
            "My orders",
            listing(rows, lambda r: link(f"Order {r['id']}", f"/order/{r['id']}") + r["date"]),
        )

    @app.get("/shop/order/<int:number>")
    @signed_in
    def my_order(number: int):
        row = one("select * from orders where id = ? and customer = ?", number, int(g.user))
        return page(f"Order {number}", *order_lines(row))

    @app.get("/shop/wishlist")
    @signed_in
    def wishlist():
        return page(
            "Wish list", listing(query("select * from wishes join products on product = id"), product_row)
        )  # fmt: skip

    @app.route("/shop/account", methods=["GET", "POST"])
    @signed_in
    def account():
        if request.method == "POST":
            query("update customers set phone = ?, city = ? where id = ?", given("phone"), given("city"), int(g.user))  # fmt: skip
            return redirect("/account")
        row = one("select * from customers where id = ?", int(g.user))
        fields = field("Phone", "phone", row["phone"]), field("City", "city", row["city"])
        return page("My account", paragraph(row["name"]), form("/account", "Save", *fields))


def listing_all(rows, show: Callable) -> Markup:
    return html("<ul>{}</ul>", joined(html("<li>{}</li>", show(row)) for row in rows))


def order_lines(row) -> list[Markup]:
    items = query("select * from items join products on product = id where order_id = ?", row["id"])
    total = sum(item["price"] * item["quantity"] for item in items)
    return [
        paragraph(f"Status: {row['status']}"),
        paragraph(f"Date: {row['date']}"),
        listing_all(items, lambda item: f"{item['quantity']} x {item['name']}"),
        paragraph(f"Total: {money(total)}"),
    ]


# --- the shop's CMS ---


def add_cms(app: Flask) -> None:
    """Those of cms.test, the shop's administration: products, customers, orders, reviews, pages."""

    def search(what: str) -> Markup:
        return html('<form><input type="search" name="q" aria-label="Search {}"></form>', what)

    def table(what: str, sql: str, show: Callable) -> Response:
        rows = query(sql, given("q"))
        return page(what.title(), search(what), listing(rows, show))

    @app.get("/cms/")
    @signed_in
    def cms_home():
        counts = [
            (name, one(f"select count(*) as n from {name}")["n"])
            for name in ("products", "orders", "customers", "reviews", "pages")
        ]
        return page("Dashboard", listing_all(counts, lambda pair: f"{pair[1]} {pair[0]}"))

    @app.get("/cms/products")
    @signed_in
    def products():
        sql = "select * from products where instr(lower(name), lower(?)) order by id"
        return table(
            "products", sql, lambda r: link(r["name"], f"/product/{r['id']}") + f"{r['stock']} left"
        )

    @app.route("/cms/product/<int:number>", methods=["GET", "POST"])
    @signed_in
    def edit_product(number: int):
        row = one("select * from products where id = ?", number)
        if request.method == "POST":
            price = round(100 * min(max(given("price", row["price"] / 100, float), 0), 10**6))
            stock = min(max(given("stock", row["stock"], int), 0), 10**6)
            query("update products set name = ?, price = ?, stock = ? where id = ?", given("name", row["name"]), price, stock, number)  # fmt: skip
            return redirect(f"/product/{number}")
        fields = (
            field("Name", "name", row["name"]),
            field("Price", "price", money(row["price"])[1:]),
            field("Stock", "stock", str(row["stock"])),
        )
        return page(row["name"], form(f"/product/{number}", "Save", *fields))

    @app.get("/cms/orders")
    @signed_in
    def orders():
        sql = "select * from orders where instr(id, ?) order by id desc"
        return table(
            "orders", sql, lambda r: link(f"Order {r['id']}", f"/order/{r['id']}") + r["status"]
        )

    @app.route("/cms/order/<int:number>", methods=["GET", "POST"])
    @signed_in
    def edit_order(number: int):
        row = one("select * from orders where id = ?", number)
        if request.method == "POST":
            if given("status") in STATUSES:
                query("update orders set status = ? where id = ?", given("status"), number)
            return redirect(f"/order/{number}")
        name = one("select name from customers where id = ?", row["customer"])["name"]
        edit = form(f"/order/{number}", "Save", choice("Status", "status", STATUSES, row["status"]))
        return page(f"Order {number}", paragraph(f"Customer: {name}"), *order_lines(row), edit)

    @app.get("/cms/customers")
    @signed_in
    def customers():
        sql = "select * from customers where instr(lower(name), lower(?)) order by id"
        return table(
            "customers", sql, lambda r: link(r["name"], f"/customer/{r['id']}") + r["city"]
        )

    @app.get("/cms/customer/<int:number>")
    @signed_in
    def customer(number: int):
        row = one("select * from customers where id = ?", number)
        orders = one("select count(*) as n from orders where customer = ?", number)["n"]
        facts = {
            "Email": row["email"],
            "Phone": row["phone"],
            "City": row["city"],
            "Orders": orders,
        }
        return page(row["name"], *(paragraph(f"{name}: {fact}") for name, fact in facts.items()))

    @app.get("/cms/reviews")
    @signed_in
    def reviews():
        sql = (
            "select reviews.*, name from reviews join products on product = products.id where "
            "instr(lower(name), lower(?)) order by reviews.status desc, reviews.id"
        )
        return table(
            "reviews",
            sql,
            lambda r: link(
                f"{r['status']}: {r['stars']} stars for {r['name']}", f"/review/{r['id']}"
            ),
        )

    @app.get("/cms/review/<int:number>")
    @signed_in
    def review(number: int):
        row = one("select reviews.*, name from reviews join products on product = products.id where reviews.id = ?", number)  # fmt: skip
        lines = [f"Product: {row['name']}", f"Author: {row['author']}", f"Status: {row['status']}", row["text"]]  # fmt: skip
        changes = [
            button(text, f"/review/{number}/{text.lower()}") for text in ("Approve", "Delete")
        ]
        return page(f"Review {number}", *map(paragraph, lines), *changes)

    @app.post("/cms/review/<int:number>/<change>")
    @signed_in
    def change_review(number: int, change: str):
        if change == "approve":
            query("update reviews set status = 'approved' where id = ?", number)
            return redirect(f"/review/{number}")
        query("delete from reviews where id = ?", number)
        return redirect("/reviews")

    @app.get("/cms/pages")
    @signed_in
    def pages():
        return table(
            "pages",
            "select * from pages where instr(lower(title), lower(?)) order by id",
            lambda r: link(r["title"], f"/page/{r['id']}"),
        )

    @app.route("/cms/page/<int:number>", methods=["GET", "POST"])
    @signed_in
    def edit_page(number: int):
        row = one("select * from pages where id = ?", number)
        if request.method == "POST":
            query("update pages set title = ?, content = ? where id = ?", given("title", row["title"]), given("content"), number)  # fmt: skip
            return redirect(f"/page/{number}")
        fields = field("Title", "title", row["title"]), field("Content", "content", row["content"], "area")  # fmt: skip
        return page(f"Page {number}", form(f"/page/{number}", "Save", *fields))


# --- the forum ---


def add_forum(app: Flask) -> None:
    """Those of forum.test: forums, posts, votes, comments, subscriptions."""

    def post_url(row) -> str:
        return f"/f/{row['forum']}/{row['id']}"

    def post_row(row) -> Markup:
        return link(row["title"], post_url(row)) + f"{row['score']} points"

    @app.get("/forum/")
    def forums():
        rows = query("select forum from posts group by forum order by forum")
        return page(
            "Forums", listing_all(rows, lambda r: link(f"f/{r['forum']}", f"/f/{r['forum']}"))
        )

    @app.get("/forum/search")
    def search_posts():
        sql = "select * from posts where instr(lower(title), lower(?)) order by id"
        found = listing(query(sql, given("q")), post_row, "No post is called that.")
        return page(f"Results for {given('q')}", found)

    @app.get("/forum/f/<name>")
    def forum(name: str):
        order = {"top": "score desc"}.get(given("sort"), "date desc, id desc")
        rows = query(f"select * from posts where forum = ? order by {order}", name)
        if not rows:
            abort(404)
        is_in = query("select * from subscriptions where forum = ?", name)
        return page(
            f"f/{name}",
            button("Unsubscribe" if is_in else "Subscribe", f"/f/{name}/subscribe"),
            link("New post", f"/f/{name}/new"),
            link("Top posts", "?sort=top"),
            listing(rows, post_row),
        )

    @app.post("/forum/f/<name>/subscribe")
    @signed_in
    def subscribe(name: str):
        one("select * from posts where forum = ?", name)
        if query("select * from subscriptions where forum = ?", name):
            query("delete from subscriptions where forum = ?", name)
        else:
            query("insert into subscriptions values (?)", name)
        return redirect(f"/f/{name}")

    @app.route("/forum/f/<name>/new", methods=["GET", "POST"])
    @signed_in
    def new_post(name: str):
        one("select * from posts where forum = ?", name)
        if request.method == "GET" or not given("title"):
            fields = field("Title", "title"), field("Text", "body", kind="area")
            return page(f"New post in f/{name}", form(f"/f/{name}/new", "Create post", *fields))
        query("insert into posts values (null, ?, ?, ?, ?, 1, ?)", name, g.user, given("title"), given("body"), NOW)  # fmt: skip
        return redirect(f"/f/{name}/{one('select max(id) as id from posts')['id']}")

    @app.get("/forum/f/<name>/<int:number>")
    def post(name: str, number: int):
        row = one("select * from posts where id = ? and forum = ?", number, name)
        vote = (query("select value from votes where post = ?", number) or [{"value": 0}])[0][
            "value"
        ]
        comments = query("select * from comments where post = ? order by id", number)
        votes = [
            button(text, f"{post_url(row)}/vote/{way}")
            for text, way in (("Upvote", "up"), ("Downvote", "down"))
        ]
        write = form(
            f"{post_url(row)}/comment", "Add comment", field("Comment", "text", kind="area")
        )
        return page(
            row["title"],
            paragraph(f"Posted by {row['author']} in f/{name}"),
            paragraph(row["body"]),
            html('<p id="score">{} points, your vote {}</p>', row["score"] + vote, vote),
            *votes,
            listing_all(comments, lambda r: f"{r['author']} says: {r['text'][:300]}"),
            write,
        )

    @app.post("/forum/f/<name>/<int:number>/vote/<way>")
    @signed_in
    def vote(name: str, number: int, way: str):
        """The same button again takes a vote back."""
        row = one("select * from posts where id = ? and forum = ?", number, name)
        value = 1 if way == "up" else -1
        if query("select * from votes where post = ? and value = ?", number, value):
            query("delete from votes where post = ?", number)
        else:
            query("insert or replace into votes values (?, ?)", number, value)
        return redirect(post_url(row))

    @app.post("/forum/f/<name>/<int:number>/comment")
    @signed_in
    def comment(name: str, number: int):
        row = one("select * from posts where id = ? and forum = ?", number, name)
        if given("text"):
            query("insert into comments values (null, ?, ?, ?)", number, g.user, given("text"))
        return redirect(post_url(row))

    @app.route("/forum/profile", methods=["GET", "POST"])
    @signed_in
    def profile():
        if request.method == "POST":
            query("update users set bio = ? where name = ?", given("bio"), g.user)
            return redirect("/profile")
        bio = one("select bio from users where name = ?", g.user)["bio"]
        return page(f"u/{g.user}", form("/profile", "Save", field("Biography", "bio", bio, "area")))


# --- the code host ---


def add_code(app: Flask) -> None:
    """Those of code.test: projects, issues, stars, members."""

    def project_row(row) -> Markup:
        return link(row["path"], f"/{row['path']}") + f"{row['stars']} stars"

    def find(owner: str, name: str):
        return one("select * from projects where path = ?", f"{owner}/{name}")

    def listed(title: str, where: str, *values) -> Response:
        rows = query(f"select * from projects where {where} order by id", *values)
        return page(title, listing(rows, project_row))

    @app.get("/code/")
    def projects():
        return listed("Projects", "true")

    @app.get("/code/search")
    def search_projects():
        return listed(f"Results for {given('q')}", "instr(lower(path), lower(?))", given("q"))

    @app.get("/code/starred")
    @signed_in
    def starred():
        return listed("Starred", "id in (select project from stars)")

    @app.get("/code/issues")
    @signed_in
    def my_issues():
        rows = query(
            "select * from issues join projects on project = projects.id "
            "where assignee = ? order by issues.id",
            g.user,
        )
        return page("My issues", listing(rows, lambda r: link(r["title"], f"/{r['path']}/issues/{r['number']}")))  # fmt: skip

    @app.get("/code/<owner>/<name>")
    def project(owner: str, name: str):
        row = find(owner, name)
        is_starred = query("select * from stars where project = ?", row["id"])
        url = f"/{row['path']}"
        return page(
            row["path"],
            paragraph(row["about"]),
            paragraph(f"{row['stars'] + len(is_starred)} stars"),
            button("Unstar" if is_starred else "Star", f"{url}/star"),
            link("Issues", f"{url}/issues"),
            link("Members", f"{url}/members"),
        )

    @app.post("/code/<owner>/<name>/star")
    @signed_in
    def star(owner: str, name: str):
        row = find(owner, name)
        if query("select * from stars where project = ?", row["id"]):
            query("delete from stars where project = ?", row["id"])
        else:
            query("insert into stars values (?)", row["id"])
        return redirect(f"/{row['path']}")

    @app.get("/code/<owner>/<name>/issues")
    def issues(owner: str, name: str):
        row = find(owner, name)
        rows = query("select * from issues where project = ? order by number", row["id"])
        return page(
            f"Issues of {row['path']}",
            link("New issue", f"/{row['path']}/issues/new"),
            listing(
                rows,
                lambda r: (
                    link(r["title"], f"/{row['path']}/issues/{r['number']}")
                    + f"{r['state']}, {r['label']}"
                ),
            ),
        )

    @app.route("/code/<owner>/<name>/issues/new", methods=["GET", "POST"])
    @signed_in
    def new_issue(owner: str, name: str):
        row = find(owner, name)
        url = f"/{row['path']}/issues"
        if request.method == "GET" or not given("title"):
            fields = field("Title", "title"), choice("Label", "label", LABELS), field("Description", "body", kind="area")  # fmt: skip
            return page(f"New issue in {row['path']}", form(f"{url}/new", "Create issue", *fields))
        label = given("label") if given("label") in LABELS else LABELS[0]
        number = one("select max(number) + 1 as n from issues where project = ?", row["id"])["n"]
        query("insert into issues values (null, ?, ?, ?, ?, 'open', ?, ?, '')", row["id"], number, given("title"), given("body"), label, g.user)  # fmt: skip
        return redirect(f"{url}/{number}")

    @app.route("/code/<owner>/<name>/issues/<int:number>", methods=["GET", "POST"])
    def issue(owner: str, name: str, number: int):
        row = find(owner, name)
        found = one("select * from issues where project = ? and number = ?", row["id"], number)
        url = f"/{row['path']}/issues/{number}"
        if request.method == "POST" and g.user:
            state = "closed" if found["state"] == "open" else "open"
            query("update issues set state = ? where id = ?", state, found["id"])
            return redirect(url)
        lines = [
            f"State: {found['state']}",
            f"Label: {found['label']}",
            f"Author: {found['author']}",
            f"Assignee: {found['assignee'] or 'nobody'}",
            found["body"],
        ]
        text = "Close issue" if found["state"] == "open" else "Reopen issue"
        return page(found["title"], *map(paragraph, lines), button(text, url))

    @app.route("/code/<owner>/<name>/members", methods=["GET", "POST"])
    @signed_in
    def members(owner: str, name: str):
        row = find(owner, name)
        url, note = f"/{row['path']}/members", ""
        if request.method == "POST":
            is_user = query("select * from users where name = ?", given("user"))
            if is_user and given("role") in ROLES:
                query("insert or replace into members values (?, ?, ?)", row["id"], given("user"), given("role"))  # fmt: skip
                return redirect(url)
            note = paragraph("There is no such user.")
        rows = query("select * from members where project = ? order by rowid", row["id"])
        invite = form(url, "Invite", field("Username", "user"), choice("Role", "role", ROLES))
        return page(
            f"Members of {row['path']}",
            *([note] if note else []),
            listing_all(rows, lambda r: f"{r['user']} is {r['role']}"),
            invite,
        )


# --- logging in ---


def add_login(app: Flask) -> None:
    """The log-in pages of all four, and their sessions."""

    def user_called(site: str, name: str) -> str | None:
        """What a session stores of whoever logs in: the shop knows customers by email."""
        if site == "shop":
            rows = query("select id from customers where email = ?", name)
            return str(rows[0]["id"]) if rows else None
        if site == "cms":
            return name if name == "admin" else None
        return name if query("select * from users where name = ?", name) else None

    def login():
        note = []
        if request.method == "POST":
            user = user_called(g.site, given("user"))
            if user is not None and given("password") == PASSWORD:
                answer = redirect("/")
                count = one("select count(*) as n from sessions")["n"]
                token = f"session-{count}"  # ids are fixed; nobody else can reach this database
                query("insert into sessions values (?, ?, ?)", token, g.site, user)
                answer.set_cookie("session", token, httponly=True)
                return answer
            note = [paragraph("Wrong name or password.")]
        name = "Email" if g.site == "shop" else "Username"
        fields = field(name, "user"), field("Password", "password", kind="password")
        return page("Log in", *note, form("/login", "Log in", *fields))

    for site in NAMES:
        app.add_url_rule(f"/{site}/login", f"{site}_login", login, methods=["GET", "POST"])


# --- serving ---


def make_app(databases: Databases, hosts: dict[str, str] | None = None, episode: str = "") -> Flask:
    """The app. `hosts` maps a Host header to a site; requests that name no episode get `episode`."""
    hosts = HOSTS if hosts is None else hosts
    app = Flask(__name__, static_folder=None)
    app.url_map.strict_slashes = app.url_map.merge_slashes = False
    app.config["MAX_CONTENT_LENGTH"] = 2**16
    inner = app.wsgi_app

    def route_by_host(environ, start_response):
        site = hosts.get(environ.get("HTTP_HOST", ""), "nowhere")
        path = "/" + environ["PATH_INFO"].strip("/")
        environ["PATH_INFO"], environ["site"] = f"/{site}{path}", site
        return inner(environ, start_response)

    app.wsgi_app = route_by_host

    @app.before_request
    def open_database():
        found = databases.use(request.headers.get("X-Episode", episode))
        if request.environ["site"] not in NAMES or found is None:
            return Response("There is no such site.", 404)
        g.site, (g.database, g.lock) = request.environ["site"], found
        g.lock.acquire()
        token = request.cookies.get("session", "")
        rows = query("select user from sessions where token = ? and site = ?", token, g.site)
        g.user = rows[0]["user"] if rows else None
        return None

    @app.teardown_request
    def unlock(_):
        if "lock" in g:
            g.lock.release()

    @app.errorhandler(404)
    @app.errorhandler(405)
    @app.errorhandler(413)
    def not_found(error):
        return page("Page not found", status=error.code)

    for add in (add_shop, add_cms, add_forum, add_code, add_login):
        add(app)
    return app


def serve(app: Flask, host: str = "127.0.0.1") -> int:
    """Serve on a free port for as long as this process lives; returns the port."""
    server = waitress.create_server(app, host=host, port=0, threads=8, ident="sites")
    threading.Thread(target=server.run, name="webarena sites", daemon=True).start()
    return int(server.effective_port)


_started: list[tuple[Databases, int]] = []
_starting = threading.Lock()


def start() -> tuple[Databases, int]:
    """The data of all episodes of this process, and the port of its server; starts it once."""
    with _starting:
        if not _started:
            databases = Databases()
            _started.append((databases, serve(make_app(databases))))
        return _started[0]


def sessions(databases: Databases, episode: str) -> dict[str, str]:
    """Log the usual user in everywhere: {site: the token for its cookie}."""
    tokens = {}
    for number, (site, user) in enumerate({"shop": "1", "cms": "admin", "forum": ME, "code": ME}.items()):  # fmt: skip
        tokens[site] = f"session-{number}"
        databases.query(episode, "insert into sessions values (?, ?, ?)", tokens[site], site, user)
    return tokens
