"""
Web sites in a real browser: pages as numbered elements, actions as text, reward at the end.

    task -> WebArena's JSON -> Chromium -> accessibility tree -> text; action text -> mouse, keys -> page

    parse       WebArena's action grammar
    Bundled     four small sites that come with this file, data of its own for every episode
    Deployment  WebArena's sites, run by somebody, with WebArena's 812 tasks
    WebArena    the environment

Zhou et al. 2023 (WebArena, arXiv 2307.13854); AgentGym-RL (arXiv 2509.08755) trains on it. The rest lies in
webarena_parts/: browser.py (Chromium), scores.py (evaluators), world.py, sites.py and tasks.py (what is
bundled), deployment.py. Read envs/textcraft.py first. Try it, with Chromium installed:

    python -m pytest --doctest-modules envs/webarena.py
"""

import asyncio
import logging
import re
import secrets
from collections.abc import Iterator
from contextlib import suppress
from urllib.parse import urlsplit

import gymnasium as gym
from gymnasium.spaces import Text

from envs.webarena_parts import browser as chromium
from envs.webarena_parts import deployment, tasks
from envs.webarena_parts.browser import SECONDS, TYPED, BrowserDied, Element, Session
from envs.webarena_parts.scores import Judge, Scorer

SPLITS = ("train", "dev", "test")
MAX_LENGTH = 4000  # characters of an action
MAX_TEXT = 20_000  # and of an observation
TURN_SECONDS = 60.0  # for a whole turn; every wait within it ends sooner
SCORE_SECONDS = 120.0  # for the evaluators, which open pages of their own
PAUSE = 1.5  # seconds that a deployment's scripts get after an action, as in WebArena
CLICKED = {"link", "button", "checkbox", "radio", "option", "tab", "menuitem", "switch"}
# Everything of Unicode's basic plane that can be sent: real pages hold more than ASCII.
CHARACTERS = frozenset(
    map(chr, [9, 10, *range(32, 127), *range(160, 0xD800), *range(0xE000, 0xFFFE)])
)
log = logging.getLogger("webarena")


# --- the grammar ---


class Refused(Exception):
    """An action that can't be done. Its message is the next observation, and nothing changes."""


FORMS = {  # verb: how it is written, and a pattern of what follows it
    "click": ("click [id]", r"\[([0-9]{1,6})\]"),
    "type": ("type [id] [text] [1]", r"\[([0-9]{1,6})\]\s*\[(.*?)\](?:\s*\[([01])\])?"),
    "hover": ("hover [id]", r"\[([0-9]{1,6})\]"),
    "press": ("press [keys]", r"\[([\w+ -]{1,40})\]"),
    "scroll": ("scroll [down] or scroll [up]", r"\[(up|down)\]"),
    "new_tab": ("new_tab", ""),
    "tab_focus": ("tab_focus [index]", r"\[([0-9]{1,3})\]"),
    "close_tab": ("close_tab", ""),
    "goto": ("goto [url]", r"\[\s*(\S+?)\s*\]"),
    "go_back": ("go_back", ""),
    "go_forward": ("go_forward", ""),
    "stop": ("stop [answer]", r"(?:\[(.*)\])?"),
}


def parse(action: str) -> tuple[str, tuple[str, ...]]:
    """Read an action.

    >>> parse("type [7] [desk lamp] [0]")
    ('type', ('7', 'desk lamp', '0'))
    """
    if len(action) > MAX_LENGTH:
        raise Refused(f"An action has at most {MAX_LENGTH} characters.")
    found = re.fullmatch(r"`*\s*([A-Za-z_]+)\s*(.*?)\s*`*", action.strip(), re.DOTALL)
    verb = found[1].lower() if found else ""
    if verb not in FORMS:
        raise Refused(f"An action starts with {', '.join(FORMS)}.")
    form, pattern = FORMS[verb]
    rest = re.fullmatch(pattern, found[2], re.DOTALL | re.ASCII)
    if not rest:
        raise Refused(f"It is written {form}.")
    # Half a surrogate pair has no encoding, and a line end in a field would send its form.
    parts = ((part or "").encode(errors="replace").decode() for part in rest.groups())
    return verb, tuple(" ".join(part.splitlines()) for part in parts)


KEYS = {
    *(
        "Enter",
        "Tab",
        "Escape",
        "Backspace",
        "Delete",
        "Space",
        "Home",
        "End",
        "PageUp",
        "PageDown",
    ),
    *("ArrowUp", "ArrowDown", "ArrowLeft", "ArrowRight", "Control", "Shift", "Alt", "Meta"),
    *(f"F{number}" for number in range(1, 13)),
}
ALIASES = {"ctrl": "Control", "esc": "Escape", "cmd": "Meta", "return": "Enter"}
ALIASES |= {key.lower(): key for key in KEYS} | {
    key[5:].lower(): key for key in KEYS if key[:5] == "Arrow"
}


def read_keys(text: str) -> str:
    """Turn "ctrl+a" into Playwright's "Control+a"."""
    keys = [ALIASES.get(key.strip().lower(), key.strip()) for key in text.split("+")]
    for key in keys:
        if key not in KEYS and not (len(key) == 1 and key.isascii() and key.isalnum()):
            raise Refused(f"Keys are letters, digits or {', '.join(sorted(KEYS))}, joined by +.")
    return "+".join(keys)


# --- where tasks come from ---


class Bundled:
    """The sites of webarena_parts/sites.py: their hosts exist in our browser only."""

    pause = 0.0  # their pages hold no scripts: what has loaded is complete
    sites = {name: address for name, _, address in tasks.SITES.values()}

    def __init__(self):
        self.left_out: dict[str, int] = {}
        self._episode = ""

    def ids(self, split: str) -> list[str]:
        return [key for key, task in tasks.tasks().items() if task.split == split]

    def category(self, task: str) -> str | None:
        found = tasks.tasks().get(task)
        return found and found.category

    def config(self, task: str) -> dict:
        return deployment.with_addresses(tasks.tasks()[task].config, self.sites)

    def browser(self) -> chromium.Browser:
        from envs.webarena_parts import sites

        _, port = sites.start()
        rules = [f"MAP {host} 127.0.0.1:{port}" for host in sites.HOSTS]
        return chromium.browser_for(", ".join([*rules, "MAP * ~NOTFOUND"]))

    async def session(self, browser: chromium.Browser, config: dict) -> Session:
        from envs.webarena_parts import sites

        self.end()
        databases, _ = sites.start()
        self._episode = secrets.token_urlsafe(8)
        databases.open(self._episode)
        session = await browser.session(extra_http_headers={"X-Episode": self._episode})
        if config["require_login"]:
            tokens = sites.sessions(databases, self._episode)
            cookies = [
                {"name": "session", "value": token, "url": tasks.SITES[site][2]}
                for site, token in tokens.items()
            ]
            await session.context.add_cookies(cookies)
        return session

    def query(self, sql: str, *values) -> list:
        from envs.webarena_parts import sites

        return sites.start()[0].query(self._episode, sql, *values)

    def end(self) -> None:
        if self._episode:
            from envs.webarena_parts import sites

            sites.start()[0].close(self._episode)
            self._episode = ""


class Deployment:
    """WebArena's sites at the given addresses, shared by all episodes."""

    pause = PAUSE

    def __init__(self, options: dict[str, str], configs: str, changes: bool):
        self.sites = deployment.addresses(options)
        if not self.sites:
            names = ", ".join(site.upper() for site in deployment.SITES)
            raise ValueError(f"source=deployment needs the sites' addresses: set some of {names}")
        has_judge = Judge.from_environment() is not None
        loaded = deployment.load_tasks(self.sites, configs, has_judge, changes)
        self._configs, self._splits, self.left_out = loaded
        if self.left_out:
            reasons = "; ".join(f"{count}: {reason}" for reason, count in self.left_out.items())
            log.warning("%d tasks, left out %s", len(self._configs), reasons)

    def ids(self, split: str) -> list[str]:
        return [key for key, found in self._splits.items() if found == split]

    def category(self, task: str) -> str | None:
        return "+".join(self._configs[task]["sites"]) if task in self._configs else None

    def config(self, task: str) -> dict:
        return self._configs[task]

    def browser(self) -> chromium.Browser:
        hosts = sorted({urlsplit(url).hostname for url in self.sites.values()})
        return chromium.browser_for(
            ", ".join(["MAP * ~NOTFOUND", *(f"EXCLUDE {h}" for h in hosts)])
        )

    async def session(self, browser: chromium.Browser, config: dict) -> Session:
        session = await browser.session(geolocation=config.get("geolocation"))
        if config.get("require_login", True):
            for site in config["sites"]:
                await deployment.log_in(session, site, self.sites[site])
        return session

    def end(self) -> None:
        """Nothing of an episode is kept, and nothing that it changed on the sites can be undone."""


# --- the environment ---

# Run on an element's node.
IS_LIST = "function() { return this.tagName === 'SELECT'; }"
SELECT_TEXT = (
    "function() { if (this.select) this.select(); else getSelection().selectAllChildren(this); }"
)
CHOOSE = """function() {
  const list = this.closest('select');
  if (!list || list.disabled || this.disabled) return false;
  this.selected = true;
  for (const kind of ['input', 'change']) list.dispatchEvent(new Event(kind, {bubbles: true}));
  return true;
}"""
SCROLL = {"down": "scrollBy(0, innerHeight)", "up": "scrollBy(0, -innerHeight)"}


class WebArena(gym.Env):
    """Do what the objective says on web sites, with a browser.

    Observation  the objective, on reset only; then the address, the tabs, and the elements in view:
                 a line each, indented below what holds them, with a number, role, name and state
    Action       WebArena's, as plain text (see `instructions`)
    Reward       1.0 on a `stop` that meets all the task's checks, else 0.0
    Terminated   by `stop`
    Difficulty   the template: its expert needs 2 turns for "subscribe", 7 for "share"

    source=bundled (default): tasks/splits of webarena_parts/tasks.py, on a shop, its CMS, a forum and a
    code host; no product, order, post, project or customer is in two splits, and each split has a
    wording of its own. source=deployment: WebArena's 812 tasks, on sites whose addresses are in the
    options, or in WebArena's variables (SHOPPING, SHOPPING_ADMIN, REDDIT, GITLAB, MAP, WIKIPEDIA,
    HOMEPAGE). Its test split is the paper's. Tasks for which something is missing are left out, and
    counted in `left_out`; so are those that change a site, but for test's (changes=yes takes them).
    configs=FILE takes tasks of one's own, in WebArena's JSON.

    A page has ten seconds to come to rest; then it is shown as it is. `goto` reaches the task's sites
    only, and no other host resolves. raises BrowserDied when Chromium was killed; reset brings it back.

    >>> env = WebArena()
    >>> print(env.reset(options={"task": "price/violet-hammer"})[0].splitlines()[0])
    Objective: What is the price of the Violet Hammer?
    >>> print(env.step("type [6] [violet hammer] [1]")[0])
    URL: http://shop.test/search?q=violet+hammer
    Tab 0 (current): Results for violet hammer - Corner Shop
    [1] link 'Home'
    [2] link 'My orders'
    [3] link 'Cart'
    [4] link 'Wish list'
    [5] link 'My account'
    [6] searchbox 'Search products'
    [7] heading 'Results for violet hammer'
    [8] link 'Violet Hammer'
    [9] StaticText '$27.01'
    >>> env.step("click [99]")[0]
    'There is no element [99] in view.'
    >>> env.step("stop [$27.01]")[:3]
    ('Task done.', 1.0, True)
    """

    instructions = (
        "You use web sites through a browser. Reach the objective. You see the page's elements, each "
        "with its number in brackets. Each turn, write one action:\n"
        "click [id]\n"
        "type [id] [text] [1] replaces a field's text and presses Enter; with [0] it does not\n"
        "hover [id]\n"
        "press [keys], such as press [Control+a]\n"
        "scroll [down] or scroll [up]\n"
        "new_tab, tab_focus [index], close_tab\n"
        "goto [url], go_back, go_forward\n"
        "stop [answer] ends the task. Give the answer alone, N/A if there is none, or done."
    )
    max_turns = 15
    observation_space = Text(max_length=MAX_TEXT + 2000, charset=CHARACTERS)
    action_space = Text(max_length=MAX_LENGTH, min_length=0, charset=CHARACTERS)

    def __init__(
        self,
        source: str = "bundled",
        configs: str = "",
        changes: str = "no",
        shopping: str = "",
        shopping_admin: str = "",
        reddit: str = "",
        gitlab: str = "",
        map: str = "",
        wikipedia: str = "",
        homepage: str = "",
    ):
        given = (shopping, shopping_admin, reddit, gitlab, map, wikipedia, homepage)
        options = dict(zip(deployment.SITES, given, strict=True))
        if source not in ("bundled", "deployment"):
            raise ValueError(f"source must be bundled or deployment, got {source!r}")
        if changes not in ("yes", "no"):
            raise ValueError(f"changes must be yes or no, got {changes!r}")
        if source == "bundled" and (configs or changes == "yes" or any(given)):
            raise ValueError("addresses, configs and changes go with source=deployment")
        self._source = (
            Bundled() if source == "bundled" else Deployment(options, configs, changes == "yes")
        )
        self._session: Session | None = None
        self._config: dict | None = None
        self._elements: list[Element] = []
        self._over = self._success = False

    # --- tasks ---

    @property
    def left_out(self) -> dict[str, int]:
        """{reason: how many tasks are left out for it}."""
        return dict(self._source.left_out)

    def tasks(self, split: str) -> list[str]:
        if split not in SPLITS:
            raise ValueError(f"split must be one of {', '.join(SPLITS)}, got {split!r}")
        return self._source.ids(split)

    def category(self, task: str) -> str:
        """Of the bundled: "shop find", "shop change", "cms find", ...; else WebArena's sites."""
        found = self._source.category(task) if isinstance(task, str) else None
        if not found:
            raise ValueError(f"no task is called {task!r:.100}; tasks() lists them")
        return found

    # --- Gymnasium's methods ---

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[str, dict]:
        """Start the task in `options`, or one of train drawn from this environment's generator."""
        task = (options or {}).get("task")
        if task is not None:
            self.category(task)  # raises before anything changes
        super().reset(seed=seed)
        if task is None:
            train = self.tasks("train")
            task = train[self.np_random.integers(len(train))]
        self.close()
        self._browser = self._source.browser()
        config = self._source.config(task)
        self._run(self._begin(config), TURN_SECONDS + chromium.START_SECONDS)
        self._config, self._task = config, task
        self._over = self._success = False
        info = {"success": False, "invalid": False, "category": self.category(task)}
        return f"Objective: {config['intent']}\n{self._describe()}", info

    def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
        """Carry out one action. One that can't be done costs its turn and changes nothing."""
        if self._config is None:
            raise ValueError("step() before the first reset(): call reset() to start a task")
        if self._over:
            info = {"success": self._success, "invalid": True}
            return "The task has ended already.", 0.0, True, False, info
        if self._session is None:
            raise BrowserDied("this episode's Chromium was killed: reset() starts another")
        is_invalid = False
        try:
            verb, arguments = parse(action)
            if verb == "stop":
                self._success = self._run(self._score(arguments[0]), SCORE_SECONDS) == 1.0
                self._over = True
                observation = "Task done." if self._success else "Task failed."
            else:
                self._run(self._act(verb, arguments), TURN_SECONDS)
                observation = self._describe()
        except Refused as refusal:
            observation, is_invalid = str(refusal), True
        info = {"success": self._success, "invalid": is_invalid}
        return observation, float(self._success), self._over, False, info

    def available_actions(self) -> list[str]:
        """Clicks on what is in view, and scrolling; what could be typed is without end."""
        if self._session is None or self._over:
            return []
        clicks = [f"click [{e.number}]" for e in self._elements if e.role in CLICKED]
        return [*clicks, *(["scroll [down]"] if self._is_more else [])]

    def close(self) -> None:
        session, self._session = self._session, None
        if session is not None and session.is_alive:
            with suppress(Exception):  # it may die at this very moment
                self._browser.run(session.close(), 2 * SECONDS)
        self._source.end()

    def __del__(self):
        """A context costs megabytes in another process, which no garbage collector sees."""
        try:
            if self._session is not None and self._session.is_alive:
                self._browser.start(self._session.close())
            self._source.end()
        except Exception:  # half built, or Python is taking itself apart
            pass

    def expert(self) -> Iterator[tuple[str, str]]:
        """(thought, action) until the episode is over, for bundled tasks; none on a deployment."""
        if not isinstance(self._source, Bundled):
            return
        while self._session is not None and not self._over:
            task = tasks.tasks()[self._task]
            sight = tasks.Sight(self._session.current.page.url, self._elements, self._source.query)
            advice = task.template.advise(sight, task.case)
            if not advice:
                return
            yield advice

    # --- on the browser's loop ---

    def _run(self, coroutine, seconds: float):
        from playwright.async_api import Error

        try:
            return self._browser.run(coroutine, seconds)
        except (Error, TimeoutError, BrowserDied) as error:
            with suppress(TimeoutError):  # for the news of its death to arrive
                self._browser.run(asyncio.sleep(0.2), 5.0)
            if self._session is not None and not self._session.is_alive:
                self._session = None
                self._source.end()
                raise BrowserDied(
                    f"Chromium died: reset() starts another ({error!s:.100})"
                ) from None
            raise RuntimeError(f"the browser did not do it: {error!r:.300}") from None

    async def _begin(self, config: dict) -> None:
        self._session = await self._source.session(self._browser, config)
        urls = [self._source.sites[s] for s in config["sites"] if s in self._source.sites]
        urls += [self._source.sites[s] for s in ("homepage",) if s in self._source.sites]
        starts = config["start_url"].split(" |AND| ")
        self._start_url = starts[0]
        self._origins = {deployment.origin(url) for url in [*urls, *starts]}
        for url in starts:  # a tab each, the last one in front
            tab = await self._session.new_tab()
            await tab.cdp.send("Page.navigate", {"url": url})
            await self._settle(set(self._session.context.pages))
        self._note = ""
        await self._look()

    async def _act(self, verb: str, arguments: tuple[str, ...]) -> None:
        from playwright.async_api import Error

        self._note, before = "", set(self._session.context.pages)
        try:
            await asyncio.wait_for(getattr(self, f"_{verb}")(*arguments), SECONDS)
        except TimeoutError:
            self._note = "The page does not answer."
        except Error as error:
            if not self._session.is_alive:
                raise
            reason = str(error).splitlines()[0]
            if self._session.current.page.is_closed() or "crash" in reason.lower():
                self._note = "The page is gone."
            else:
                raise Refused(f"That could not be done: {reason[:200]}") from None
        await self._settle(before)
        await self._look()

    async def _settle(self, before: set) -> None:
        """Wait for what the action set off: a page that loads, a window that opens."""
        from playwright.async_api import Error

        tab = self._session.current
        for _ in range(2):  # the second time for a window that was opened, and is current now
            try:
                await asyncio.wait_for(tab.rest(), SECONDS)
            except TimeoutError:
                self._note = f"The page was not complete after {SECONDS:g} seconds."
                await chromium._quietly(tab.cdp.send("Page.stopLoading"))
                tab.at_rest.set()
            except Error:
                if not self._session.is_alive:
                    raise
            with suppress(TimeoutError):  # a window that does not answer is for the next turn
                await asyncio.wait_for(self._session.follow_windows(before), SECONDS)
            if self._session.current is tab:
                break
            tab = self._session.current
        await asyncio.sleep(self._source.pause)

    async def _look(self) -> None:
        """Read the current page. One that can't be read, or is off the sites, is left."""
        from playwright.async_api import Error

        for _ in range(2):
            tab = self._session.current
            if not self._is_allowed(tab.page.url):
                self._note = "That leads off the task's sites."
            else:
                try:
                    self._elements, self._is_more = await asyncio.wait_for(tab.look(), SECONDS)
                    return
                except (TimeoutError, Error):
                    if not self._session.is_alive:
                        raise
                    self._note = "The page does not answer. Back to the start."
            tab = await self._session.replace(tab)
            await tab.cdp.send("Page.navigate", {"url": self._start_url})
            await asyncio.wait_for(tab.rest(), SECONDS)
        raise RuntimeError(f"{self._start_url} can't be read")

    def _is_allowed(self, url: str) -> bool:
        if urlsplit(url).scheme in ("http", "https"):
            return deployment.origin(url) in self._origins
        return url.startswith(("about:", "chrome-error:", "blob:"))

    def _describe(self) -> str:
        session = self._session
        tabs = " | ".join(
            f"Tab {i}{' (current)' if tab is session.current else ''}: {tab.title}"
            for i, tab in enumerate(session.tabs)
        )
        head = f"{self._note}\n" if self._note else ""
        lines = "\n".join(element.line() for element in self._elements)
        return f"{head}URL: {_plain(session.current.page.url)[:500]}\n{tabs}\n{lines}"[:MAX_TEXT]

    async def _score(self, answer: str) -> float:
        shop = self._source.sites.get("shopping", "")
        account = deployment.SHOP_ADMINISTRATOR
        judge = Judge.from_environment()
        scorer = Scorer(self._session, judge, shop, account, 2 * self._source.pause)
        return await scorer.score(self._config, answer)

    # --- actions ---

    def _element(self, number: str) -> Element:
        for element in self._elements:
            if element.number == int(number):
                return element
        raise Refused(f"There is no element [{number}] in view.")

    async def _click(self, number: str) -> None:
        element, tab = self._element(number), self._session.current
        if element.role == "option" and await tab.call(element, CHOOSE):
            return
        if element.role == "combobox" and await tab.call(element, IS_LIST):
            # Its pop-up would be a window of the operating system; the options are in view already.
            await tab.cdp.send("DOM.focus", {"backendNodeId": element.node})
            return
        await tab.page.mouse.click(*await tab.middle(element))

    async def _hover(self, number: str) -> None:
        element, tab = self._element(number), self._session.current
        await tab.page.mouse.move(*await tab.middle(element))

    async def _type(self, number: str, text: str, enter: str) -> None:
        element, tab = self._element(number), self._session.current
        if element.role not in TYPED:
            raise Refused(f"[{number}] is a {element.role}: nothing can be typed there.")
        if element.role == "combobox" and await tab.call(element, IS_LIST):
            raise Refused("Click one of its options instead.")
        await tab.cdp.send("DOM.focus", {"backendNodeId": element.node})
        await tab.call(element, SELECT_TEXT)
        if text:
            await tab.cdp.send("Input.insertText", {"text": text})
        else:
            await tab.page.keyboard.press("Delete")
        if enter != "0":
            await tab.page.keyboard.press("Enter")

    async def _press(self, keys: str) -> None:
        await self._session.current.page.keyboard.press(read_keys(keys))

    async def _scroll(self, direction: str) -> None:
        await self._session.current.cdp.send("Runtime.evaluate", {"expression": SCROLL[direction]})

    async def _new_tab(self) -> None:
        if len(self._session.pages) >= chromium.MAX_TABS:
            raise Refused(f"There are {chromium.MAX_TABS} tabs already: close one.")
        await self._session.new_tab()

    async def _tab_focus(self, index: str) -> None:
        tabs = self._session.tabs
        if int(index) >= len(tabs):
            raise Refused(f"There is no tab {int(index)}: the last is {len(tabs) - 1}.")
        await self._session.focus(tabs[int(index)].page)
        await self._session.current.page.bring_to_front()

    async def _close_tab(self) -> None:
        if len(self._session.tabs) < 2:
            raise Refused("This is the only tab.")
        await self._session.current.page.close()

    async def _goto(self, url: str) -> None:
        # As strict as can be: what a browser makes of a backslash or an @ is not what Python does.
        if not re.fullmatch(r"https?://[A-Za-z0-9.-]+(:[0-9]{1,5})?([/?#][^\s\\]*)?", url):
            raise Refused("Write a whole address, such as " + self._start_url)
        if deployment.origin(url) not in self._origins:
            raise Refused(f"Only these can be reached: {', '.join(sorted(self._origins))}")
        await self._session.current.cdp.send("Page.navigate", {"url": url})

    async def _travel(self, steps: int) -> None:
        cdp = self._session.current.cdp
        history = await cdp.send("Page.getNavigationHistory")
        index = history["currentIndex"] + steps
        entries = history["entries"]
        # The first is the empty page that every tab begins with.
        if not 0 <= index < len(entries) or entries[index]["url"] == "about:blank":
            raise Refused("There is no such page in this tab's history.")
        self._session.current.at_rest.clear()
        await cdp.send("Page.navigateToHistoryEntry", {"entryId": entries[index]["id"]})

    async def _go_back(self) -> None:
        await self._travel(-1)

    async def _go_forward(self) -> None:
        await self._travel(1)


def _plain(text: str) -> str:
    return "".join(c if c in CHARACTERS else "?" for c in text)
