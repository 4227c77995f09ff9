"""
WebArena's own tasks, for whoever runs its sites: 812 configurations, their splits, and logging in.

    SHOPPING=http://host:7770 REDDIT=... -> addresses -> configurations with addresses in them -> splits

    PAPER_TEST    the 50 tasks on which AgentGym-RL reports (arXiv 2509.08755)
    load_tasks    {id: configuration} and what was left out, and why
    log_in        fills a site's form, once for all episodes of this process

The configurations are read from the package libwebarena; its code is never imported. Read scores.py first.
"""

import asyncio
import functools
import hashlib
import json
import os
import re
import time
from collections import Counter
from importlib import metadata
from pathlib import Path
from urllib.parse import urlsplit

from envs.webarena_parts.browser import SECONDS

SITES = ("shopping", "shopping_admin", "reddit", "gitlab", "map", "wikipedia", "homepage")
PAPER_TEST = (
    *(24, 238, 228, 158, 278, 280, 22, 165, 300, 328, 239, 386, 387, 264, 23),  # shopping
    *(65, 215, 4, 95, 115, 6, 680, 203, 214, 108, 110, 247, 122, 123, 128),  # shopping_admin
    *(318, 526, 537, 535, 168, 598, 27, 28, 67, 29),  # gitlab, reddit
    *(36, 60, 74, 222, 251, 255, 381, 378, 365, 763),  # map
)
NUM_DEV = 40
SESSION_SECONDS = 1800.0  # GitLab's cookies are good for longer, but not for ever

# Where each site's log-in form is, and the accounts that come with WebArena's images. Public.
LOGINS = {
    "shopping": ("/customer/account/login/", "emma.lopez@gmail.com", "Password.123"),
    "shopping_admin": ("", "admin", "admin1234"),
    "reddit": ("/login", "MarvelsGrantMan136", "test1234"),
    "gitlab": ("/users/sign_in", "byteblaze", "hello1234"),
}
SHOP_ADMINISTRATOR = {"username": "admin", "password": "admin1234"}


def addresses(options: dict[str, str]) -> dict[str, str]:
    """{site: address} of the sites that have one: from the options, else from WebArena's variables.

    raises  ValueError for an address that is none
    """
    found = {}
    for site in SITES:
        if url := (options.get(site) or os.environ.get(site.upper(), "")).strip().rstrip("/"):
            if not re.fullmatch(r"https?://[\w.-]+(:[0-9]{1,5})?(/[\w./-]*)?", url):
                raise ValueError(f"{site} must be an address like http://host:7770, got {url!r}")
            found[site] = url
    return found


def origin(url: str) -> str:
    """ "http://host:7770" of an address: what goto compares."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc}".lower()


def read_configs(path: str = "") -> list[dict]:
    """Configurations of a file, or those of libwebarena.

    raises  ValueError, in one line, where there are none
    """
    if not path:
        try:
            path = metadata.distribution("libwebarena").locate_file("webarena/test.raw.json")
        except metadata.PackageNotFoundError:
            raise ValueError(
                "WebArena's tasks are in a package: pip install --no-deps libwebarena==0.0.5"
            ) from None
    try:
        configs = json.loads(Path(path).read_text(encoding="utf-8"))
        configs = configs if isinstance(configs, list) else [configs]
        for config in configs:  # the fields that we rely on
            _ = config["task_id"], config["sites"][0], config["start_url"], config["intent"]
            _ = config["eval"]["eval_types"]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ValueError(f"{path} must hold WebArena's configurations as JSON: {error!r}") from None
    return configs


def needs_judge(config: dict) -> bool:
    return "fuzzy_match" in (config["eval"].get("reference_answers") or {})


def changes_site(config: dict) -> bool:
    """Whether the task leaves something behind; on shared sites the next episode would find it."""
    return "program_html" in config["eval"]["eval_types"]


def split_of(config: dict, dev: frozenset) -> str:
    if config["task_id"] in PAPER_TEST:
        return "test"
    return "dev" if config["task_id"] in dev else "train"


def load_tasks(
    sites: dict[str, str], path: str, has_judge: bool, with_changes: bool
) -> tuple[dict[str, dict], dict[str, str], dict[str, int]]:
    """({id: configuration}, {id: split}, {reason: how many tasks were left out}).

    The paper's 50 are test, as they are. What changes a site is in no other split unless asked for.
    """
    configs, left_out, dev = read_configs(path), Counter(), frozenset()
    if not path:
        held = [
            c["task_id"] for c in configs if c["task_id"] not in PAPER_TEST and not changes_site(c)
        ]
        held.sort(key=lambda number: hashlib.sha256(str(number).encode()).digest())
        dev = frozenset(held[:NUM_DEV])
    tasks, splits = {}, {}
    for config in configs:
        split = split_of(config, dev)
        missing = [site for site in config["sites"] if site not in sites]
        if missing:
            left_out[f"no address for {missing[0]}"] += 1
        elif needs_judge(config) and not has_judge:
            left_out["no judge (WEBARENA_JUDGE_MODEL)"] += 1
        elif changes_site(config) and not with_changes and split != "test" and not path:
            left_out["changes its site (changes=yes takes them in)"] += 1
        else:
            key = f"{'+'.join(config['sites'])}/{config['task_id']}"
            tasks[key], splits[key] = with_addresses(config, sites), split
    if path:  # one's own file has no splits: its tasks are dealt in turn
        for number, key in enumerate(tasks):
            splits[key] = ("train", "dev", "test")[number % 3]
    return tasks, splits, dict(left_out)


def with_addresses(config: dict, sites: dict[str, str]) -> dict:
    """The configuration with addresses for __SHOPPING__ and the like."""
    text = json.dumps(config)
    for site in SITES:
        # As a JSON string's inside, whatever the address holds.
        text = text.replace(f"__{site.upper()}__", json.dumps(sites.get(site, ""))[1:-1])
    return json.loads(text)


# --- logging in ---


@functools.cache
def _logins() -> dict[str, tuple[float, list]]:
    """{site's address: (when, cookies)}; used on the browser's loop alone."""
    return {}


@functools.cache
def _turn(loop) -> asyncio.Lock:
    return asyncio.Lock()


async def log_in(session, site: str, url: str) -> None:
    """Put the site's cookies into the session; fill its form if we have none that are young.

    raises  RuntimeError where the form is still there afterwards
    """
    if site not in LOGINS:
        return
    async with _turn(asyncio.get_running_loop()):
        made, cookies = _logins().get(url, (-SESSION_SECONDS, []))
        if time.monotonic() - made >= SESSION_SECONDS:
            cookies = await _fill_form(session, site, url)
            _logins()[url] = time.monotonic(), cookies
    await session.context.add_cookies(cookies)


async def _fill_form(session, site: str, url: str) -> list:
    from playwright.async_api import Error

    path, name, password = LOGINS[site]
    page = await session.context.new_page()
    try:
        await page.goto(f"{url}{path}")
        form = page.locator("form:has(input[type=password]:visible)").first
        user = "input:visible:not([type=password]):not([type=checkbox]):not([type=submit])"
        await form.locator(user).first.fill(name)
        secret = form.locator("input[type=password]:visible").first
        await secret.fill(password)
        await secret.press("Enter")
        await secret.wait_for(state="detached", timeout=1000 * SECONDS)
        await page.wait_for_load_state()
    except Error as error:
        reason = str(error).splitlines()[0]
        raise RuntimeError(f"logging in at {url}{path} failed as {name}: {reason}") from None
    cookies = await session.context.cookies(page.url)
    await page.close()
    return cookies
