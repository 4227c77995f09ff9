"""
One Chromium for this process, and what an agent sees of its pages: an accessibility tree as text.

    any thread -> Browser.run(coroutine) -> one event loop on a daemon thread -> Playwright -> Chromium
    Accessibility.getFullAXTree -> elements() -> [Element] -> "[4] link 'Cart'"

    elements   which nodes of the tree a reader needs, numbered in the order of the document
    Tab        a page, and whether it is at rest
    Session    the tabs of one episode
    Browser    the process: started at the first episode, and again after it died

Playwright's objects belong to the thread that made them, and a web server calls from any: so everything
that touches a page is a coroutine, run by the one loop. Read envs/webarena.py next.
"""

import asyncio
import atexit
import os
import shutil
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

VIEWPORT = {"width": 1280, "height": 720}  # WebArena's
SECONDS = 10.0  # a page has this long to come to rest after an action, and as long to show itself
START_SECONDS = 60.0  # for Chromium to start on a busy machine
MAX_TABS = 8  # a page that opens windows in a loop gets no further
FLAGS = (
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--disable-quic",  # the one kind of traffic that host rules would not see
)


# --- the accessibility tree ---

# Roles that say nothing by themselves; what stands below them is shown in their place.
SILENT = {
    *("none", "generic", "paragraph", "list", "listitem", "RootWebArea", "LabelText", "Legend"),
    *("InlineTextBox", "ListMarker", "MenuListPopup", "strong", "emphasis", "LineBreak", "form"),
    *(
        "navigation",
        "main",
        "banner",
        "contentinfo",
        "Section",
        "group",
        "rowgroup",
        "row",
        "table",
    ),
    *("LayoutTable", "LayoutTableRow", "LayoutTableCell", "DescriptionList", "article", "region"),
}
# Roles that can be acted on without having a name.
CONTROLS = {
    *("button", "link", "textbox", "searchbox", "combobox", "checkbox", "radio", "spinbutton"),
    *("slider", "switch", "option", "menuitem", "tab", "listbox", "treeitem", "menuitemcheckbox"),
}
TYPED = {"textbox", "searchbox", "spinbutton", "combobox"}  # roles that hold a value
STATES = ("checked", "selected", "expanded", "disabled", "focused")
MAX_NAME = 300  # characters of a name or a value
MAX_ELEMENTS = 150  # lines of an observation
MAX_NODES = 20_000  # of a tree; the rest is not looked at


@dataclass(frozen=True)
class Element:
    """A line of an observation: [number] role 'name' and its properties."""

    number: int
    role: str
    name: str
    value: str  # of a field; of a list of options, the one that is chosen
    states: str  # "checked: true, focused: true"
    depth: int
    node: int  # Chromium's id of the node in the document

    def line(self) -> str:
        # repr escapes quotes, line ends and control characters, so a page can't fake another line.
        value = f" value: {self.value!r}" if self.value else ""
        states = f" {self.states}" if self.states else ""
        return "\t" * self.depth + f"[{self.number}] {self.role} {self.name!r}{value}{states}"


def elements(nodes: list[dict]) -> list[Element]:
    """The nodes that a reader needs, in the order of the document.

    nodes  what getFullAXTree returns: [{"nodeId", "role", "name", "properties", "childIds", ...}]

    Left out: what is silent and has no name; text that an element above it has for its name, its
    value or its label already. Numbers don't depend on what is in view, so scrolling changes none.
    """
    by_id = {node["nodeId"]: node for node in nodes[:MAX_NODES]}
    found: list[Element] = []
    todo = [(nodes[0]["nodeId"], 0, "")] if nodes else []
    while todo:
        node_id, depth, said = todo.pop()
        if (node := by_id.get(node_id)) is None:
            continue
        role = node.get("role", {}).get("value", "none")
        name = _text(node.get("name"))
        states = {p["name"]: p["value"].get("value") for p in node.get("properties", ())}
        is_shown = not node.get("ignored") and _is_worth_a_line(role, name, said, states)
        if is_shown:
            value = _text(node.get("value")) if role in TYPED else ""
            shown = ", ".join(
                f"{s}: {str(states[s]).lower()}" for s in STATES if _is_set(states, s)
            )
            place = node.get("backendDOMNodeId", 0)
            found.append(Element(len(found) + 1, role, name, value, shown, depth, place))
            depth, said = depth + 1, f"{name}\n{value}"
        elif role == "LabelText":
            said = "\0"  # the label's text is the name of the field that it labels
        if role != "StaticText":
            todo += [(child, depth, said) for child in reversed(node.get("childIds", ()))]
    return found


def _text(field: dict | None) -> str:
    text = " ".join(str((field or {}).get("value") or "").split())
    # Half a surrogate pair can't be sent, and what lies beyond the basic plane is outside our space.
    text = "".join(c if c < "\ud800" or "\ue000" <= c <= "\uffff" else "?" for c in text)
    return text if len(text) <= MAX_NAME else text[:MAX_NAME] + "..."


def _is_worth_a_line(role: str, name: str, said: str, states: dict) -> bool:
    if role == "StaticText":
        return bool(name) and said != "\0" and name not in said
    return role in CONTROLS or (role not in SILENT and bool(name))


def _is_set(states: dict, state: str) -> bool:
    """Worth showing: everything that is on, and for what can be ticked or opened, off as well."""
    value = states.get(state)
    return value is not None and (state in ("checked", "expanded") or value is True)


def in_window(
    found: list[Element], boxes: dict[int, tuple], top: float, height: float
) -> list[Element]:
    """Those of which most lies in the window.  boxes: {node: (x, y, width, height)} on the page."""

    def is_seen(element: Element) -> bool:
        if element.role == "option":  # a closed list's options lie nowhere
            return True
        _, y, _, tall = boxes.get(element.node, (0, -1.0, 0, 0))
        inside = min(y + tall, top + height) - max(y, top)
        return tall > 0 and inside >= 0.6 * min(tall, height)

    return [element for element in found if is_seen(element)]


# --- tabs ---


class Tab:
    """A page, with a DevTools session of its own.

    Chromium tells of a navigation before it answers the next question put to that page, so after an
    action one question is enough to know whether there is something to wait for: no sleeping.
    """

    def __init__(self, page, cdp, frame: str):
        self.page, self.cdp, self.title = page, cdp, ""
        self.at_rest = asyncio.Event()
        self.at_rest.set()
        self.opens_window = False

        def starts(event: dict) -> None:
            is_here = event.get("disposition", "currentTab") == "currentTab"
            if is_here and event.get("frameId") == frame:
                self.at_rest.clear()

        def opens(_: dict) -> None:
            self.opens_window = True

        def ends(event: dict) -> None:
            if event.get("frameId") == frame:
                self.at_rest.set()

        for name in ("frameRequestedNavigation", "frameStartedNavigating", "frameStartedLoading"):
            cdp.on(f"Page.{name}", starts)
        for name in ("frameStoppedLoading", "navigatedWithinDocument"):
            cdp.on(f"Page.{name}", ends)
        cdp.on("Page.windowOpen", opens)

    @classmethod
    async def open(cls, page) -> "Tab":
        cdp = await page.context.new_cdp_session(page)
        tree = await cdp.send("Page.getFrameTree")
        tab = cls(page, cdp, tree["frameTree"]["frame"]["id"])
        await cdp.send("Page.enable")
        return tab

    async def rest(self) -> dict:
        """Wait until nothing loads any more; returns the window's place and the page's size."""
        metrics = await self.cdp.send("Page.getLayoutMetrics")
        while not self.at_rest.is_set():
            await self.at_rest.wait()
            metrics = await self.cdp.send("Page.getLayoutMetrics")  # it may have moved on at once
        return metrics

    async def look(self) -> tuple[list[Element], bool]:
        """The elements in view, and whether there is more below."""
        metrics = await self.rest()
        view, size = metrics["cssLayoutViewport"], metrics["cssContentSize"]
        nodes = (await self.cdp.send("Accessibility.getFullAXTree"))["nodes"]
        self.title = _text(nodes[0].get("name")) if nodes else ""
        found = elements(nodes)
        if size["height"] > view["clientHeight"]:
            found = in_window(found, await self._boxes(), view["pageY"], view["clientHeight"])
        is_more = view["pageY"] + view["clientHeight"] < size["height"] - 1
        return found[:MAX_ELEMENTS], is_more

    async def _boxes(self) -> dict[int, tuple]:
        snapshot = await self.cdp.send("DOMSnapshot.captureSnapshot", {"computedStyles": []})
        document = snapshot["documents"][0]
        ids, layout = document["nodes"]["backendNodeId"], document["layout"]
        return {
            ids[index]: tuple(bounds)
            for index, bounds in zip(layout["nodeIndex"], layout["bounds"], strict=True)
        }

    async def call(self, element: Element, function: str) -> Any:
        """Run a function of ours on the element's node."""
        found = await self.cdp.send("DOM.resolveNode", {"backendNodeId": element.node})
        asked = {
            "objectId": found["object"]["objectId"],
            "functionDeclaration": function,
            "returnByValue": True,
        }
        answer = await self.cdp.send("Runtime.callFunctionOn", asked)
        return answer["result"].get("value")

    async def middle(self, element: Element) -> tuple[float, float]:
        await self.cdp.send("DOM.scrollIntoViewIfNeeded", {"backendNodeId": element.node})
        found = await self.cdp.send("DOM.getContentQuads", {"backendNodeId": element.node})
        x1, y1, _, _, x3, y3, *_ = found["quads"][0]
        return (x1 + x3) / 2, (y1 + y3) / 2


class Session:
    """The tabs of one episode. Coroutines only; call them through Browser.run."""

    def __init__(self, context):
        self.context, self.current = context, None
        self.is_judged = False  # the evaluators' own tabs are not counted
        self._tabs: dict[Any, Tab] = {}
        self._given_up: set = set()  # pages that hang; closing one takes its time
        context.on("page", self._limit)

    def _limit(self, page) -> None:
        if len(self.pages) > MAX_TABS and not self.is_judged:
            self._given_up.add(page)
            asyncio.ensure_future(_quietly(page.close()))

    @property
    def is_alive(self) -> bool:
        """Whether the Chromium that it began in is; another may run by now."""
        return self.context.browser.is_connected()

    @property
    def pages(self) -> list:
        self._given_up &= set(self.context.pages)  # forget those that are closed at last
        return [page for page in self.context.pages if page not in self._given_up]

    @property
    def tabs(self) -> list[Tab]:
        return [self._tabs[page] for page in self.pages if page in self._tabs]

    async def new_tab(self) -> Tab:
        return await self.focus(await self.context.new_page())

    async def focus(self, page) -> Tab:
        if page not in self._tabs:
            self._tabs[page] = await Tab.open(page)
        self.current = self._tabs[page]
        return self.current

    async def follow_windows(self, before: set) -> None:
        """Turn to a window that an action opened; if the current one closed itself, to the last."""
        if self.current.opens_window:
            self.current.opens_window = False
            for _ in range(100):
                if set(self.context.pages) - before:
                    break
                await asyncio.sleep(0.02)
        for page in self.pages:
            if page not in self._tabs:
                await self.focus(page)
        if self.current.page.is_closed():
            await (self.focus(self.pages[-1]) if self.pages else self.new_tab())

    async def replace(self, tab: Tab) -> Tab:
        """A fresh tab in the place of one that hangs or crashed."""
        self._given_up.add(tab.page)
        self._tabs.pop(tab.page, None)
        asyncio.ensure_future(_quietly(tab.page.close()))
        return await self.new_tab()

    async def close(self) -> None:
        await _quietly(self.context.close())


async def _quietly(coroutine: Coroutine) -> None:
    """For clean-up: what is gone already needs none."""
    with suppress(Exception):
        await asyncio.wait_for(coroutine, SECONDS)


# --- the process ---


class BrowserDied(RuntimeError):
    """Chromium ended under its episodes. The next reset starts another."""


def find_chromium() -> str | None:
    """A browser that is installed; None leaves it to Playwright's own."""
    for name in ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable"):
        if path := shutil.which(name):
            return path
    return None


class Browser:
    """Chromium with fixed rules on which hosts exist, shared by all episodes of this process."""

    def __init__(self, rules: str):
        self.rules = rules
        self._loop: asyncio.AbstractEventLoop | None = None
        self._start = threading.Lock()
        self._chromium = self._playwright = self._launching = None

    def run(self, coroutine: Coroutine, seconds: float) -> Any:
        """The coroutine's result, from any thread; TimeoutError after `seconds`."""
        return self.start(asyncio.wait_for(coroutine, seconds)).result()

    def start(self, coroutine: Coroutine) -> Future:
        """Run it on the loop, without waiting for its end."""
        with self._start:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=self._loop.run_forever, name="browser", daemon=True).start()
                atexit.register(self._end)
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    @property
    def is_alive(self) -> bool:
        return self._chromium is not None and self._chromium.is_connected()

    async def session(self, **settings) -> Session:
        """A context of its own: cookies, storage and cache are nobody else's."""
        from playwright.async_api import Error

        self._launching = self._launching or asyncio.Lock()
        settings |= {"viewport": VIEWPORT, "accept_downloads": False}
        settings |= {"locale": "en-US", "timezone_id": "UTC"}
        for is_last in (False, True):
            async with self._launching:
                if not self.is_alive:
                    await self._launch()
            try:
                context = await self._chromium.new_context(**settings)
                break
            except Error:
                await asyncio.sleep(0.2)
                if is_last or self.is_alive:  # else it was dead, and the news had not arrived
                    raise
        context.set_default_timeout(1000 * SECONDS)
        return Session(context)

    async def _launch(self) -> None:
        from playwright.async_api import Error, async_playwright

        if self._playwright is not None:
            await _quietly(self._playwright.stop())
        self._playwright = await async_playwright().start()
        flags = [*FLAGS, f"--host-resolver-rules={self.rules}"]
        if os.geteuid() == 0:
            flags.append("--no-sandbox")  # Chromium's sandbox refuses to run as root
        try:
            self._chromium = await self._playwright.chromium.launch(
                executable_path=find_chromium(), args=flags, timeout=1000 * START_SECONDS
            )
        except Error as error:
            await _quietly(self._playwright.stop())
            if find_chromium() is None:
                raise ValueError(MISSING) from None
            raise RuntimeError(f"Chromium does not start: {str(error)[:500]}") from None

    def _end(self) -> None:
        """At the process's end. After a SIGKILL the closing of Playwright's pipe does the same."""
        with suppress(Exception):
            if self._playwright is not None:
                self.run(_quietly(self._playwright.stop()), 5.0)


_browsers: dict[str, Browser] = {}
_browsers_lock = threading.Lock()


def browser_for(rules: str) -> Browser:
    """This process's browser. Two sets of host rules in one process, as in tests, make two."""
    with _browsers_lock:
        return _browsers.setdefault(rules, Browser(rules))


MISSING = (
    "webarena needs Chromium: install Debian's or Ubuntu's package chromium, or run "
    "`python -m playwright install chromium`"
)
