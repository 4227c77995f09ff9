"""
A policy to start from: clone the environment's expert, and for `tiny`, make the model itself.

    expert() episodes  ->  demonstrations  ->  Trajectory (mask 1 on the expert's words)  ->  cross-entropy

    demonstrate      play the expert, with some mistakes in between
    make_tokenizer   a byte-level BPE of a few hundred tokens, with a chat template
    clone            behaviour cloning: maximise the likelihood of what the expert wrote
    starting_policy  the three above, cached by everything that shaped the result

RL can only reinforce what a policy already does now and then. A random one does nothing right; one that has
seen a few hundred games succeeds often enough to have something to compare.

Read rollout.py first, train.py next. Run it:

    python sft.py --env babyai --model tiny --demos 2400
"""

import hashlib
import inspect
import json
import os
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path

os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # the default: 20 times slower on busy machines

import torch
import torch.distributed as dist
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm import tqdm
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

import agent
import envs
import model as weights
from agent import Chat, Trajectory
from algorithms import sft_loss
from curriculum import seed_for
from env_server import check_options, parse_options
from rollout import collate, deal, micro_batches

# Padded tokens in a forward pass. Few: demonstrations differ in length, and much of a large one would be padding.
MICRO_TOKENS = 1024


@dataclass(frozen=True)
class Config:
    """Clone an environment's expert. Every field is a flag: --demos 500"""

    env: tuple[str, ...] = ("babyai",)  # files in envs/; several are mixed evenly
    options: tuple[
        str, ...
    ] = ()  # of the environment's class: levels=paper, or babyai.levels=paper
    model: str = "tiny"  # tiny (made from scratch), smollm2, a folder, or a hub id
    demos: int = 2400  # expert episodes, over all environments
    noise: float = 0.15  # share of turns with a mistake, shown but not learnt, so that recovery is
    demo_turns: int = 12  # episodes the expert needs longer for are not shown
    updates: int = 300  # optimizer steps
    batch_tokens: int = 2048  # tokens an update learns from, prompts and observations included
    lr: float = 2e-3  # peak; warms up over the first tenth, falls to a tenth
    hidden: int = 128  # width of tiny
    layers: int = 2  # depth of tiny: copying takes two, and a third learns no faster
    vocab: int = 512  # tokens of tiny's vocabulary
    copy_head: bool = False  # tiny is born able to repeat what it reads, names never seen included
    seed: int = 0
    name: str = ""  # the folder out/<name>; the next free number if empty

    def __post_init__(self):
        for field in ("demos", "updates", "batch_tokens", "demo_turns"):
            if getattr(self, field) < 1:
                raise ValueError(
                    f"--{field.replace('_', '-')} must be 1 or more, got {getattr(self, field)}"
                )
        check_options(self.options, self.env)
        if self.name and self.model == "tiny":
            raise ValueError(
                "--name is for cloning into another --model; a tiny one is kept in out/models, by what shaped it"
            )
        if not 0 <= self.noise < 1:
            raise ValueError(f"--noise is a share of turns, 0 <= noise < 1, got {self.noise}")
        if self.copy_head and self.layers < 2:
            raise ValueError(f"--copy-head is two layers' work, got --layers {self.layers}")


# --- demonstrations ---


@dataclass(frozen=True)
class Demonstration:
    """One expert episode: what was seen, what was written, and whether the expert wrote it."""

    env: str
    task: str
    first: str  # the first observation
    turns: list[tuple[str, bool, str]]  # (completion, is the expert's, the observation it led to)


def demonstrate(name: str, options: dict, count: int, config: Config) -> list[Demonstration]:
    """`count` successful expert episodes on training tasks, each within `demo_turns` turns.

    In a share `noise` of the turns a mistake is made instead. It stands in the history without being learnt, so
    the policy sees how the expert gets back from a place it would not have gone to, and what it says to a refusal.
    Tasks are passed over in a seeded order; once all have been used they come again with other noise.
    raises  ValueError where the expert succeeds on fewer than one task in twenty
    """
    env = envs.make(name, **options)
    tasks = shuffled(env.tasks("train"), (config.seed, "demonstrated tasks", name))
    demos, tried, elsewhere = [], 0, []
    bar = tqdm(
        total=count, desc=f"demonstrations of {name}", unit="", disable=_quiet(), leave=False
    )
    while len(demos) < count:
        task = next(tasks)
        rng = random.Random(seed_for(config.seed, "demonstration", name, tried))
        tried += 1
        demo = _play(env, name, task, elsewhere, rng, config)
        if demo is not None:
            demos.append(demo)
            bar.update()
        if tried >= 100 and len(demos) < tried / 20:
            raise ValueError(
                f"the expert of {name} solved {len(demos)} of {tried} tasks within {config.demo_turns} turns: "
                "raise --demo-turns, or lower --noise"
            )
    bar.close()
    env.close()
    return demos


def _play(
    env, name: str, task: str, elsewhere: list[str], rng: random.Random, config: Config
) -> Demonstration | None:
    first, info = env.reset(
        seed=seed_for(config.seed, "environment", name, task), options={"task": task}
    )
    expert, turns = env.expert(), []
    for _ in range(config.demo_turns):
        actions = env.available_actions() if rng.random() < config.noise else []
        if actions:
            completion = _mistake(actions, elsewhere, rng)
        else:
            step = next(expert, None)
            if step is None:
                return None
            completion = "Thought: {}\nAction: {}".format(*step)
        _, action, error = agent.parse_react(completion)
        if error and not actions:
            raise ValueError(f"the expert of {name} broke the form on task {task}: {error}")
        if error:  # the agent's side answers, as it will when the policy plays
            turns.append((completion, False, error))
            continue
        observation, _, terminated, truncated, info = env.step(action)
        turns.append((completion, not actions, observation))
        if terminated or truncated:
            return Demonstration(name, task, first, turns) if info["success"] else None
    return None


def _mistake(actions: list[str], elsewhere: list[str], rng: random.Random) -> str:
    """What a policy may write where the expert would not. `elsewhere` collects actions of other moments, in place.

    Half of them are possible now. Three in ten are actions of another moment, which BabyAI mostly refuses, and two in
    ten have no action or two. A policy that had never read a refusal would answer its first one with nonsense, and the next as well.
    """
    kind, action = rng.random(), rng.choice(actions)
    other = rng.choice(elsewhere or actions)
    elsewhere.append(action)
    if kind < 0.1:
        return "Thought: I try something."
    if kind < 0.2:
        return f"Thought: I try something.\nAction: {action}\nAction: {other}"
    return f"Thought: I try something.\nAction: {other if kind < 0.5 else action}"


def as_trajectory(demo: Demonstration, chat: Chat, instructions: str) -> Trajectory:
    """A demonstration as the tokens that a policy saying the same would have produced."""
    trajectory = Trajectory(demo.env, demo.task, end="terminated", success=True)
    trajectory.add_context(chat.prompt(instructions, demo.first))
    for completion, is_experts, observation in demo.turns:
        ids = chat.tokenizer.encode(completion, add_special_tokens=False) + [chat.end_of_turn]
        trajectory.ids += ids
        trajectory.loss_mask += [int(is_experts)] * len(ids)
        trajectory.logprobs += [0.0] * len(ids)
        trajectory.add_context(chat.between(observation))
    return trajectory


# --- the tiny model ---

# Roles are one token each. Instructions are left out: a model this small is made for one task and
# has no use for being told so, while reading them would take a third of its time.
TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role != 'system' %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = ["<|pad|>", "<|end|>", "<|user|>", "<|assistant|>"]


def make_tokenizer(texts: list[str], vocab: int) -> PreTrainedTokenizerBase:
    """A byte-level BPE trained on `texts`: it can spell anything, and says their common words in one token."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, pad_token=SPECIAL[0], eos_token=SPECIAL[1]
    )
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL[2:]})
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def make_tiny(tokenizer: PreTrainedTokenizerBase, config: Config) -> LlamaForCausalLM:
    """Llama's architecture with about 0.4 million parameters, random ones drawn from `seed`.

    Not Qwen2's, which has the same parts: beside such a model `AutoTokenizer` reads only the merges of a saved
    tokenizer, and cuts texts by Qwen2's rules. " 1" would come back as two tokens, and the clone would read other ids
    than it has learnt.
    """
    heads = max(1, config.hidden // 32)
    shape = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=config.hidden,
        intermediate_size=3 * config.hidden,
        num_hidden_layers=config.layers,
        num_attention_heads=heads,
        num_key_value_heads=1,  # all heads share keys and values: sampling is bound by reading those
        max_position_embeddings=4096,
        attention_bias=True,
        tie_word_embeddings=True,
        # The library's 0.02 is meant for wide models; at this width it leaves attention flat for long.
        initializer_range=0.08,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):  # drawn on the CPU
        torch.manual_seed(seed_for(config.seed, "tiny weights"))
        lm = LlamaForCausalLM(shape)
        if config.copy_head:
            add_copy_head(lm)
        return lm


@torch.no_grad()
def add_copy_head(lm: LlamaForCausalLM) -> None:
    """Write an induction head into a fresh model of two layers or more, in place.  (Olsson et al. 2022)

        ... Rey kja vik ... Rey  ->  kja        whatever the pieces are

    Copying a name that was never seen takes two attention heads in a row, and gradients find the pair late: not
    within the few minutes that we have. Pretrained models come with thousands of them. So we write the pair by hand:

        layer 0   looks one token back, always, and notes in the residual stream what stands there
        layer 1   looks for the token whose note says "before me stood what is read now", and says that token

    All else starts by adding nothing to the residual stream, so that at first only the pair speaks. Training is free
    to change any of it.
    """
    config = lm.config
    size = config.hidden_size // config.num_attention_heads  # of a head
    first, second = (lm.model.layers[i].self_attn for i in (0, 1))
    for layer in lm.model.layers:
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    # Rotary embedding turns pair i of a head's dimensions by `speed[i]` a token. A constant query and a constant
    # key that has been turned by one token already agree best where the key stands one token earlier.
    speed = config.rope_parameters["rope_theta"] ** (-torch.arange(size // 2) / (size // 2))
    fast = torch.where(torch.arange(size // 2) < 3, 12.0, 0.0)
    first.q_proj.weight[:size] = 0.0
    first.q_proj.bias[:size] = torch.cat([fast, 0 * fast])
    first.k_proj.bias[:size] = torch.cat([fast * speed.cos(), fast * speed.sin()])
    # What is compared lives in the slow pairs, which hardly turn over the length of an episode.
    slow = [i for i in range(size) if i % (size // 2) >= size // 2 - 10]
    read, note, word = (_orthonormal(rows, config.hidden_size) for rows in (len(slow), size, size))
    first.v_proj.weight[:size] = torch.cat([read, torch.zeros_like(note[len(slow) :])])
    first.o_proj.weight[:, :size] = 0.1 * note.T
    second.q_proj.weight[:size] = 0.0
    second.k_proj.weight[:size] = 0.0
    second.q_proj.weight[slow] = 3.0 * read
    second.k_proj.weight[slow] = 3.0 * note[: len(slow)]
    second.v_proj.weight[:size] = word
    second.o_proj.weight[:, :size] = word.T


def _orthonormal(rows: int, columns: int) -> torch.Tensor:
    return torch.linalg.qr(torch.randn(columns, rows))[0].T


# --- cloning ---


def clone(actor: weights.Actor, demos: list[Trajectory], config: Config, pad_id: int) -> float:
    """Behaviour cloning, in place: returns the mean loss in nats a token over the last tenth. Collective."""
    rank, world = dist.get_rank(), dist.get_world_size()
    optimizer = weights.adamw(actor, config.lr, weight_decay=0.01)
    device = next(actor.parameters()).device
    recent, started = [], time.perf_counter()
    bar = tqdm(
        _updates(demos, config),
        total=config.updates,
        desc="cloning",
        unit="update",
        disable=_quiet(),
        leave=False,
    )
    for update, chosen in enumerate(bar):
        done = update / config.updates
        for group in optimizer.param_groups:
            group["lr"] = config.lr * min(
                1.0, 10 * (update + 1) / config.updates, 1.9 - 1.8 * done if done > 0.5 else 1.0
            )
        trained = sum(sum(demo.loss_mask) for demo in chosen)
        loss = torch.zeros((), device=device)
        for rows in deal(
            micro_batches([len(demo.ids) for demo in chosen], MICRO_TOKENS), rank, world
        ):
            batch = collate([chosen[row] for row in rows] or chosen[:1], pad_id)
            # nothing of this update is left for this rank: it scores one row and learns nothing from it
            mask = batch.loss_mask if rows else torch.zeros_like(batch.loss_mask)
            logprobs, _ = actor(batch.input_ids.to(device), mask.to(device))
            part = sft_loss(logprobs, mask.to(device), denominator=trained)
            # FSDP averages over ranks, and the denominator is already everybody's.
            (part * world).backward()
            loss += part.detach()
        torch.nn.utils.clip_grad_norm_(actor.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if update >= config.updates - max(1, config.updates // 10):
            dist.all_reduce(loss)
            recent.append(loss.item())
            bar.set_postfix(loss=f"{recent[-1]:.3f}")
    if rank == 0:
        print(
            f"cloned {len(demos)} demonstrations: loss {sum(recent) / len(recent):.3f} nats a token, "
            f"{config.updates} updates, {time.perf_counter() - started:.0f} s"
        )
    return sum(recent) / len(recent)


def _updates(demos: list[Trajectory], config: Config):
    """Lists of demonstrations, about `batch_tokens` tokens each, in a new seeded order every epoch."""
    stream = shuffled(demos, (config.seed, "cloning order"))
    for _ in range(config.updates):
        chosen = [next(stream)]
        while sum(len(demo.ids) for demo in chosen) < config.batch_tokens:
            chosen.append(next(stream))
        yield chosen


def shuffled(items: list, key: tuple) -> Iterator:
    """Every item once in a random order, then all again in another, for ever."""
    for epoch in count():
        order = list(items)
        random.Random(seed_for(*key, epoch)).shuffle(order)
        yield from order


# --- the starting policy ---


def starting_policy(config: Config, cache: Path = Path("out/models")) -> str:
    """The folder of a `tiny` cloned from the expert: made on first use, then found again. Collective.

    Its name carries a hash of the configuration and of the source it depends on, so a changed environment,
    prompt or hyper-parameter can't be trained on from a stale start. (A file that --options name is not in it.)
    """
    shaped_by = {key: value for key, value in asdict(config).items() if key != "name"}
    sources = [inspect.getsource(module) for module in (sys.modules[__name__], agent)]
    home = Path(envs.__file__).parent  # an environment is its file, and may have a folder beside it
    for name in config.env:
        parts = [home / f"{name}.py", *sorted(home.glob(f"{name}_*/*.py"))]
        parts += sorted(home.glob(f"{name}_*.json"))
        sources += [path.read_text() for path in parts]
    digest = hashlib.blake2b(
        json.dumps([shaped_by, sources, torch.__version__, transformers.__version__]).encode(),
        digest_size=5,
    ).hexdigest()
    folder = cache / f"tiny-{'-'.join(config.env)}-{digest}"
    if not weights.on_rank_0(lambda: (folder / "config.json").exists()):
        if dist.get_rank() == 0:
            print(
                f"no {folder} yet: {config.demos} demonstrations, then {config.updates} updates of cloning",
                flush=True,
            )
        demos, instructions = gather_demonstrations(config)
        texts = [
            text for demo in demos for turn in demo.turns for text in (demo.first, turn[0], turn[2])
        ]
        tokenizer = make_tokenizer(texts, config.vocab)
        learn(
            weights.Actor(make_tiny(tokenizer, config)),
            tokenizer,
            demos,
            instructions,
            config,
            folder,
        )
    dist.barrier()
    return str(folder)


def gather_demonstrations(config: Config) -> tuple[list[Demonstration], dict[str, str]]:
    """Demonstrations of every environment of the mixture, and each one's instructions."""
    options = parse_options(list(config.options), list(config.env))
    demos, instructions = [], {}
    for name in config.env:
        demos += demonstrate(name, options[name], -(-config.demos // len(config.env)), config)
        instructions[name] = envs.make(name, **options[name]).instructions
    return demos, instructions


def learn(
    policy, tokenizer, demos: list[Demonstration], instructions: dict, config: Config, folder: Path
) -> None:
    """Shard a policy, clone the demonstrations, and save it to `folder` as a Hugging Face model. Collective."""
    chat = Chat(tokenizer)
    weights.shard(policy, weights.mesh(), weights.compute_dtype())
    clone(
        policy,
        [as_trajectory(demo, chat, instructions[demo.env]) for demo in demos],
        config,
        tokenizer.pad_token_id,
    )
    weights.save_policy(folder, policy, tokenizer)


def main(config: Config) -> None:
    """Make demonstrations, clone them, save the policy: `tiny` from scratch, anything else from its weights."""
    with weights.distributed():
        if config.model == "tiny":
            folder = starting_policy(config)
            if dist.get_rank() == 0:
                print(f"starting policy: {folder}")
            return
        path = weights.on_rank_0(weights.smollm2) if config.model == "smollm2" else config.model
        lm, tokenizer = weights.load_once(path)
        folder = weights.on_rank_0(lambda: weights.new_run(config.name, "sft")) / "policy"
        demos, instructions = gather_demonstrations(config)
        learn(weights.Actor(lm), tokenizer, demos, instructions, config, folder)
        if dist.get_rank() == 0:
            print(f"cloned policy: {folder}")


def _quiet() -> bool | None:
    # None: tqdm draws a bar on a terminal and nothing into a file
    return None if dist.get_rank() == 0 else True


if __name__ == "__main__":
    weights.run_command(main, Config, OSError)
