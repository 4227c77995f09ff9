"""
Craft a Minecraft item from raw materials: a text world whose only rules are recipes.

    recipe files -> recipe_book() -> TextCraft.reset() -> commands and a goal -> step(text) -> reply

    Recipe, RecipeBook   what may be crafted from what, read once a process and never changed
    splits               544 goals dealt into train, dev and test
    listed_recipes       the commands that a task shows: what the goal needs, and distractors
    next_action          the expert: one thought and one action from whatever is held now
    TextCraft            the environment

The task is TextCraft (Prasad et al. 2023, ADaPT, arXiv 2311.05772), with the recipes that come in
the package textcraft; AgentGym-RL (arXiv 2509.08755) trains on it. Nothing is read before this
file; env_server.py, next, puts it behind HTTP. Try it:

    python -m pytest --doctest-modules envs/textcraft.py
"""

import functools
import hashlib
import json
import random
import re
import string
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from graphlib import TopologicalSorter
from importlib import metadata

import gymnasium as gym
from gymnasium.spaces import Text

# What a crafting table does; the package's furnaces and stonecutters stay out.
CRAFTING = ("minecraft:crafting_shaped", "minecraft:crafting_shapeless")
# A recipe may ask for a Minecraft tag ("any planks"). The package says which items carry a tag only
# through the `group` of their recipes, so these three are general names; the other thirteen tags
# ("oak logs", "coals") have no recipe behind them and serve as raw items.
GROUPS = {"planks": "planks", "wool": "wool", "wooden slabs": "wooden slab"}
TEST_GOALS = {1: 31, 2: 41, 3: 25, 4: 3}  # by depth, as in the paper's test set
DEV_GOALS = {1: 16, 2: 20, 3: 12, 4: 2}  # half of that: what is tuned on dev should carry over
MAX_DISTRACTORS = 10
MAX_COUNT = 999  # the largest number in an action; no goal needs more than a third of it
MAX_LENGTH = 1000  # characters of an action; a longer one is refused unread


# --- the recipe book ---


@dataclass(frozen=True)
class Recipe:
    """Recipe(4, "stick", (("planks", 2),)) is shown as: craft 4 stick using 2 planks"""

    count: int
    item: str
    ingredients: tuple[tuple[str, int], ...]

    def line(self, times: int = 1) -> str:
        """The command that carries the recipe out, `times` over; it is also how we show it."""
        used = ", ".join(f"{count * times} {name}" for name, count in self.ingredients)
        return f"craft {self.count * times} {self.item} using {used}"

    def repeats(self, count: int) -> int:
        """How often to carry it out for at least `count` items."""
        return -(-count // self.count)


@dataclass(frozen=True)
class RecipeBook:
    """All that is known of items. One copy serves every episode and thread: nobody writes to it."""

    recipes: Mapping[str, tuple[Recipe, ...]]  # by what they make; the cheapest first
    kinds: Mapping[str, tuple[str, ...]]  # "planks" -> the items that will do; the cheapest first
    general: Mapping[str, str]  # the reverse: "oak planks" -> "planks"
    raw: frozenset[str]  # items without a recipe: `get` fetches them
    depth: Mapping[str, int]  # crafting steps on the longest branch of the shallowest way; raw is 0
    order: Mapping[str, int]  # rank of each name, ingredients before what is made of them


def read_recipe(details: dict) -> Recipe:
    """The recipe in a file's content."""
    if "pattern" in details:  # shaped: a key stands for as many as the pattern shows of it
        pattern = "".join(details["pattern"])
        needed = [(entry, pattern.count(key)) for key, entry in details["key"].items()]
    else:
        needed = [(entry, 1) for entry in details["ingredients"]]
    counts: dict[str, int] = {}
    for entry, count in needed:
        entry = entry[0] if isinstance(entry, list) else entry  # "coal or charcoal": the first
        name = show(entry.get("item") or entry["tag"])
        counts[name] = counts.get(name, 0) + count
    result = details["result"]
    return Recipe(result.get("count", 1), show(result["item"]), tuple(counts.items()))


def show(identifier: str) -> str:
    """Turn "minecraft:oak_planks" into "oak planks": no other form of a name leaves this file."""
    return identifier.removeprefix("minecraft:").replace("_", " ")


def closes_cycle(recipe: Recipe, recipes: dict[str, list[Recipe]]) -> bool:
    """Whether an ingredient is made, at some remove, of what the recipe makes."""
    frontier = [name for name, _ in recipe.ingredients]
    while frontier:
        name = frontier.pop()
        if name == recipe.item:
            return True
        frontier += [below for made in recipes.get(name, ()) for below, _ in made.ingredients]
    return False


@functools.cache  # two threads may both read it the first time; they get equal books
def recipe_book() -> RecipeBook:
    """Read the package's recipe files, in sorted order.

    The order is part of the benchmark. A recipe that closes a cycle with those already read is left
    out (nuggets make an ingot, so the ingot makes no nuggets): another order would keep others, and
    a bare folder listing differs between machines. A recipe that needs one kind of block and
    nothing else is left out too; it only undoes the making of that block.
    """
    # Found by its distribution, not imported: run as a script, this file's own name is textcraft.
    folder = metadata.distribution("textcraft").locate_file("textcraft/data/recipes")
    recipes: dict[str, list[Recipe]] = defaultdict(list)
    groups: dict[str, set[str]] = defaultdict(set)  # group -> the items that it holds
    mentioned: set[str] = set()
    for path in sorted(folder.glob("*.json")):
        details = json.loads(path.read_text(encoding="utf-8"))
        if details["type"] not in CRAFTING:
            continue
        recipe = read_recipe(details)
        names = [name for name, _ in recipe.ingredients]
        mentioned.update(names, [recipe.item])
        is_from_block = len(names) == 1 and names[0].endswith(" block")
        if not (is_from_block or closes_cycle(recipe, recipes)):
            if recipe not in recipes[recipe.item]:  # two patterns may take the same items
                recipes[recipe.item].append(recipe)
            groups[show(details.get("group", ""))].add(recipe.item)
    members = {name: sorted(groups[group]) for name, group in GROUPS.items()}
    return assemble(dict(recipes), members, mentioned)


def assemble(
    recipes: dict[str, list[Recipe]], members: dict[str, list[str]], mentioned: set[str]
) -> RecipeBook:
    """Measure every item from the raw materials up, and put the cheapest way to each first."""
    general = {item: name for name, items in members.items() for item in items}
    below = dict(members)
    for item, ways in recipes.items():
        below[item] = [name for way in ways for name, _ in way.ingredients]
    order = {name: rank for rank, name in enumerate(TopologicalSorter(below).static_order())}
    depth, turns = dict.fromkeys(order, 0), dict.fromkeys(order, 1)  # what holds for raw items

    def cost(recipe: Recipe) -> int:
        return 1 + sum(turns[name] for name, _ in recipe.ingredients)

    for name in order:
        if name in members:
            members[name] = sorted(members[name], key=turns.__getitem__)
            turns[name] = turns[members[name][0]]
            # The benchmark's depths take "wooden slabs", which no group is quite called, for raw.
            # Kept, so that results by depth compare; see the class.
            depth[name] = 0 if name == "wooden slabs" else min(depth[k] for k in members[name])
        elif name in recipes:
            recipes[name] = sorted(recipes[name], key=cost)
            turns[name] = cost(recipes[name][0])
            depth[name] = 1 + min(max(depth[n] for n, _ in r.ingredients) for r in recipes[name])
    return RecipeBook(
        recipes={item: tuple(ways) for item, ways in recipes.items()},
        kinds={name: tuple(items) for name, items in members.items()},
        general=general,
        raw=frozenset(mentioned - set(recipes) - set(members)),
        depth=depth,
        order=order,
    )


# --- tasks ---


@functools.cache
def splits() -> dict[str, tuple[str, ...]]:
    """Deal the goals of each depth, in the order of a hash of their names, to test, dev and train.

    Within a split depths are spread evenly, so that its first k tasks are a fair sample of it.
    """
    dealt = {"train": [], "dev": [], "test": []}
    book = recipe_book()
    for depth, num_test in TEST_GOALS.items():
        goals = [goal for goal in book.recipes if book.depth[goal] == depth]
        goals.sort(key=lambda goal: hashlib.sha256(goal.encode()).digest())
        num_held_out = num_test + DEV_GOALS[depth]
        parts = goals[num_held_out:], goals[num_test:num_held_out], goals[:num_test]
        for split, part in zip(dealt, parts, strict=True):
            dealt[split] += [((i + 0.5) / len(part), goal) for i, goal in enumerate(part)]
    return {split: tuple(goal for _, goal in sorted(places)) for split, places in dealt.items()}


def listed_recipes(goal: str) -> list[Recipe]:
    """All that can lead to the goal, and up to ten distractors that share an ingredient, shuffled.

    The generator is keyed by the goal alone: every member of a group reads the same prompt.
    """
    book = recipe_book()
    useful: dict[Recipe, None] = {}  # a set that keeps its order
    frontier = [goal]
    while frontier:
        name = frontier.pop()
        frontier += book.kinds.get(name, ())
        for recipe in book.recipes.get(name, ()):
            if recipe not in useful:
                useful[recipe] = None
                frontier += [below for below, _ in recipe.ingredients]
    used = {name for recipe in useful for name, _ in recipe.ingredients}
    others = [
        recipe
        for ways in book.recipes.values()
        for recipe in ways
        if recipe not in useful and any(name in used for name, _ in recipe.ingredients)
    ]
    generator = random.Random(goal)
    listed = [*useful, *generator.sample(others, min(MAX_DISTRACTORS, len(others)))]
    generator.shuffle(listed)
    return listed


# --- the expert ---


def stock(held: Mapping[str, int], name: str) -> int:
    """How many of it are held; of a general name, how many of all its kinds."""
    return sum(held.get(kind, 0) for kind in recipe_book().kinds.get(name, (name,)))


def plan(goal: str, held: Mapping[str, int]) -> dict[str, int]:
    """What is missing for one `goal`, and how many: the goal, what it is made of, down to raw.

    From the goal downwards: a name is settled only after everything that is made of it, so that
    two uses of planks become one need, and one trip.
    """
    book = recipe_book()
    needed, missing = defaultdict(int, {goal: 1}), {}
    while needed:
        name = max(needed, key=book.order.__getitem__)
        count = needed.pop(name)
        if name in book.kinds:  # settle on the kind we have most of, else the cheapest
            kind = max(book.kinds[name], key=lambda kind: held.get(kind, 0))
            if (rest := count - stock(held, name) + held.get(kind, 0)) > 0:
                needed[kind] += rest
        elif (short := count - held.get(name, 0)) > 0:
            missing[name] = short
            if name in book.recipes:
                recipe = book.recipes[name][0]
                for below, each in recipe.ingredients:
                    needed[below] += each * recipe.repeats(short)
    return missing


def next_action(goal: str, held: Mapping[str, int]) -> tuple[str, str]:
    """The expert's thought and action: walk down from the goal to the first thing that can be done.

    Each step of the walk is said aloud, a copy of one recipe line with its numbers and of what is
    held: a model of a million parameters learns to copy long before it learns to look ahead.
    """
    book, missing = recipe_book(), plan(goal, held)
    name, thoughts = goal, []
    while True:
        recipe = book.recipes[name][0]
        repeats = recipe.repeats(missing[name])
        needs = [(below, each * repeats) for below, each in recipe.ingredients]
        lacking = next((below for below, count in needs if stock(held, below) < count), None)
        makes = f"{recipe.count * repeats} {name}"
        if lacking is None or lacking in book.raw:
            break
        thoughts.append(f"For {makes} I need {dict(needs)[lacking]} {lacking}.")
        name = lacking
        if lacking in book.kinds:
            name = next(kind for kind in book.kinds[lacking] if kind in missing)
            thoughts.append(f"{lacking} can be {name}.")
    wanted = " and ".join(f"{count} {below}" for below, count in needs)
    have = " and ".join(f"{stock(held, below)} {below}" for below, _ in needs)
    thoughts.append(f"To craft {makes} I need {wanted}. I have {have}.")
    if lacking is None:
        return " ".join(thoughts), recipe.line(repeats)
    thoughts.append(f"I need {missing[lacking]} {lacking}.")
    return " ".join(thoughts), f"get {missing[lacking]} {lacking}"


# --- the environment ---


class Refused(Exception):
    """An action that can't be done. Its message is the next observation, and nothing changes."""


COUNTED = re.compile("(-?[0-9]+) (.+)")


def counted(text: str) -> tuple[str, int]:
    """Read "2 oak planks" as ("oak planks", 2)."""
    match = COUNTED.fullmatch(text.strip())
    if not match:
        raise Refused("Write a number before every item, such as 2 stick.")
    # Twelve digits are plenty to be out of range, and int() raises on some thousands of them.
    count, name, book = int(match[1][:12]), match[2], recipe_book()
    if not 1 <= count <= MAX_COUNT:
        raise Refused(f"A count goes from 1 to {MAX_COUNT}.")
    if not (name in book.raw or name in book.recipes or name in book.kinds):
        # The agent's own words come back in this reply only, and only as far as they are plain.
        raise Refused(f"There is no item called {re.sub('[^a-z0-9 ]', '', name)[:40]}.")
    return name, count


def is_multiple(recipe: Recipe, count: int, given: dict[str, int]) -> bool:
    """Whether making `count` items of what is `given` is the recipe, or one multiple throughout."""
    wanted, general = dict(recipe.ingredients), recipe_book().general
    totals: dict[str, int] = defaultdict(int)
    for name, number in given.items():  # oak planks, and birch with them, serve as planks
        totals[name if name in wanted else general.get(name, name)] += number
    whole, left_over = divmod(count, recipe.count)
    return not left_over and totals == {name: each * whole for name, each in wanted.items()}


class TextCraft(gym.Env):
    """Craft one Minecraft item, from raw materials that are free and recipes that are given.

    Observation  on reset the commands that may help and the goal; then a reply to each action
    Action       `get 3 oak logs`, `craft 4 oak planks using 1 oak logs`, or `inventory`
    Reward       1.0 on the turn that crafts the goal, else 0.0
    Terminated   when it is crafted; running out of turns is truncation, which rollout.py decides
    Difficulty   depth, 1 to 4: crafting steps on the longest branch; `max_depth` caps it

    A task is its goal's name. Of the 544 goals train has 394, dev 50 and test 100; none is in two,
    but they share recipes: sticks lie under many goals of each, and the black bed may be in train
    when the blue one is in test. So test asks for known steps in new combinations.

    The depths are the original benchmark's, which takes wooden slabs for raw. Here they are made,
    so composter, barrel and daylight detector are harder than they say. A general name's kinds may
    be mixed, and a command may use the general name. Counts go up to 999, an action up to 1,000
    characters. The reply to an action that can't be done says what would do.

    >>> env = TextCraft()
    >>> print(env.reset(options={"task": "blue ice"})[0])
    Crafting commands:
    craft 1 packed ice using 9 ice
    craft 1 blue ice using 9 packed ice
    <BLANKLINE>
    Goal: craft blue ice.
    >>> env.step("get 81 ice")[:3]
    ('Got 81 ice.', 0.0, False)
    >>> env.step("craft 9 packed ice using 9 ice")[0]
    'The command is: craft 1 packed ice using 9 ice; or all its numbers times 2, 3, ...'
    >>> env.step("Craft 9 packed ice using 81 ice.")[0]
    'Crafted 9 packed ice.'
    >>> env.step("craft 1 blue ice using 9 packed ice")
    ('Crafted 1 blue ice.', 1.0, True, False, {'success': True, 'invalid': False})
    """

    instructions = (
        "Craft the goal item. Each turn, write one action:\n"
        "get <number> <item> fetches raw items, those that no command makes.\n"
        "craft <number> <item> using <number> <item>, <number> <item> carries out one of the "
        "crafting commands, as it stands or with all its numbers multiplied alike. Its items are "
        "used up.\n"
        "inventory lists what you hold.\n"
        "A general name in a command (planks, wool, wooden slabs) takes any kind of it, such as "
        "oak planks. Not every command is needed."
    )
    max_turns = 30  # the horizon of evaluation; this class counts no turns

    def __init__(self, max_depth: int | str = 4):
        if str(max_depth) not in ("1", "2", "3", "4"):  # a string, when it is from a command line
            raise ValueError(f"max_depth must be 1, 2, 3 or 4, got {max_depth!r}")
        self.max_depth = int(max_depth)
        self.observation_space = Text(max_length=50_000, charset=string.printable)
        self.action_space = Text(max_length=MAX_LENGTH, min_length=0, charset=string.printable)
        self._goal: str | None = None
        self._held: dict[str, int] = {}
        self._listed: list[Recipe] = []
        self._success = False

    def tasks(self, split: str) -> list[str]:
        """The goals of a split, depths evenly mixed, in the same order on every machine."""
        if split not in ("train", "dev", "test"):
            raise ValueError(f"no split is called {split!r}; choose from train, dev, test")
        return [goal for goal in splits()[split] if recipe_book().depth[goal] <= self.max_depth]

    def category(self, task: str) -> str:
        """One of "depth 1" to "depth 4"."""
        book = recipe_book()
        is_goal = isinstance(task, str) and task in book.recipes
        if not is_goal or book.depth[task] > self.max_depth:
            raise ValueError(
                f"no task is called {task!r:.80} at max_depth {self.max_depth}; tasks() lists them"
            )
        return f"depth {book.depth[task]}"

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[str, dict]:
        """Start the task in `options`, or one of train drawn from this environment's generator."""
        task = (options or {}).get("task")
        if task is not None:
            self.category(task)  # raises before anything changes
        super().reset(seed=seed)
        if task is None:
            goals = self.tasks("train")
            task = goals[self.np_random.integers(len(goals))]
        self._goal, self._held, self._success = task, {}, False
        self._listed = listed_recipes(task)
        commands = "\n".join(recipe.line() for recipe in self._listed)
        info = {"success": False, "task": task, "category": self.category(task)}
        return f"Crafting commands:\n{commands}\n\nGoal: craft {task}.", info

    def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
        """Carry out one action. One that can't be done costs its turn and changes nothing."""
        if self._goal is None:
            raise ValueError("step() before the first reset(): call reset() to start a task")
        if self._success:
            info = {"success": True, "invalid": True}
            return "The goal is crafted already.", 0.0, True, False, info
        is_invalid = False
        try:
            observation = self._act(action)
        except Refused as refusal:
            observation, is_invalid = str(refusal), True
        info = {"success": self._success, "invalid": is_invalid}
        return observation, float(self._success), self._success, False, info

    def _act(self, action: str) -> str:
        if len(action) > MAX_LENGTH:
            raise Refused(f"An action has at most {MAX_LENGTH} characters.")
        verb, _, rest = " ".join(action.lower().split()).rstrip(" .").partition(" ")
        if verb == "get":
            return self._get(*counted(rest))
        if verb == "craft":
            made, using, parts = rest.partition(" using ")
            if not using:
                raise Refused("Write craft, what to make, using, and what it takes.")
            given: dict[str, int] = defaultdict(int)
            for part in parts.split(","):
                name, count = counted(part)
                given[name] += count
            return self._craft(*counted(made), given)
        if (verb, rest) != ("inventory", ""):
            raise Refused("An action starts with get or craft, or is the word inventory.")
        holds = ", ".join(f"{count} {name}" for name, count in sorted(self._held.items()))
        return f"Inventory: {holds or 'nothing'}."

    def _get(self, name: str, count: int) -> str:
        if name not in recipe_book().raw:
            kinds = recipe_book().kinds.get(name)
            what = f"a kind of it, such as {kinds[0]}" if kinds else "it"
            raise Refused(f"{name} can't be fetched. Craft {what}.")
        self._held[name] = self._held.get(name, 0) + count
        return f"Got {count} {name}."

    def _craft(self, name: str, count: int, given: dict[str, int]) -> str:
        book = recipe_book()
        if name in book.raw:
            raise Refused(f"{name} can't be crafted. Get it.")
        if name in book.kinds:
            raise Refused(
                f"{name} is a general name. Craft one kind, such as {book.kinds[name][0]}."
            )
        ways = book.recipes[name]
        if not any(is_multiple(recipe, count, given) for recipe in ways):
            # Of several ways we name the one that shares most with what was tried.
            near = max(ways, key=lambda recipe: sum(i in given for i, _ in recipe.ingredients))
            raise Refused(f"The command is: {near.line()}; or all its numbers times 2, 3, ...")
        self._held = self._without(given)
        self._held[name] = self._held.get(name, 0) + count
        self._success = name == self._goal
        return f"Crafted {count} {name}."

    def _without(self, given: dict[str, int]) -> dict[str, int]:
        """What would be held once `given` is used up."""
        kinds, left = recipe_book().kinds, dict(self._held)
        # Named kinds first; a general name then takes what they leave.
        for name, count in sorted(given.items(), key=lambda pair: pair[0] in kinds):
            owed = count
            for kind in kinds.get(name, (name,)):
                used = min(owed, left.get(kind, 0))
                left[kind], owed = left.get(kind, 0) - used, owed - used
            if owed:
                raise Refused(f"Not enough {name}: this takes {count}, you hold {count - owed}.")
        return {name: count for name, count in left.items() if count}

    def available_actions(self) -> list[str]:
        """Sensible ones from here: fetch what a listed command takes, craft what can be crafted."""
        if self._goal is None or self._success:
            return []
        raw, actions = recipe_book().raw, {}  # a dict, for its order and to drop repetitions
        for recipe in self._listed:
            actions |= {f"get {n} {name}": None for name, n in recipe.ingredients if name in raw}
            if all(stock(self._held, name) >= n for name, n in recipe.ingredients):
                actions[recipe.line()] = None
        return [*actions, "inventory"]

    def expert(self) -> Iterator[tuple[str, str]]:
        """(thought, action) pairs to the goal, each planned only when asked for, from what is held
        then: other actions may come between."""
        while self._goal is not None and not self._success:
            yield next_action(self._goal, self._held)
