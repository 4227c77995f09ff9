"""
A grid world in words: BabyAI played by errands ("pick up red ball 1"), not key presses.

    task "GoToLocal/17"  ->  a level of minigrid  ->  7x7 view  ->  one line of text
    action text  ->  search over what was seen  ->  low-level moves  ->  the next view

    STARTER, PAPER  the levels, and how many seeds of each make train, dev and test
    visible         the cells in sight
    BabyAI          text, errands, search, reward; then the expert, who knows what the text told it

Levels: Chevalier-Boisvert et al. 2019 (BabyAI), as packaged in minigrid; PAPER is AgentGym-RL's
choice of 40 (arXiv 2509.08755). Read envs/textcraft.py first, env_server.py next. Try it:

    python -m pytest --doctest-modules envs/babyai.py
"""

import json
import re
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from itertools import count, islice, pairwise, zip_longest
from pathlib import Path
from typing import Any

import gymnasium as gym
import minigrid  # noqa: F401  (importing it registers the levels with gymnasium)
from gymnasium.spaces import Text
from minigrid.core.actions import Actions
from minigrid.core.world_object import WorldObj
from minigrid.envs.babyai.core import roomgrid_level
from minigrid.envs.babyai.core.verifier import (
    ActionInstr,
    AndInstr,
    BeforeInstr,
    GoToInstr,
    Instr,
    ObjDesc,
    OpenInstr,
    PickupInstr,
    PutNextInstr,
)

# A level that draws an impossible mission prints so and draws again. Redirecting sys.stdout would
# silence every thread of a server; a `print` in that module's namespace hides the builtin there.
roomgrid_level.print = lambda *words: None

Cell = tuple[int, int]  # x to the right, y down, as minigrid counts
STEPS = ((1, 0), (0, 1), (-1, 0), (0, -1))  # by facing; turning right adds one
TURNS = (
    (),
    (Actions.right,),
    (Actions.right, Actions.right),
    (Actions.left,),
)  # by how much to add
VIEW = 7  # cells ahead, the agent's own row included, and cells across


# --- levels and splits ---

SPLITS = ("train", "dev", "test")
UNSOLVED = Path(__file__).with_name("babyai_unsolved.json")  # written by runs/babyai_splits.py

# fmt: off
# Six small levels, each asking for a skill of its own: turning to look, telling left from right,
# carrying, fetching a key, searching rooms, keeping an order. Values: seeds in train, dev, test.
STARTER = dict.fromkeys(
    ("GoToLocal", "PickupLoc", "PutNextLocalS5N3", "UnlockLocal", "GoToObjMazeS4R2", "GoToSeqS5R2"),
    (400, 20, 40),
)
# The paper trains and tests on 18 of its 40 levels, in six groups. Our source
# gives the groups' sizes only; Pickup takes the first three of five. The dev split is our addition.
GROUPS = {
    "GoTo": (
        "GoToRedBallGrey", "GoToRedBall", "GoToRedBallNoDists", "GoToObjS6", "GoToLocalS8N7",
        "GoToObjMazeS7", "GoToImpUnlock", "GoToSeqS5R2", "GoToRedBlueBall", "GoToDoor",
        "GoToObjDoor",
    ),
    "Pickup": ("Pickup", "UnblockPickup", "PickupLoc"),
    "ActionObjDoor": ("ActionObjDoor",),
    "FindObjS7": ("FindObjS7",),
    "OneRoomS20": ("OneRoomS20",),
    "SynthLoc": ("SynthLoc",),
}
# The other 22 are in no score. With 15 seeds each, a third of a tested level's, they widen what is
# trained on (330 tasks beside 810) without outweighing it.
TRAIN_ONLY = (
    "Open", "OpenRedDoor", "OpenDoorLoc", "OpenRedBlueDoorsDebug", "OpenDoorsOrderN4Debug",
    "PickupDistDebug", "PickupAbove", "PutNextLocalS6N4", "PutNextS7N4Carrying", "Unlock",
    "UnlockLocalDist", "KeyInBox", "UnlockPickupDist", "BlockedUnlockPickup", "UnlockToUnlock",
    "KeyCorridorS6R3", "MoveTwoAcrossS8N9", "SynthS5R2", "SynthSeq", "MiniBossLevel", "BossLevel",
    "BossLevelNoUnlock",
)
# fmt: on
GROUP_OF = {level: group for group, levels in GROUPS.items() for level in levels}
PAPER = dict.fromkeys(GROUP_OF, (45, 5, 5)) | dict.fromkeys(TRAIN_ONLY, (15, 0, 0))
# Splits are disjoint within a set, not between sets: PickupLoc/52 is in starter's train and paper's
# test, so a model trained on one set can't be measured on the other.
LEVELS = {"starter": STARTER, "paper": PAPER}


@cache
def unsolved() -> dict[str, dict[str, str]]:
    """Tasks left out because the expert does not solve them: {level: {seed: reason}}."""
    return json.loads(UNSOLVED.read_text()) if UNSOLVED.exists() else {}


# --- what is in sight ---


def visible(
    is_opaque: Callable[[Cell], bool], position: Cell, facing: int
) -> list[tuple[int, int, Cell]]:
    """Cells in sight as (ahead, side, cell), the agent's own row first; side < 0 is to the left.

    Minigrid's rule, without its rotated copy of the grid: light spreads along a row and into the
    next one, straight and diagonally, through cells that are not opaque; those are lit, no more.
    """
    (x, y), (dx, dy), half = position, STEPS[facing], VIEW // 2
    in_sight, lit = [], [side == 0 for side in range(-half, half + 1)]
    for ahead in range(VIEW):
        cells = [
            (x + ahead * dx - side * dy, y + ahead * dy + side * dx)
            for side in range(-half, half + 1)
        ]
        lit_next = [False] * VIEW
        for sideways, columns in ((1, range(VIEW - 1)), (-1, range(VIEW - 1, 0, -1))):
            for column in columns:
                if lit[column] and not is_opaque(cells[column]):
                    lit[column + sideways] = True
                    lit_next[column] = lit_next[column + sideways] = True
        in_sight += [(ahead, i - half, cell) for i, cell in enumerate(cells) if lit[i]]
        lit = lit_next
    return in_sight


def neighbours(cell: Cell) -> list[Cell]:
    """The four cells around, by facing."""
    return [(cell[0] + dx, cell[1] + dy) for dx, dy in STEPS]


# --- in words ---


def where(ahead: int, side: int) -> str:
    """(2, -1) is "2 ahead 1 left"."""
    words = [f"{ahead} ahead"] if ahead else []
    if side:
        words.append(f"{abs(side)} {'right' if side > 0 else 'left'}")
    return " ".join(words) or "here"  # an open door can be underfoot


def door_state(door: WorldObj) -> str:
    """One word: open, closed or locked."""
    return "open" if door.is_open else "locked" if door.is_locked else "closed"


def wanted(description: ObjDesc) -> str:
    """An object as the goal's own words have it, less the article: "red ball on your left"."""
    places = {"front": " in front of you", "behind": " behind you"}
    place = places.get(description.loc) or (
        f" on your {description.loc}" if description.loc else ""
    )
    color = f"{description.color} " if description.color else ""
    return f"{color}{description.type or 'object'}{place}"


# --- the environment ---

MOVES = ("turn left", "turn right", "move forward", "drop")
ERRANDS = ("go to", "pick up", "open", "go through", "put next to")  # each with an object's name
# What the expert expects behind a door, in new cells. With 1 it searches every corner before it
# opens one, with 25 it leaves rooms half seen; 8 and 15 both lost fewer tasks than either.
ROOM = 10


class BabyAI(gym.Env):
    """Carry out an instruction in rooms of a grid, seeing only what lies ahead.

    Observation  the goal, on reset only; then what is in sight, nearest first, and what is held.
                 Only an object that an observation named can be acted on, later out of sight too
    Action       an errand or a small move (see `instructions`), in any case, with any spacing
    Reward       1.0 on the turn that meets the goal, else 0.0
    Terminated   when the goal is met, or lost for good (some goals forbid the wrong door or object)
    Truncated    when minigrid's count of low-level moves runs out; turns are rollout.py's to count
    Difficulty   the level: its expert needs 2.0 turns on average on GoToLocal, 4.8 on GoToSeqS5R2

    >>> env = BabyAI()
    >>> print(env.reset(options={"task": "PutNextLocalS5N3/1"})[0])
    Goal: put the blue key next to the yellow key.
    See: yellow key 1, 1 ahead 1 right. Wall 2 ahead.
    >>> env.step("pick up blue key 1")[0]
    'You have not seen such an object.'
    >>> env.step("turn right")[0]
    'See: yellow key 1, 1 ahead 1 left; blue key 1, 1 ahead 1 right. Wall 2 ahead.'
    >>> env.step("pick up blue key 1")[0]
    'See: purple box 1, 1 ahead 2 right. Wall 2 ahead. Holding blue key 1.'
    >>> env.step("put next to yellow key 1")[:3]
    ('Goal reached.', 1.0, True)
    """

    max_turns = 20
    instructions = (
        "You walk through rooms on a grid and see only what lies ahead. Reach the goal. "
        "Objects have a name with a number, like red ball 1. Your actions: "
        "turn left, turn right, move forward, drop, go to OBJECT, pick up OBJECT, open OBJECT, "
        "go through DOOR, put next to OBJECT (what you hold is put there). "
        "A locked door opens if you hold a key of its colour."
    )
    observation_space = Text(2000, charset=frozenset(map(chr, [10, *range(32, 127)])))
    action_space = Text(80, charset=frozenset(map(chr, range(32, 127))))

    def __init__(self, levels: str = "starter"):
        if levels not in LEVELS:
            raise ValueError(f"levels must be {' or '.join(LEVELS)}, got {levels!r}")
        self._levels = LEVELS[levels]
        self._grid_world = None  # minigrid's environment, from the first reset on

    # --- tasks ---

    def tasks(self, split: str) -> list[str]:
        """Ids by seed, levels interleaved: the first k of a split are balanced over levels."""
        if split not in SPLITS:
            raise ValueError(f"split must be one of {', '.join(SPLITS)}, got {split!r}")
        index, by_level = SPLITS.index(split), []
        for level, sizes in self._levels.items():
            # One row of solvable seeds is dealt to the three in turn: disjoint by construction.
            solvable = (seed for seed in count() if str(seed) not in unsolved().get(level, {}))
            seeds = islice(solvable, sum(sizes[:index]), sum(sizes[: index + 1]))
            by_level.append([f"{level}/{seed}" for seed in seeds])
        return [task for seeds in zip_longest(*by_level) for task in seeds if task]

    def category(self, task: str) -> str:
        level, _ = self._parse_task(task)
        return GROUP_OF.get(level, level) if self._levels is PAPER else level

    def _parse_task(self, task: str) -> tuple[str, int]:
        # One spelling per task: "07" or an Arabic digit would give a task a second name.
        found = re.fullmatch(r"(\w+)/(0|[1-9][0-9]{0,8})", task) if isinstance(task, str) else None
        if not found or found[1] not in self._levels:
            raise ValueError(
                f"a task is LEVEL/SEED, for example {next(iter(self._levels))}/17, with a seed of "
                f"at most nine digits and a level out of {', '.join(self._levels)}; got {task!r}"
            )
        return found[1], int(found[2])

    # --- Gymnasium's methods ---

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """Begin options["task"], or one of `train` drawn from `seed`; ValueError for a task that is none."""
        super().reset(seed=seed)
        task = (options or {}).get("task")
        if task is None:
            train = self.tasks("train")
            task = train[self.np_random.integers(len(train))]
        level, level_seed = self._parse_task(task)
        # A new level every time: that takes a tenth of a millisecond, and nothing can be carried
        # over from the last episode.
        version = "v1" if level == "GoToObjS6" else "v0"  # minigrid withdrew that level's v0
        world = gym.make(f"BabyAI-{level}-{version}", disable_env_checker=True).unwrapped
        # Minigrid encodes an image after every low-level move, which takes longer than the move,
        # and nobody reads it.
        world.gen_obs = lambda: None
        world.reset(seed=level_seed)
        self._grid_world = world
        self._success, self._ended = False, (False, False)  # ended: terminated, truncated
        self._seen: set[Cell] = set()
        self._names: dict[WorldObj, str] = {}  # an object keeps its name for the whole episode
        self._places: dict[str, Cell] = {}  # where each named object lies; not the one that is held
        self._numbers = Counter()  # how many objects were named "red ball" so far
        self._reach_now = None
        observation = f"Goal: {world.mission}.\n{self._describe()}"
        return observation, {"success": False, "invalid": False, "category": self.category(task)}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Play a whole errand, move by move. What can't be done is told, costs a turn, and moves nothing."""
        if self._grid_world is None:
            raise ValueError("step before reset: call reset first")
        plan = "The episode is over." if self._over else self._plan(action)
        if isinstance(plan, str):
            return plan, 0.0, *self._ended, {"success": self._success, "invalid": True}
        for move in plan:
            # Minigrid judges every low-level move. The errand stops at its verdict: a goal met half
            # way counts, and no later move can undo it. Its reward falls with time; ours does not,
            # so that the mean return is the success rate.
            _, reward, terminated, truncated, _ = self._grid_world.step(move)
            if terminated or truncated:
                break
        self._success = bool(terminated and reward > 0)
        self._ended = (terminated, truncated and not terminated)
        self._reach_now = None
        observation = self._describe()
        if terminated:
            observation = "Goal reached." if self._success else "Goal failed."
        info = {"success": self._success, "invalid": False}
        return observation, float(self._success), *self._ended, info

    def available_actions(self) -> list[str]:
        """Every action that would not be refused now, on objects out of sight too."""
        if self._grid_world is None or self._over:
            return []
        errands = [f"{verb} {name}" for name in self._places for verb in ERRANDS]
        return [words for words in [*MOVES, *errands] if not isinstance(self._plan(words), str)]

    # --- seeing: the world into text ---

    def _at(self, cell: Cell) -> WorldObj | None:
        grid = self._grid_world.grid
        return grid.grid[cell[1] * grid.width + cell[0]]

    def _is_opaque(self, cell: Cell) -> bool:
        thing = self._at(cell)
        return thing is not None and not thing.see_behind()

    @property
    def _over(self) -> bool:
        return any(self._ended)

    @property
    def _position(self) -> Cell:
        x, y = self._grid_world.agent_pos
        return int(x), int(y)

    @property
    def _facing(self) -> int:
        return int(self._grid_world.agent_dir)

    @property
    def _ahead(self) -> Cell:
        return neighbours(self._position)[self._facing]

    def _name(self, thing: WorldObj) -> str:
        if thing not in self._names:
            kind = f"{thing.color} {thing.type}"
            self._numbers[kind] += 1
            self._names[thing] = f"{kind} {self._numbers[kind]}"
        return self._names[thing]

    def _describe(self) -> str:
        """The view as text. Here, and nowhere else, objects get their names."""
        # Only the agent changes the world, so what it saw stays true but for what it moved itself.
        self._places = {n: c for n, c in self._places.items() if self._names.get(self._at(c)) == n}
        things, wall = [], ""
        in_sight = visible(self._is_opaque, self._position, self._facing)
        self._seen.update(cell for _, _, cell in in_sight)
        for ahead, side, cell in sorted(in_sight, key=lambda c: (c[0] + abs(c[1]), c[0], c[1])):
            thing = self._at(cell)
            if thing is None:
                continue
            if thing.type == "wall":
                wall = wall or (f" Wall {ahead} ahead." if side == 0 else "")
                continue
            name = self._name(thing)
            self._places[name] = cell
            state = f" {door_state(thing)}" if thing.type == "door" else ""
            things.append(f"{name}{state}, {where(ahead, side)}")
        held = self._grid_world.carrying
        holding = f" Holding {self._name(held)}." if held else ""
        return f"See: {'; '.join(things) or 'nothing'}.{wall}{holding}"

    # --- acting: text into low-level moves ---

    def _plan(self, action: str) -> list[Actions] | str:
        """Low-level moves for an action, or a sentence that says why there are none."""
        words = " ".join(action.lower().split()).removesuffix(".").rstrip()
        for verb in ERRANDS:
            if words.startswith(verb + " "):
                return self._plan_errand(verb, words.removeprefix(verb + " "))
        if words == "turn left":
            return [Actions.left]
        if words == "turn right":
            return [Actions.right]
        if words == "move forward":
            return [Actions.forward] if self._is_free(self._ahead) else "The way ahead is not free."
        if words == "drop":
            if not self._grid_world.carrying:
                return "You hold nothing."
            return (
                [Actions.drop] if self._at(self._ahead) is None else "The cell ahead is not free."
            )
        return "That is not an action."

    def _plan_errand(self, verb: str, name: str) -> list[Actions] | str:
        if refusal := self._refusal(verb, name):
            return refusal
        cell, reach = self._places[name], self._reach()
        thing = self._at(cell)
        if verb == "put next to":
            return self._plan_put(cell)
        stand = next((spot for spot in reach if spot in neighbours(cell)), None)  # the nearest
        if stand is None:
            return f"There is no free way to {name}."
        if verb == "go through" and cell == self._position:  # in the doorway: step out of it
            return self._walk(reach, stand)
        path = self._walk(reach, stand, face=cell)
        if verb == "go to":
            # Already there: minigrid's idle move, since it judges a goal only after a move.
            return path or [Actions.done]
        if verb == "pick up":
            return [*path, Actions.pickup]
        if verb == "open":
            # An open door is shut and opened again: a goal may ask for that after something else.
            shut_first = thing.type == "door" and thing.is_open
            return [*path, *[Actions.toggle] * (1 + shut_first)]
        unlock = [] if thing.is_open else [Actions.toggle]
        return [*path, *unlock, Actions.forward, Actions.forward]

    def _refusal(self, verb: str, name: str) -> str:
        """Why an errand makes no sense, wherever the agent stands; "" if it does."""
        held = self._grid_world.carrying
        if held and name == self._names[held]:
            return f"You hold {name}."
        if name not in self._places:
            return "You have not seen such an object."
        thing = self._at(self._places[name])
        if verb == "pick up" and thing.type == "door":
            return "A door can not be picked up."
        if verb == "pick up" and held:
            return f"You already hold {self._names[held]}."
        if verb == "put next to" and not held:
            return "You hold nothing."
        if verb == "go through" and thing.type != "door":
            return f"{name} is not a door."
        if verb == "open" and thing.type not in ("door", "box"):
            return f"{name} can not be opened."
        if verb in ("open", "go through") and self._lacks_key(thing):
            return f"{name} is locked and you hold no {thing.color} key."
        return ""

    def _plan_put(self, cell: Cell) -> list[Actions] | str:
        """To the nearest place that has a free cell beside `cell` ahead, and drop."""
        reach = self._reach()
        spots = [c for c in neighbours(cell) if c in self._seen and self._at(c) is None]
        for stand in reach:
            for spot in neighbours(stand):
                if spot in spots:
                    return [*self._walk(reach, stand, face=spot), Actions.drop]
        return "There is no free place for it."

    def _lacks_key(self, thing: WorldObj) -> bool:
        held = self._grid_world.carrying
        return (
            thing.type == "door"
            and thing.is_locked
            and not (held and held.type == "key" and held.color == thing.color)
        )

    def _is_free(self, cell: Cell) -> bool:
        """Can be walked on: empty, or an open door. Only an errand on a closed one opens it."""
        thing = self._at(cell)
        return thing is None or thing.can_overlap()

    def _reach(self) -> dict[Cell, Cell | None]:
        """Cells the agent can walk to, nearest first, each with the cell before it."""
        if self._reach_now is None:  # asked for once per object by available_actions
            self._reach_now = self._spread(self._is_free)
        return self._reach_now

    def _spread(self, is_free: Callable[[Cell], bool]) -> dict[Cell, Cell | None]:
        """Breadth-first search from the agent over seen, free cells: {cell: the cell before it}."""
        before: dict[Cell, Cell | None] = {self._position: None}
        steps = STEPS[self._facing :] + STEPS[: self._facing]  # straight on first: fewer turns
        queue = deque(before)
        while queue:
            x, y = cell = queue.popleft()
            for dx, dy in steps:
                there = (x + dx, y + dy)
                if there not in before and there in self._seen and is_free(there):
                    before[there] = cell
                    queue.append(there)
        return before

    def _walk(
        self, before: dict[Cell, Cell | None], stand: Cell, face: Cell | None = None
    ) -> list[Actions]:
        """Low-level moves along the path found to `stand`, then a turn to its neighbour `face`."""
        path, cell = [face] if face else [], stand
        while cell is not None:
            path.append(cell)
            cell = before[cell]
        path.reverse()
        moves, facing = [], self._facing
        for here, there in pairwise(path):
            wanted = neighbours(here).index(there)
            moves += TURNS[(wanted - facing) % 4]
            facing = wanted
            if there != face:
                moves.append(Actions.forward)
        return moves

    # --- the expert ---

    def expert(self) -> Iterator[tuple[str, str]]:
        """(thought, action) until the episode is over or nothing is left to try.

        Each pair follows from the present state alone, so someone else may act in between. It may
        use what the text has said, and what a reader of all turns could work out: which object is
        meant by "on your left" when the first view has turned away, and how far the goal has come.
        """
        while self._grid_world is not None and not self._over:
            choice = self._advise()
            if choice is None:
                return
            yield choice

    def _advise(self) -> tuple[str, str] | None:
        thought, part = self._next_part(self._grid_world.instrs)
        if not isinstance(part, PutNextInstr):
            verb = {GoToInstr: "go to", PickupInstr: "pick up", OpenInstr: "open"}[type(part)]
            return self._pursue(thought, verb, part.desc)
        held = self._grid_world.carrying
        if held in part.desc_move.obj_set:
            thought += f"I hold {self._names[held]}. "
            return self._pursue(thought, "put next to", part.desc_fixed)
        return self._pursue(thought, "pick up", part.desc_move)

    def _next_part(self, instr: Instr) -> tuple[str, ActionInstr]:
        """The part of the goal that is due, after words that say how far the goal has come.

        The words are the policy's only memory of it: no observation says that a part is done.
        """
        if isinstance(instr, ActionInstr):
            return "", instr
        parts = [(instr.instr_a, instr.a_done), (instr.instr_b, instr.b_done)]
        if isinstance(instr, AndInstr):
            left = [part for part, done in parts if done != "success"]
            return ("One done. " if len(left) == 1 else "Two to do. "), left[0]
        if not isinstance(instr, BeforeInstr):
            parts.reverse()  # "a after you b"
        (first, first_done), (second, _) = parts
        words, part = self._next_part(second if first_done == "success" else first)
        return ("First part done. " if first_done == "success" else "First part. ") + words, part

    def _pursue(self, thought: str, verb: str, target: ObjDesc) -> tuple[str, str] | None:
        """Do `verb` on the nearest object that fits, or whatever has to come before that."""
        thought += f"I want {wanted(target)}."
        held = self._grid_world.carrying
        known = [name for name, c in self._places.items() if self._at(c) in target.obj_set]
        if held and (verb == "pick up" and known or held in target.obj_set and not known):
            return self._put_down(f"{thought} I hold {self._names[held]}.")
        if not known:
            return self._explore(thought)
        if possible := self._possible(verb, known):
            return f"{thought} I see {possible[0]}.", f"{verb} {possible[0]}"
        name = known[0]
        if verb == "open" and self._lacks_key(self._at(self._places[name])):
            missing = f"{thought} {name} is locked. I want {name.split()[0]} key."
            return self._fetch_key(thought, name) or self._explore(missing)
        return self._clear_way(thought, name) or self._explore(thought)

    def _possible(self, verb: str, names: Iterable[str]) -> list[str]:
        """Those of the named objects on which the errand can be done now, nearest first."""
        plans = {name: self._plan_errand(verb, name) for name in names}
        possible = [name for name, plan in plans.items() if not isinstance(plan, str)]
        return sorted(possible, key=lambda name: len(plans[name]))

    def _explore(self, thought: str) -> tuple[str, str] | None:
        """The action that promises most new cells a turn; failing that, whatever leads to some."""
        hiding = [name for name, cell in self._places.items() if self._hides_something(cell)]
        promises = [
            (self._promise(turn=1), "I look around.", "turn right"),
            (self._promise(turn=3), "I look around.", "turn left"),
            (self._promise(turn=2) / 2, "I look around.", "turn right"),  # the first of two turns
            (self._promise(forward=True), "I walk on.", "move forward"),
            *(
                (ROOM, f"I try {d}.", f"go through {d}")
                for d in self._possible("go through", hiding)
            ),
        ]
        promise, words, action = max(promises, key=lambda option: option[0])  # the first of equals
        if promise > 0:
            return f"{thought} {words}", action
        reach = self._reach()
        border = next((c for c in reach if not self._seen.issuperset(neighbours(c))), None)
        if border:
            move = self._walk(reach, border)[0]
            turns = {Actions.left: "turn left", Actions.right: "turn right"}
            return f"{thought} I walk on.", turns.get(move, "move forward")
        for name in hiding:
            if choice := self._fetch_key(thought, name) or self._clear_way(thought, name):
                return choice
        boxes = [name for name, cell in self._places.items() if self._at(cell).type == "box"]
        for name in self._possible("open", boxes):  # the last hope: opening destroys a box
            return f"{thought} I open {name}.", f"open {name}"
        return None

    def _hides_something(self, cell: Cell) -> bool:
        """A door with a side that was never seen."""
        return self._at(cell).type == "door" and not self._seen.issuperset(neighbours(cell))

    def _promise(self, turn: int = 0, forward: bool = False) -> int:
        """How many new cells would come into sight, if what was never seen were empty."""
        if forward and not self._is_free(self._ahead):
            return 0
        in_sight = visible(
            lambda cell: cell in self._seen and self._is_opaque(cell),
            self._ahead if forward else self._position,
            (self._facing + turn) % 4,
        )
        return sum(cell not in self._seen for _, _, cell in in_sight)

    def _fetch_key(self, thought: str, name: str) -> tuple[str, str] | None:
        """Pick up a key for a locked door, if one is known and can be got at."""
        door, held = self._at(self._places[name]), self._grid_world.carrying
        if not self._lacks_key(door):
            return None
        # The hand that clears the way to the door must be empty, so that comes before the key.
        if choice := self._clear_way(thought, name):
            return choice
        keys = [n for n, c in self._places.items() if self._at(c).type == "key"]
        fitting = [n for n in keys if n.startswith(door.color)]
        for key in self._possible("go to", fitting):
            thought = f"{thought} {name} is locked. I want {door.color} key. I see {key}."
            return self._put_down(thought) if held else (thought, f"pick up {key}")
        return None

    def _clear_way(self, thought: str, name: str) -> tuple[str, str] | None:
        """Pick up the first thing that bars the way to an object; None if nothing does."""
        beside = neighbours(self._places[name])
        if any(cell in self._reach() for cell in beside):
            return None
        before = self._spread(lambda c: self._is_free(c) or self._at(c).can_pickup())
        cell, blocker = next((c for c in before if c in beside), None), None
        while cell is not None:
            if not self._is_free(cell):
                blocker = self._names.get(self._at(cell))
            cell = before[cell]
        if blocker is None:
            return None
        thought = f"{thought} {blocker} is in the way."
        if self._grid_world.carrying:
            return self._put_down(thought)
        return thought, f"pick up {blocker}"

    def _put_down(self, thought: str) -> tuple[str, str]:
        """Drop what is held, after turning to a cell where it bars no way."""
        thought += " I put it down."
        around = neighbours(self._position)
        for action, turn in (("drop", 0), ("turn right", 1), ("turn left", 3), ("turn right", 2)):
            if self._is_harmless(around[(self._facing + turn) % 4]):
                return thought, action
        return thought, "drop" if self._at(self._ahead) is None else "turn right"

    def _is_harmless(self, cell: Cell) -> bool:
        """Free, beside no door or object whose only access it may be, and cutting nothing off."""
        if cell not in self._seen or self._at(cell) is not None:
            return False
        if any(thing and thing.type != "wall" for thing in map(self._at, neighbours(cell))):
            return False
        rest = self._spread(lambda c: c != cell and self._is_free(c))
        return len(rest) == len(self._reach()) - 1
