"""
One file a task suite: the name of a file in this folder is the name of its environment.

    make("textcraft", max_depth="2")  ->  an instance of the gym.Env class in envs/textcraft.py

A new environment is a new file with one class in it; nothing is registered anywhere. Only the file
asked for is imported, so that TextCraft never waits for BabyAI's imports or SciWorld's Java.
"""

import importlib
import inspect
from pathlib import Path

import gymnasium as gym

NAMES = sorted(path.stem for path in Path(__file__).parent.glob("[a-z]*.py"))


def make(name: str, **options) -> gym.Env:
    """An environment by its file's name; `options` are its class's keyword arguments, as given."""
    if name not in NAMES:
        raise ValueError(f"no environment is called {name!r}; choose from {', '.join(NAMES)}")
    module = importlib.import_module(f"{__name__}.{name}")
    defined = [  # there: what the file imports, gym.Env included, does not count
        found
        for _, found in inspect.getmembers(module, inspect.isclass)
        if issubclass(found, gym.Env) and found.__module__ == module.__name__
    ]
    if len(defined) != 1:
        names = ", ".join(found.__name__ for found in defined) or "none"
        raise ValueError(f"envs/{name}.py must define one gymnasium.Env class, found {names}")
    (environment,) = defined
    known = list(inspect.signature(environment).parameters)
    if unknown := sorted(set(options) - set(known)):
        takes = ", ".join(known) or "no options"
        raise ValueError(f"{name} has no option {', '.join(unknown)}; it takes {takes}")
    return environment(**options)
