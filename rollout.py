"""
Playing: many episodes at once, one language model, until every trajectory has ended.

    tasks  ->  [ engine samples a turn  <->  environments answer over HTTP ]  ->  Trajectory  ->  Batch

    Limits       how long a turn and an episode may get, in tokens, turns and seconds
    EnvPool      remote episodes: reused, spread over replicas, replaced when one dies
    rollout      the multi-turn loop over both
    reset_ahead  the next rollout's environments, while the trainer works
    collate      trajectories -> padded tensors

An episode whose environment failed is played again, then marked `error` and kept out of every average:
a policy must not be punished for a broken server.

Read engines.py first, algorithms.py next.
"""

import itertools
import queue
import sys
import threading
import time
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor

from agent import Chat, Trajectory
from curriculum import seed_for
from env_server import SPLITS, EnvClient, EnvError, RemoteEpisode


@dataclass(frozen=True)
class Limits:
    """What bounds an episode. Tokens count everything the model reads or writes."""

    max_turns: int = 12  # completions; the curriculum sets it
    max_new_tokens: int = 64  # sampled tokens of one turn
    max_tokens: int = 1024  # of the whole trajectory: prompt, observations, completions
    max_observation_tokens: int = 256  # a longer observation loses its middle, visibly
    episode_seconds: float = 600.0  # then the episode is an error
    retries: int = 2  # new attempts at an episode whose environment failed
    max_invalid: int = 0  # the Nth invalid action or broken form ends the episode; 0 for never


# --- the environments, from this side ---


class EnvPool:
    """Remote episodes of one environment, kept for the next trajectory once theirs is over, or reset ahead for it.

    urls      one a replica; trajectory i prefers replica i mod N, and takes another when that one fails
    grace     seconds to wait for a server that does not answer (it may be restarting) before giving up
    """

    def __init__(
        self, urls: list[str], token: str = "", timeout: float = 60.0, grace: float = 60.0
    ):
        self.clients = [EnvClient(url, token=token, timeout=timeout) for url in urls]
        self.grace = grace
        self._idle: list[list[RemoteEpisode]] = [[] for _ in urls]
        self._ahead: dict[tuple[str, int], Future] = {}  # (task, seed) -> what `_start` returns
        self._threads: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()
        self._is_closed = False
        # Known after `check`:
        self.instructions, self.max_turns, self.tasks = "", 0, {}

    def check(self, env: str) -> None:
        """raises ValueError, in one sentence, where a server does not answer or serves another environment."""
        for client in self.clients:
            try:
                health = client.health()
                # What all replicas share is asked once, now: later one may be down.
                if client is self.clients[0]:
                    self.instructions, self.max_turns = client.instructions(), health["max_turns"]
                    self.tasks = {split: client.tasks(split) for split in SPLITS}
            except EnvError as error:
                raise ValueError(
                    f"no environment server at {client.url}: {error}. Start one: python env_server.py --env {env}"
                ) from None
            if health["env"] != env:
                raise ValueError(
                    f"the server at {client.url} serves {health['env']}, but --env is {env}"
                )

    def start(self, preferred: int, task: str, seed: int) -> tuple[RemoteEpisode, str, dict]:
        """An episode of `task`, freshly reset: (episode, observation, info).

        raises  EnvError where no replica gives one within `grace` seconds, or the task itself is refused
        """
        ahead = self._ahead.pop((task, seed), None)
        if ahead is not None and not ahead.cancel():  # one that still waits in line is begun here
            # If it failed, or its server has restarted or closed it since, it is begun again.
            with suppress(EnvError):
                episode, observation, info = ahead.result()
                episode.client.observation(episode.id)
                return episode, observation, info
        return self._start(preferred, task, seed)

    def start_ahead(self, preferred: int, task: str, seed: int) -> None:
        """Begin what `start` will be asked for with the same task and seed, and return at once."""
        if self._threads is None:
            self._threads = ThreadPoolExecutor(16)
        self._ahead[task, seed] = self._threads.submit(self._start, preferred, task, seed)

    def drop_ahead(self) -> None:
        """Make what was begun ahead, and will not be played next, room for others."""

        def keep(done: Future) -> None:
            if not done.cancelled() and done.exception() is None:
                self.give_back(done.result()[0])

        for ahead in self._ahead.values():
            ahead.cancel()
            ahead.add_done_callback(keep)
        self._ahead.clear()

    def _start(self, preferred: int, task: str, seed: int) -> tuple[RemoteEpisode, str, dict]:
        """`start`, with nothing begun ahead."""
        deadline = time.monotonic() + self.grace
        pause = 0.1
        for attempt in itertools.count():
            replica = (preferred + attempt) % len(self.clients)
            try:
                episode = self._take(replica)
                try:
                    return (episode, *episode.reset(task, seed=seed))
                except EnvError as error:
                    if error.status is not None:  # who does not answer would not answer this either
                        episode.close()
                    raise
            except EnvError as error:
                # Gone (404: the server was restarted, or reaped what lay idle), full, or not answering: all pass.
                # A task that a healthy server refuses or crashes on stays refused.
                passing = error.status in (None, 404, 409, 503) and error.code != "unknown_task"
                if not passing or time.monotonic() > deadline or self._is_closed:
                    raise
                # Of the idle ones this was used last: the others are gone too.
                if error.status == 404:
                    self._idle[replica].clear()
            if (attempt + 1) % len(self.clients) == 0:
                time.sleep(pause)
                pause = min(2 * pause, 2.0)
        raise AssertionError("unreachable")

    def give_back(self, episode: RemoteEpisode) -> None:
        """Keep a healthy episode for the next trajectory on its replica."""
        with self._lock:
            self._idle[self.clients.index(episode.client)].append(episode)

    def close(self) -> None:
        """Close what is idle; servers close the rest when its time-to-live is over."""
        self._is_closed = True
        self.drop_ahead()
        if self._threads is not None:
            self._threads.shutdown()
        for client, idle in zip(self.clients, self._idle, strict=True):
            # After one that is not answered the others would not be either.
            with suppress(EnvError):
                for episode in idle:
                    client.close(episode.id)
        self._idle = [[] for _ in self.clients]

    def _take(self, replica: int) -> RemoteEpisode:
        with self._lock:
            if self._idle[replica]:
                return self._idle[replica].pop()
        return RemoteEpisode(self.clients[replica])


# --- the loop ---


class RolloutError(RuntimeError):
    """Too many episodes failed for the batch to mean anything."""


def rollout(
    engine,
    chat: Chat,
    pools: dict[str, EnvPool],
    trajectories: list[Trajectory],
    limits: Limits,
    key: tuple,
    temperature: float = 1.0,
    seed: int = 0,
    concurrency: int = 256,
) -> list[Trajectory]:
    """Play every trajectory (given with env, task, group and sample, nothing else) to its end.

    Environment calls run in threads, one an episode, while the engine works on whoever has been answered; an
    engine that samples in waves is only called when everybody has. key names this rollout among all of a
    run's ("train", step), so that no two draw the same random numbers.

    returns   the trajectories, in the order given, each with its `end` set
    """
    loop = _Loop(engine, chat, pools, limits, key, temperature, seed)
    # Twice as many threads as episodes: one that hangs while it closes must not hold up the next attempt.
    loop.threads = _threads(2 * concurrency)
    return loop.run(trajectories, concurrency)


@cache
def _threads(most: int) -> ThreadPoolExecutor:
    """Kept from one rollout to the next: starting a hundred threads beside a busy one takes a fifth of a second."""
    return ThreadPoolExecutor(most)


class _Episode:
    """A trajectory being played, and the remote episode it is played in."""

    def __init__(self, trajectory: Trajectory, index: int):
        self.blank = trajectory
        self.index = index
        self.attempt = 0
        self.started = 0.0
        self.remote: RemoteEpisode | None = None

    def begin(self) -> None:
        """A clean record for this attempt; the clock runs on from the first one."""
        first = self.blank
        self.trajectory = Trajectory(first.env, first.task, first.group, first.sample)
        self.started = self.started or time.monotonic()


class _Loop:
    """The state of one `rollout` call. Threads only talk to environments and put what came into `inbox`."""

    def __init__(
        self, engine, chat, pools, limits: Limits, key: tuple, temperature: float, seed: int
    ):
        self.engine, self.chat, self.pools, self.limits = engine, chat, pools, limits
        self.key, self.temperature, self.seed = key, temperature, seed
        self.inbox: queue.SimpleQueue = queue.SimpleQueue()  # (episode, reply or exception)
        self.playing: dict[tuple, _Episode] = {}  # engine key -> whose turn it is
        self.out = 0  # calls to environments not answered yet

    def run(self, trajectories: list[Trajectory], concurrency: int) -> list[Trajectory]:
        """Play all, at most `concurrency` at a time; returns them in the order given."""
        waiting = [_Episode(trajectory, i) for i, trajectory in enumerate(trajectories)]
        done: list[Trajectory | None] = [None] * len(waiting)
        self.done, waiting = done, waiting[::-1]
        while waiting or self.out or self.playing:
            while waiting and self.out + len(self.playing) < concurrency:
                self._start(waiting.pop())
            if self.out and (
                self.engine.in_waves or not self.playing or not self.inbox.empty()
            ):  # one reply at a time: it may end an episode, and then the next one starts
                episode, reply = self.inbox.get()
                self.out -= 1
                self._receive(episode, reply)
                continue
            for key, ids, logprobs in self.engine.step():
                self._act(self.playing.pop(key), ids, logprobs)
        return done

    def _send(self, episode: _Episode, call, *args) -> None:
        def run() -> None:
            try:
                reply = call(*args)
            except (
                Exception
            ) as error:  # whatever it is, it is this episode's failure, not the run's
                reply = error
            self.inbox.put((episode, reply))

        self.out += 1
        self.threads.submit(run)

    def _start(self, episode: _Episode) -> None:
        episode.begin()
        episode.trajectory.weights_version = self.engine.version
        trajectory, pool = episode.trajectory, self.pools[episode.trajectory.env]
        seed = environment_seed(self.seed, self.key, trajectory)
        self._send(episode, pool.start, episode.index + episode.attempt, trajectory.task, seed)

    def _receive(self, episode: _Episode, reply: object) -> None:
        """An environment has answered: to a reset with (remote, observation, info), to a step with five values."""
        trajectory = episode.trajectory
        if isinstance(reply, Exception):
            self._fail(episode, reply)
            return
        is_reset = len(reply) == 3
        if is_reset:
            episode.remote, observation, info = reply
            reward, terminated, truncated = 0.0, False, False
        else:
            observation, reward, terminated, truncated, info = reply
        if not is_answer(observation, reward, info):
            # A server need not be ours: what it makes up ends this episode, not the run.
            fault = f"expected a text, a finite reward and a success, got {reply[-5:]!r:.300}"
            self._fail(episode, EnvError("bad_reply", fault))
            return
        trajectory.success = info["success"]
        if is_reset:
            trajectory.category = str(info.get("category", ""))
        else:
            turn = trajectory.turns[-1]
            turn.reward, turn.invalid = float(reward), bool(info.get("invalid"))
        if time.monotonic() - episode.started > self.limits.episode_seconds:
            self._fail(
                episode, TimeoutError(f"an episode may take {self.limits.episode_seconds:g} s")
            )
        elif is_reset:
            self._show(episode, observation, first=True)
        else:
            self._show(
                episode,
                observation,
                end="terminated" if terminated else "max_turns" if truncated else "",
            )

    def _show(
        self, episode: _Episode, observation: str, first: bool = False, end: str = ""
    ) -> None:
        """Append an observation and ask for the next turn, unless the episode is over."""
        trajectory, limits = episode.trajectory, self.limits
        trajectory.observation = self.chat.clip(observation, limits.max_observation_tokens)
        if first:
            ids = self.chat.prompt(self.pools[trajectory.env].instructions, trajectory.observation)
        else:
            ids = self.chat.between(trajectory.observation)
        room = limits.max_tokens - len(trajectory.ids) - len(ids)
        # What does not fit is left out whole, so that max_tokens holds for every tensor.
        if room >= 0 or first:
            trajectory.add_context(ids)
        if not end and 0 < limits.max_invalid <= self._mistakes(trajectory):
            end, trajectory.success = "terminated", False  # our rule, not the environment's
        end = end or ("max_turns" if len(trajectory.turns) >= limits.max_turns else "")
        end = end or ("max_tokens" if room < 1 else "")
        if end:
            self._finish(episode, end)
            return
        key = (*self.key, trajectory.group, trajectory.sample, len(trajectory.turns))
        self.playing[key] = episode
        self.engine.add(key, trajectory.ids, min(limits.max_new_tokens, room), self.temperature)

    def _act(self, episode: _Episode, ids: list[int] | Exception, logprobs: list[float]) -> None:
        """The engine has written a turn: pass its action on, or answer a broken form ourselves."""
        trajectory = episode.trajectory
        if isinstance(ids, Exception):  # a model behind an address (api_model.py) may be lost, too
            episode.attempt = self.limits.retries  # it has been asked again for long already
            self._fail(episode, ids)
            return
        if not ids:  # that server counts the tokens, and finds no room for a turn only when asked
            self._finish(episode, "max_tokens")
            return
        is_cut = (
            len(trajectory.ids) + len(ids) >= self.limits.max_tokens
            and ids[-1] != self.chat.end_of_turn
        )
        turn = trajectory.add_completion(ids, logprobs, self.chat, close=not is_cut)
        if is_cut:
            self._finish(
                episode, "max_tokens"
            )  # in the middle of a turn: there is no whole action to pass on
        elif turn.format_error:
            self._show(episode, trajectory.observation)
        else:
            turn.is_sent = True
            self._send(episode, episode.remote.step, turn.action)

    def _mistakes(self, trajectory: Trajectory) -> int:
        return sum(turn.format_error or turn.invalid for turn in trajectory.turns)

    def _fail(self, episode: _Episode, reason: Exception) -> None:
        """The environment broke: play the episode again on the next replica, or give it up as an error."""
        if episode.remote is not None:
            # In its own thread and unanswered: whatever holds the episode up would hold up its closing too.
            self.threads.submit(episode.remote.close)
            episode.remote = None
        # Counted from the first attempt: a training step waits for one deadline, not for three.
        in_time = time.monotonic() - episode.started < self.limits.episode_seconds
        if episode.attempt < self.limits.retries and in_time:
            episode.attempt += 1
            self._start(episode)
            return
        episode.trajectory.error = f"{type(reason).__name__}: {reason}"
        episode.trajectory.success = False
        self._finish(episode, "error")

    def _finish(self, episode: _Episode, end: str) -> None:
        episode.trajectory.end, episode.trajectory.max_turns = end, self.limits.max_turns
        self.done[episode.index] = episode.trajectory
        if episode.remote is not None:
            self.pools[episode.trajectory.env].give_back(episode.remote)
            episode.remote = None


def environment_seed(seed: int, key: tuple, trajectory: Trajectory) -> int:
    """What a trajectory's environment is reset with: the same for all its attempts."""
    return seed_for(seed, "environment", key, trajectory.group, trajectory.sample)


def reset_ahead(
    pools: dict[str, EnvPool],
    trajectories: list[Trajectory],
    key: tuple,
    seed: int = 0,
    concurrency: int = 256,
) -> None:
    """Begin, in threads, the resets that `rollout_on_all_ranks` will ask for with the same arguments.

    Called between a rollout and the update, it hides the resets behind the update: a browser's takes a second.
    What is observed does not depend on the weights, so nothing about it can be stale.
    """
    for index, trajectory in enumerate(share_of(trajectories)[:concurrency]):
        pools[trajectory.env].start_ahead(
            index, trajectory.task, environment_seed(seed, key, trajectory)
        )


def is_answer(observation: object, reward: object, info: object) -> bool:
    """Whether what came from an environment can be read as an observation, a reward and an info."""
    return (
        isinstance(observation, str)
        and isinstance(reward, int | float)
        and abs(reward) <= sys.float_info.max  # no NaN, no integer that is too large for a float
        and isinstance(info, dict)
        and isinstance(info.get("success"), bool)
    )


# --- trajectories as tensors ---


@dataclass
class Batch:
    """B trajectories side by side, padded on the right to T tokens. Entry t of each (B, T) describes token t."""

    input_ids: Tensor  # (B, T)
    loss_mask: Tensor  # (B, T) 1 on tokens the agent sampled
    rollout_logprobs: Tensor  # (B, T) the sampler's
    rewards: Tensor  # (B, T) a turn's reward, on its last sampled token
    turn_ends: Tensor  # (B, T) 1 on the last sampled token of each turn
    format_errors: Tensor  # (B, T) 1 there too, where the turn broke the form
    lengths: Tensor  # (B,) real tokens
    returns: Tensor  # (B,) sum of rewards
    group_ids: Tensor  # (B,)
    terminated: Tensor  # (B,) the environment ended it; otherwise a limit did
    # What the trainer adds, once a step: all (B, T)
    old_logprobs: Tensor | None = None
    ref_logprobs: Tensor | None = None
    advantages: Tensor | None = None
    old_values: Tensor | None = None
    value_targets: Tensor | None = None

    def select(self, rows: list[int], device: torch.device | str = "cpu") -> "Batch":
        """Some rows, cut to the longest of them. For no rows: the first one, with nothing to learn from.

        (A rank without work still runs the model once; see `deal`.)
        """
        picked = torch.tensor(rows or [0])
        width = int(self.lengths[picked].max())
        parts = {}
        for name, tensor in vars(self).items():
            part = None if tensor is None else tensor[picked]
            parts[name] = (
                part if part is None else (part[:, :width] if part.ndim == 2 else part).to(device)
            )
        if not rows:
            parts["loss_mask"] = torch.zeros_like(parts["loss_mask"])
        return Batch(**parts)


def collate(trajectories: list[Trajectory], pad_id: int = 0) -> Batch:
    """Pad a list of trajectories into one Batch; raises AssertionError on an empty list."""
    assert trajectories, "no trajectories to collate"
    width = max(len(trajectory.ids) for trajectory in trajectories)

    def padded(rows: Iterable[list], fill: float, dtype: torch.dtype) -> Tensor:
        return torch.tensor([row + [fill] * (width - len(row)) for row in rows], dtype=dtype)

    def at_turn_ends(value) -> Tensor:
        table = torch.zeros(len(trajectories), width)
        for b, trajectory in enumerate(trajectories):
            for turn in trajectory.turns:
                table[b, turn.stop - 1] = value(turn)
        return table

    return Batch(
        input_ids=padded((t.ids for t in trajectories), pad_id, torch.long),
        loss_mask=padded((t.loss_mask for t in trajectories), 0, torch.bool),
        rollout_logprobs=padded((t.logprobs for t in trajectories), 0.0, torch.float32),
        rewards=at_turn_ends(lambda turn: turn.reward),
        turn_ends=at_turn_ends(lambda turn: 1.0),
        format_errors=at_turn_ends(lambda turn: float(turn.format_error)),
        lengths=torch.tensor([len(t.ids) for t in trajectories]),
        returns=torch.tensor([t.episode_return for t in trajectories]),
        group_ids=torch.tensor([t.group for t in trajectories]),
        terminated=torch.tensor([t.end == "terminated" for t in trajectories]),
    )


def micro_batches(
    lengths: list[int], max_tokens: int, ranks: int = 1, pass_tokens: int | None = None
) -> list[list[int]]:
    """Split rows into groups whose padded size, rows times longest, stays within `max_tokens`.

    Rows of similar length go together, so that little of a group is padding; a row longer than
    max_tokens gets a group of its own. Which rows share a group changes no result, only time and memory
    (and, since sums are then taken in another order, the last bits).

    >>> micro_batches([5, 90, 6, 100], max_tokens=200)
    [[3, 1], [2, 0]]

    Fewest groups are not the fastest: padding costs as much as anything else. With pass_tokens, what a pass
    costs besides its tokens, in tokens, one rank gets the groups whose padded sizes and passes add up to the
    least. Here 3,700 padded tokens become 1,200, in two passes either way:

    >>> micro_batches([600, 100, 100, 100, 100, 100, 100], max_tokens=3600)
    [[0, 1, 2, 3, 4, 5], [6]]
    >>> micro_batches([600, 100, 100, 100, 100, 100, 100], max_tokens=3600, pass_tokens=256)
    [[0], [1, 2, 3, 4, 5, 6]]

    Ranks compute in step, each as many groups as the others (see `deal`), so what counts is the largest of each
    round. Full groups and a small rest leave ranks waiting; several ranks get the smallest groups that need no
    more rounds. Here two ranks need two rounds, and 110 tokens in each will do:

    >>> [len(group) for group in micro_batches([10] * 41, max_tokens=200)]
    [20, 20, 1]
    >>> [len(group) for group in micro_batches([10] * 41, max_tokens=200, ranks=2)]
    [11, 11, 11, 8]
    """
    order = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    if ranks == 1 and pass_tokens is not None:
        return _cheapest_cut(order, lengths, max_tokens, pass_tokens)

    def cut(most: int) -> list[list[int]]:
        groups: list[list[int]] = []
        for row in order:
            if groups and (len(groups[-1]) + 1) * lengths[groups[-1][0]] <= most:
                groups[-1].append(row)
            else:
                groups.append([row])
        return groups

    groups = cut(max_tokens)
    if ranks > 1 and groups:
        allowed = -(-len(groups) // ranks) * ranks
        low, high = lengths[order[0]], max_tokens  # `high` is a size that needs no more rounds
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if len(cut(middle)) <= allowed else (middle + 1, high)
        groups = cut(high)
    return groups


def _cheapest_cut(
    order: list[int], lengths: list[int], max_tokens: int, pass_tokens: int
) -> list[list[int]]:
    """Cut rows, given from longest to shortest, where padded tokens and passes cost least.

    By dynamic programming: the best cut of the first `end` rows is the best cut of the first `begin`, for
    some `begin`, and one more group.
    """
    best = [(0, 0)]  # of the first `end` rows: (cost, where their last group begins)
    for end in range(1, len(order) + 1):
        ways = []
        for begin in range(end - 1, -1, -1):
            padded = (end - begin) * lengths[order[begin]]
            if padded > max_tokens and begin < end - 1:
                break  # further back there are more rows, and longer ones
            ways.append((best[begin][0] + padded + pass_tokens, begin))
        best.append(min(ways))
    groups, end = [], len(order)
    while end:
        begin = best[end][1]
        groups.append(order[begin:end])
        end = begin
    return groups[::-1]


def deal(groups: list[list[int]], rank: int, world_size: int) -> list[list[int]]:
    """This rank's groups, in turn, filled up with empty ones so that all ranks get the same number.

    Under FSDP every forward and backward pass is a collective: a rank that runs out of work first must
    still take part, or the others wait for ever.
    """
    mine = groups[rank::world_size]
    return mine + [[]] * (-(-len(groups) // world_size) - len(mine))


# --- many ranks ---


def rollout_on_all_ranks(
    engine, chat: Chat, pools: dict[str, EnvPool], trajectories: list[Trajectory], *args, **kwargs
):
    """`rollout`, with the groups dealt over the ranks, and the whole result on every rank. Collective.

    Trajectories are some kilobytes each. Once all ranks have all of them, advantages need no further
    communication, and micro-batches can be dealt so that every rank computes equally much.
    """
    world = dist.get_world_size()
    mine = rollout(engine, chat, pools, share_of(trajectories), *args, **kwargs)
    parts = [mine] * world
    if world > 1:
        dist.all_gather_object(parts, mine)
    return sorted((t for part in parts for t in part), key=lambda t: (t.group, t.sample))


def share_of(trajectories: list[Trajectory]) -> list[Trajectory]:
    """Those that this rank plays: whole groups, in turn."""
    return [t for t in trajectories if t.group % dist.get_world_size() == dist.get_rank()]


def check_errors(trajectories: list[Trajectory], most: float) -> None:
    """Stop when more than a share `most` of the episodes failed: what is left may be a biased sample.

    raises  RolloutError with the first failure's own words
    """
    failed = [t for t in trajectories if t.end == "error"]
    if failed and (len(failed) > most * len(trajectories) or len(failed) == len(trajectories)):
        raise RolloutError(
            f"{len(failed)} of {len(trajectories)} episodes failed, more than the share {most:g} that "
            f"--max-error-fraction allows. The first, {failed[0].env} {failed[0].task!r}: {failed[0].error}"
        )
