"""
Which BabyAI tasks are fair: the expert plays each once, and what it does not solve is left out.

    seeds 0, 1, 2, ... of a level  ->  expert, max_turns  ->  envs/babyai_unsolved.json, a table

With tasks that nobody solves in time, no result could reach 100 %, and nobody would know what it
could reach. The price: tasks that are hard for this expert are rarer here than in the level. Run it
again after a change of the expert or of minigrid's version (ten seconds):

    python runs/babyai_splits.py
"""

import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from envs.babyai import LEVELS, UNSOLVED, BabyAI


def play(env: BabyAI, task: str) -> tuple[str, int, list[str]]:
    """The expert's game: ("" or why it was lost, turns, observations)."""
    observation, info = env.reset(options={"task": task})
    observations = [observation]
    for turn, (_, action) in enumerate(env.expert(), start=1):
        observation, _, terminated, truncated, info = env.step(action)
        observations.append(observation)
        if terminated or truncated or turn == env.max_turns:
            break
    turns = len(observations) - 1
    if info["success"]:
        return "", turns, observations
    if turns == env.max_turns:
        return f"not solved in {turns} turns", turns, observations
    if turns and terminated:
        return f"the goal failed on turn {turns}", turns, observations
    if turns and truncated:
        return f"minigrid's limit on moves ended it on turn {turns}", turns, observations
    return f"the expert saw no way after turn {turns}", turns, observations


def play_level(env: BabyAI, level: str, wanted: int) -> tuple[dict[str, str], str]:
    """Play seeds in order until `wanted` are solved: (reason by lost seed, a row of the table)."""
    lost, turns, in_twelve, words, num_observations, start = {}, 0, 0, 0, 0, time.perf_counter()
    seed = 0
    while seed - len(lost) < wanted:
        reason, taken, observations = play(env, f"{level}/{seed}")
        if reason:
            lost[str(seed)] = reason
        else:
            turns += taken
            in_twelve += taken <= 12
            words += sum(len(text.split()) for text in observations)
            num_observations += len(observations)
        seed += 1
    milliseconds = 1000 * (time.perf_counter() - start) / seed
    row = (
        f"{level:24}{wanted:6}{len(lost):6}{wanted / seed:9.1%}{in_twelve / seed:9.1%}"
        f"{turns / wanted:7.2f}{words / num_observations:7.1f}{milliseconds:7.1f}"
    )
    return lost, row


def main() -> None:
    print("level                   solved  lost  success    in 12  turns  words  ms/task")
    unsolved = {}
    # A level in both sets is played to the larger number of seeds.
    needed = {}
    for name, levels in LEVELS.items():
        for level, sizes in levels.items():
            needed[level] = (name, max(sum(sizes), needed.get(level, ("", 0))[1]))
    for level, (name, wanted) in needed.items():
        lost, row = play_level(BabyAI(name), level, wanted)
        print(row, flush=True)
        if lost:
            unsolved[level] = lost
    UNSOLVED.write_text(json.dumps(unsolved, indent=1) + "\n")


if __name__ == "__main__":
    main()
