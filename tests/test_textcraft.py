"""
TextCraft's recipe book against its published numbers, and each rule as a worked example.

What every environment must do is in test_envs.py; here is what only this one does.
"""

import json
import random
import re
import string
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from importlib import metadata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envs import make, textcraft
from envs.textcraft import GROUPS, MAX_COUNT, Recipe, TextCraft, listed_recipes, recipe_book, show

SPLITS = ("train", "dev", "test")
GOALS = [goal for split in SPLITS for goal in TextCraft().tasks(split)]


def start(task: str, *actions: str) -> TextCraft:
    """A game some way in; every action of the way is one that works."""
    env = TextCraft()
    env.reset(options={"task": task})
    for action in actions:
        observation, *_, info = env.step(action)
        assert not info["invalid"], observation
    return env


def refusal(env: TextCraft, action: str) -> str:
    """What the environment says to an action that it must refuse, without any other effect."""
    before = env.step("inventory")[0], env.available_actions()
    observation, reward, terminated, truncated, info = env.step(action)
    assert (reward, terminated, truncated) == (0.0, False, False)
    assert info == {"success": False, "invalid": True}
    assert (env.step("inventory")[0], env.available_actions()) == before
    return observation


# --- the recipe book ---


def test_the_published_numbers():
    book = recipe_book()
    assert len(GOALS) == len(book.recipes) == 544
    assert Counter(book.depth[goal] for goal in GOALS) == {1: 125, 2: 291, 3: 117, 4: 11}
    assert [goal for goal in sorted(GOALS) if book.depth[goal] == 4] == [
        *("cyan banner", "gray banner", "hopper minecart", "lectern", "lime banner", "lodestone"),
        *("polished andesite slab", "polished andesite stairs"),
        *("polished granite slab", "polished granite stairs", "purple banner"),
    ]


def test_recipes_as_in_the_files():
    book = recipe_book()
    # shaped: "###" over " S " would be three of # and one of S, in the order of the file's keys
    assert book.recipes["oak boat"] == (Recipe(1, "oak boat", (("oak planks", 5),)),)
    assert book.recipes["painting"] == (Recipe(1, "painting", (("stick", 8), ("wool", 1))),)
    # shapeless: an ingredient named twice is two of it
    assert Recipe(2, "diorite", (("quartz", 2), ("cobblestone", 2))) in book.recipes["diorite"]
    # "coal or charcoal" is coal
    assert book.recipes["torch"] == (Recipe(4, "torch", (("stick", 1), ("coal", 1))),)
    assert book.recipes["oak boat"][0].line() == "craft 1 oak boat using 5 oak planks"
    assert book.recipes["oak boat"][0].line(2) == "craft 2 oak boat using 10 oak planks"


def test_recipes_left_out():
    book = recipe_book()
    # They would close a cycle with what comes before them in the alphabet ...
    for item, made_of in (("gold nugget", "gold ingot"), ("iron nugget", "iron ingot")):
        assert item in book.raw
        assert item in dict(book.recipes[made_of][0].ingredients)
    assert "honey bottle" in book.raw and "honey block" in book.recipes
    # ... and these undo a block. Two blocks, or a block and something, are as good as anything.
    assert "diamond" in book.raw and "diamond block" in book.recipes
    assert {"smooth stone", "netherite scrap"} <= book.raw  # furnace work is no crafting
    for ways in book.recipes.values():
        for recipe in ways:
            assert len(recipe.ingredients) > 1 or not recipe.ingredients[0][0].endswith(" block")


def test_sixteen_tags_three_of_them_general_names():
    book, tags = recipe_book(), set()
    folder = metadata.distribution("textcraft").locate_file("textcraft/data/recipes")
    for path in folder.glob("*.json"):
        if '"minecraft:crafting_shap' in (text := path.read_text()):
            tags.update(show(tag) for tag in re.findall('"tag": "(.*?)"', text))
    assert len(tags) == 16
    assert set(book.kinds) == set(GROUPS) == tags - book.raw
    assert {"oak logs", "coals", "stone tool materials"} <= book.raw
    woods = {"acacia", "birch", "crimson", "dark oak", "jungle", "oak", "spruce", "warped"}
    assert set(book.kinds["planks"]) == {f"{wood} planks" for wood in woods}
    assert set(book.kinds["wooden slabs"]) == {f"{wood} slab" for wood in woods}
    assert len(book.kinds["wool"]) == 15 and "red wool" in book.kinds["wool"]
    # the cheapest first: green dye comes out of a furnace, so it is raw here; black dye is crafted
    assert book.kinds["wool"].index("green wool") < book.kinds["wool"].index("black wool")
    assert not set(book.kinds) & (set(book.recipes) | book.raw)


def test_no_recipe_leads_back_to_its_item():
    book = recipe_book()
    for name, ways in book.recipes.items():
        for recipe in ways:
            for ingredient, _ in recipe.ingredients:
                for kind in book.kinds.get(ingredient, (ingredient,)):
                    assert book.order[kind] < book.order[name]


def test_no_recipe_takes_a_general_name_beside_one_of_its_kinds():
    """Otherwise it would be open which of the two an ingredient counts for."""
    for ways in recipe_book().recipes.values():
        for recipe in ways:
            names = {name for name, _ in recipe.ingredients}
            assert not any(names & set(recipe_book().kinds.get(name, ())) for name in names)


# --- tasks ---


def test_splits_by_depth():
    env = TextCraft()
    by_depth = {split: Counter(map(env.category, env.tasks(split))) for split in SPLITS}
    assert by_depth == {
        "train": {"depth 1": 78, "depth 2": 230, "depth 3": 80, "depth 4": 6},
        "dev": {"depth 1": 16, "depth 2": 20, "depth 3": 12, "depth 4": 2},
        "test": {"depth 1": 31, "depth 2": 41, "depth 3": 25, "depth 4": 3},
    }
    # Pinned: if a change of the rule moved them, results of before would be of another test.
    assert env.tasks("test")[:3] == ["red sandstone stairs", "daylight detector", "andesite stairs"]
    assert env.tasks("dev")[:3] == ["wooden shovel", "stone stairs", "dark prismarine slab"]


def test_a_prefix_of_a_split_is_a_fair_sample():
    env = TextCraft()
    for split in SPLITS:
        depths = [env.category(task) for task in env.tasks(split)]
        share = {depth: count / len(depths) for depth, count in Counter(depths).items()}
        for k in range(1, len(depths)):
            for depth, part in share.items():
                assert abs(depths[:k].count(depth) - k * part) < 1.6


def test_max_depth():
    for given_as in (2, "2"):  # from Python, and from a command line
        env = make("textcraft", max_depth=given_as)
        assert [len(env.tasks(split)) for split in SPLITS] == [308, 36, 72]
        assert env.tasks("test") == [
            task for task in TextCraft().tasks("test") if TextCraft().category(task) < "depth 3"
        ]
        with pytest.raises(ValueError, match="lectern.*max_depth 2;"):
            env.reset(options={"task": "lectern"})
    for wrong in (0, 5, "", "two", None, 1.5, True, "2 "):
        with pytest.raises(ValueError, match="max_depth must be 1, 2, 3 or 4"):
            make("textcraft", max_depth=wrong)
    drawn = {TextCraft(max_depth=1).reset(seed=seed)[1]["category"] for seed in range(20)}
    assert drawn == {"depth 1"}


# --- prompts ---


@pytest.fixture(scope="module")
def prompts() -> dict[str, str]:
    env = TextCraft()
    return {goal: env.reset(options={"task": goal})[0] for goal in GOALS}


def test_the_form_of_a_prompt(prompts):
    for goal, prompt in prompts.items():
        first, *commands, empty, last = prompt.split("\n")
        assert (first, empty, last) == ("Crafting commands:", "", f"Goal: craft {goal}.")
        assert len(set(commands)) == len(commands)
        for command in commands:
            assert re.fullmatch(r"craft \d+ [a-z' ]+ using \d+ [a-z' ]+(, \d+ [a-z' ]+)*", command)


def test_a_prompt_holds_all_that_is_needed_and_ten_distractors_at_most():
    book = recipe_book()
    for goal in GOALS:
        listed = listed_recipes(goal)
        reachable, grew = {goal}, True
        while grew:  # the slow and obvious way to the same set
            size = len(reachable)
            for name in sorted(reachable):
                reachable.update(book.kinds.get(name, ()))
                for recipe in book.recipes.get(name, ()):
                    reachable.update(ingredient for ingredient, _ in recipe.ingredients)
            grew = len(reachable) > size
        needed = {recipe for name in reachable for recipe in book.recipes.get(name, ())}
        assert needed <= set(listed)
        used = {name for recipe in needed for name, _ in recipe.ingredients}
        others = set(listed) - needed
        candidates = [
            recipe
            for ways in book.recipes.values()
            for recipe in set(ways) - needed
            if used & {name for name, _ in recipe.ingredients}
        ]
        assert len(others) == min(10, len(candidates))
        assert others <= set(candidates)


def test_prompts_do_not_touch_or_heed_the_global_generator(prompts):
    random.seed(1)
    state = random.getstate()
    assert TextCraft().reset(options={"task": "beehive"}, seed=3)[0] == prompts["beehive"]
    assert random.getstate() == state


def test_threads_read_the_same_prompts(prompts):
    with ThreadPoolExecutor(8) as pool:
        again = list(pool.map(lambda g: TextCraft().reset(options={"task": g})[0], GOALS))
    assert again == list(prompts.values())


def test_playing_changes_no_recipe_and_no_other_prompt(prompts):
    """The original adds to its recipe lists on every reset: prompts depend on the games before."""
    before = deepcopy(recipe_book())
    for goal in GOALS[:100]:
        env = start(goal)
        for _, action in env.expert():
            env.step(action)
    assert recipe_book() == before
    assert {g: TextCraft().reset(options={"task": g})[0] for g in GOALS} == prompts


def test_no_raw_id_in_any_text(prompts):
    shown = [*prompts.values(), *GOALS, TextCraft.instructions]
    for goal in GOALS:
        env = start(goal)
        for thought, action in env.expert():
            shown += [thought, action, *env.available_actions(), env.step("inventory")[0]]
            shown += [env.step("get 1 minecraft:oak_logs")[0], env.step(action)[0]]
    allowed = set(string.ascii_letters + string.digits + " \n'.,;:()<>")
    for text in shown:
        assert set(text) <= allowed and "minecraft" not in text.replace("minecraftoaklogs", "")


def test_instructions_name_the_verbs_and_explain_general_names():
    for word in ("get <number> <item>", "craft <number>", " using ", "inventory", *GROUPS):
        assert word in TextCraft.instructions


# --- the rules ---


def test_get_takes_any_raw_item_listed_or_not():
    env = start("blue ice", "get 2 oak logs", "get 3 oak logs", "get 1 coal")
    assert env.step("inventory")[0] == "Inventory: 1 coal, 5 oak logs."
    assert refusal(env, "get 1 stick") == "stick can't be fetched. Craft it."
    assert refusal(env, "get 1 planks") == (
        "planks can't be fetched. Craft a kind of it, such as acacia planks."
    )
    assert refusal(env, "get 1 unicorn") == "There is no item called unicorn."
    assert refusal(env, "get oak logs") == "Write a number before every item, such as 2 stick."


def test_craft_uses_up_and_makes():
    env = start("beehive", "get 2 oak logs")
    assert env.step("craft 4 oak planks using 1 oak logs")[0] == "Crafted 4 oak planks."
    assert env.step("inventory")[0] == "Inventory: 1 oak logs, 4 oak planks."
    assert env.step("craft 4 oak planks using 1 oak logs")[0] == "Crafted 4 oak planks."
    assert env.step("inventory")[0] == "Inventory: 8 oak planks."
    assert refusal(env, "craft 4 oak planks using 1 oak logs") == (
        "Not enough oak logs: this takes 1, you hold 0."
    )


def test_one_multiple_throughout():
    env = start("beehive", "get 50 oak logs")
    assert env.step("craft 12 oak planks using 3 oak logs")[0] == "Crafted 12 oak planks."
    right = (
        "The command is: craft 4 oak planks using 1 oak logs; or all its numbers times 2, 3, ..."
    )
    for wrong in ("4 oak planks using 2", "8 oak planks using 1", "1 oak planks using 1"):
        assert refusal(env, f"craft {wrong} oak logs") == right
    assert refusal(env, "craft 6 oak planks using 1 oak logs") == right
    assert refusal(env, "craft 4 oak planks using 1 oak logs, 1 coal") == right
    assert refusal(env, "craft 4 oak planks using 1 birch logs") == right


def test_the_reply_names_the_nearest_of_several_recipes():
    env = start("stick")
    assert "using 2 planks" in refusal(env, "craft 1 stick using 1 planks")
    assert "using 2 bamboo" in refusal(env, "craft 1 stick using 1 bamboo")


def test_ingredients_in_any_order_and_in_parts():
    env = start("torch", "get 2 bamboo", "craft 1 stick using 2 bamboo", "get 1 coal")
    assert env.step("craft 4 torch using 1 coal, 1 stick")[1:3] == (1.0, True)
    env = start("stick", "get 2 bamboo")
    assert env.step("craft 1 stick using 1 bamboo, 1 bamboo")[1:3] == (1.0, True)


def test_a_general_name_takes_any_kind_and_kinds_mixed():
    book = recipe_book()
    for kind in book.kinds["planks"]:
        logs = book.recipes[kind][0].ingredients[0][0]
        way = (f"get 1 {logs}", f"craft 4 {kind} using 1 {logs}")
        for used in (f"2 {kind}", "2 planks"):
            env = start("stick", *way)
            assert env.step(f"craft 4 stick using {used}")[1:3] == (1.0, True)
    two_kinds = ["get 1 oak logs", "craft 4 oak planks using 1 oak logs"]
    two_kinds += [action.replace("oak", "birch") for action in two_kinds]
    for used in ("8 planks", "4 oak planks, 4 birch planks", "5 planks, 3 birch planks"):
        env = start("chest", *two_kinds)
        assert env.step(f"craft 1 chest using {used}")[1:3] == (1.0, True)
    env = start("chest", *two_kinds)
    assert refusal(env, "craft 1 chest using 5 oak planks, 3 planks") == (
        "Not enough oak planks: this takes 5, you hold 4."
    )
    assert refusal(env, "craft 2 chest using 16 planks") == (
        "Not enough planks: this takes 16, you hold 8."
    )


def test_wooden_slabs_and_wool_are_general_too():
    env = start("composter", "get 2 oak logs", "craft 8 oak planks using 2 oak logs")
    env.step("craft 12 oak slab using 6 oak planks")
    assert refusal(env, "get 7 wooden slabs").startswith("wooden slabs can't be fetched.")
    assert env.step("craft 1 composter using 7 oak slab")[1:3] == (1.0, True)
    ways = recipe_book().recipes["painting"]
    assert textcraft.is_multiple(ways[0], 1, {"stick": 8, "red wool": 1})
    assert not textcraft.is_multiple(ways[0], 1, {"stick": 8, "red carpet": 1})


def test_a_kind_is_asked_for_where_a_kind_is_needed():
    """An oak boat is of oak planks: neither birch nor the general name will do."""
    env = start("oak boat", "get 2 birch logs", "craft 8 birch planks using 2 birch logs")
    for planks in ("birch planks", "planks"):
        assert "using 5 oak planks" in refusal(env, f"craft 1 oak boat using 5 {planks}")
    assert refusal(env, "craft 4 planks using 1 oak logs") == (
        "planks is a general name. Craft one kind, such as acacia planks."
    )
    assert refusal(env, "craft 1 oak logs using 1 stick") == "oak logs can't be crafted. Get it."


def test_reward_comes_with_the_goal_only():
    env = start("stick")
    assert env.step("get 2 bamboo")[1:] == (0.0, False, False, {"success": False, "invalid": False})
    done = env.step("craft 1 stick using 2 bamboo")
    assert done[1:] == (1.0, True, False, {"success": True, "invalid": False})
    after = env.step("get 2 bamboo")
    assert after[1:] == (0.0, True, False, {"success": True, "invalid": True})
    assert env.available_actions() == [] and list(env.expert()) == []
    assert env.reset(options={"task": "stick"})[1]["success"] is False
    assert env.step("inventory")[0] == "Inventory: nothing."


def test_an_item_whose_name_is_in_the_goals_is_not_the_goal():
    env = start("sticky piston", "get 2 bamboo")
    assert env.step("craft 1 stick using 2 bamboo")[1:3] == (0.0, False)


def test_a_step_before_reset_is_the_callers_mistake():
    with pytest.raises(ValueError, match="reset"):
        TextCraft().step("inventory")


# --- the grammar ---


@pytest.mark.parametrize(
    "action",
    [
        "GET 2 Oak Logs",
        "  get\t2   oak logs\n",
        "get 2 oak logs.",
        "get 002 oak logs",
        "get 2 oak logs ...",
    ],
)
def test_spelling_is_forgiven(action):
    env = start("beehive")
    assert env.step(action)[0] == "Got 2 oak logs."


def test_craft_spelling_is_forgiven():
    env = start("painting", "get 8 bamboo", "get 2 coal", "craft 4 stick using 8 bamboo")
    assert env.step(" Craft 8 Torch  USING 2 coal ,2 stick. ")[0] == "Crafted 8 torch."
    assert env.step("Inventory.")[0] == "Inventory: 2 stick, 8 torch."


@pytest.mark.parametrize("count", ["0", "-3", "1000", "1" + "0" * 30, "9" * 900, "0" * 50 + "1"])
def test_absurd_counts(count):
    env = start("beehive", "get 1 oak logs")
    limit = f"A count goes from 1 to {MAX_COUNT}."
    assert refusal(env, f"get {count} oak logs") == limit
    assert refusal(env, f"craft {count} oak planks using 1 oak logs") == limit
    assert refusal(env, f"craft 4 oak planks using {count} oak logs") == limit
    assert env.step(f"get {MAX_COUNT} oak logs")[0] == "Got 999 oak logs."


@pytest.mark.parametrize(
    "action, reply",
    [
        ("", "An action starts with get or craft, or is the word inventory."),
        ("take 1 oak logs", "An action starts with get or craft, or is the word inventory."),
        ("inventory now", "An action starts with get or craft, or is the word inventory."),
        ("get", "Write a number before every item, such as 2 stick."),
        ("get two oak logs", "Write a number before every item, such as 2 stick."),
        ("get ٣ oak logs", "Write a number before every item, such as 2 stick."),
        ("get 1.5 oak logs", "Write a number before every item, such as 2 stick."),
        ("craft 4 oak planks", "Write craft, what to make, using, and what it takes."),
        ("craft 4 oak planks using", "Write craft, what to make, using, and what it takes."),
        ("craft oak planks using 1 oak logs", "Write a number before every item, such as 2 stick."),
        (
            "craft 4 oak planks using 1 oak logs,",
            "Write a number before every item, such as 2 stick.",
        ),
        ("get 1 oak_logs", "There is no item called oaklogs."),
        ("get 1 \ud800<b>", "There is no item called b."),
        ("get 1 " + "x" * 900, f"There is no item called {'x' * 40}."),
        ("get 1 oak logs" + " " * 1000, "An action has at most 1000 characters."),
    ],
)
def test_replies_to_what_is_not_an_action(action, reply):
    assert refusal(start("beehive"), action) == reply


VERBS = ["get", "craft", "using", "inventory", "1", "2", "8", "0", "-1", ",", "."]
NAMES = ["oak logs", "oak planks", "planks", "birch planks", "stick", "bamboo", "wooden slabs"]
WORDS = st.sampled_from(VERBS + NAMES)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.lists(WORDS, max_size=9).map(" ".join), max_size=6))
def test_what_is_held_is_never_negative_nor_from_nothing(actions):
    """Words of the grammar in any order: each action does as told in full, or nothing at all."""
    env = start("beehive")
    for action in actions:
        before = env.step("inventory")[0]
        *_, info = env.step(action)
        after = env.step("inventory")[0]
        assert re.fullmatch(r"Inventory: (nothing|[1-9]\d* [a-z ]+(, [1-9]\d* [a-z ]+)*)\.", after)
        assert not info["invalid"] or after == before


# --- the expert ---


def test_the_expert_solves_all_goals_in_few_turns():
    turns = {}
    for goal in GOALS:
        env = start(goal)
        for count, (thought, action) in enumerate(env.expert(), 1):
            observation, _, terminated, _, info = env.step(action)
            assert not info["invalid"] and count <= TextCraft.max_turns, (goal, observation)
            assert len(thought.split()) < 60
            # MAX_COUNT leaves room, as its comment says
            assert max(map(int, re.findall(r"\d+", action)), default=0) <= MAX_COUNT / 3
        assert terminated and info["success"]
        turns.setdefault(env.category(goal), []).append(count)
    longest = {depth: max(counts) for depth, counts in turns.items()}
    assert longest == {"depth 1": 6, "depth 2": 7, "depth 3": 11, "depth 4": 11}


def test_the_experts_thoughts():
    env, spoken = start("torch"), []
    for thought, action in env.expert():
        spoken += [thought, action]
        env.step(action)
    stick = "For 4 torch I need 1 stick. To craft 1 stick I need 2 bamboo."
    torch = "To craft 4 torch I need 1 stick and 1 coal."
    assert spoken == [
        *(f"{stick} I have 0 bamboo. I need 2 bamboo.", "get 2 bamboo"),
        *(f"{stick} I have 2 bamboo.", "craft 1 stick using 2 bamboo"),
        *(f"{torch} I have 1 stick and 0 coal. I need 1 coal.", "get 1 coal"),
        *(f"{torch} I have 1 stick and 1 coal.", "craft 4 torch using 1 stick, 1 coal"),
    ]


def test_the_expert_uses_what_is_there():
    # a beehive takes 6 planks: of acacia, the first kind, unless another is at hand
    four, eight = (f"craft {4 * n} birch planks using {n} birch logs" for n in (1, 2))
    assert next(start("beehive").expert())[1] == "get 2 acacia logs"
    assert next(start("beehive", "get 2 birch logs", eight).expert())[1] == "get 3 honeycomb"
    assert next(start("beehive", "get 2 birch logs", four).expert())[1] == four
    # 8 planks of one kind or several: only what no kind makes up for is missing
    held = {"oak planks": 4, "birch planks": 3}
    assert textcraft.plan("chest", held) == {"chest": 1, "oak planks": 1, "oak logs": 1}
    # two uses of one item are one trip: planks for the barrel and for its slabs
    assert next(start("barrel").expert())[1] == "get 3 acacia logs"


def test_the_expert_recovers_from_random_actions():
    chance = random.Random("recover")
    for goal in GOALS[::4]:
        env = start(goal)
        expert = env.expert()
        for _ in range(60):
            if chance.random() < 0.3:
                env.step(chance.choice(env.available_actions()))
            elif (advice := next(expert, None)) is None:
                break
            else:
                assert not env.step(advice[1])[-1]["invalid"], (goal, advice)
            if env.available_actions() == []:
                break
        assert env.available_actions() == [], goal


# --- available actions ---


def test_every_recipe_line_is_an_action_as_it_stands(prompts):
    """With its ingredients at hand, each line of each prompt can be sent back as it was read."""
    lines = {line for prompt in prompts.values() for line in prompt.split("\n")[1:-2]}
    assert len(lines) == sum(map(len, recipe_book().recipes.values())) == 612
    for ways in recipe_book().recipes.values():
        for recipe in ways:
            env = start(
                "blue ice"
            )  # nothing is made of it, so no way to an ingredient ends the game
            for name, count in recipe.ingredients:
                hold(env, name, count)
            assert recipe.line() in lines
            assert env.step(recipe.line())[0] == f"Crafted {recipe.count} {recipe.item}."


def hold(env: TextCraft, name: str, count: int) -> None:
    """Come by `count` of an item by the rules alone, through the commands that make it."""
    book = recipe_book()
    name = book.kinds.get(name, (name,))[-1]
    if name in book.raw:
        assert not env.step(f"get {count} {name}")[-1]["invalid"]
        return
    recipe = book.recipes[name][-1]
    repeats = -(-count // recipe.count)
    for below, each in recipe.ingredients:
        hold(env, below, each * repeats)
    observation, *_, info = env.step(recipe.line(repeats))
    assert not info["invalid"], observation


def test_available_actions_by_hand():
    env = start("blue ice")
    assert env.available_actions() == ["get 9 ice", "inventory"]
    env.step("get 9 ice")
    crafts = ["craft 1 packed ice using 9 ice", "inventory"]
    assert env.available_actions() == ["get 9 ice", *crafts]
    assert TextCraft().available_actions() == []


def test_info_travels_over_http():
    _, info = TextCraft().reset(options={"task": "lectern"})
    assert json.loads(json.dumps(info)) == {
        "success": False,
        "task": "lectern",
        "category": "depth 4",
    }
