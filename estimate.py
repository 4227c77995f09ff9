"""
Will it fit? The memory of each GPU, by what it is for, before anything is loaded.

    the model's shape (on `meta`), flags, number of GPUs  ->  bytes for each purpose  ->  a table in GiB

    skeleton   a model without numbers: parameters can be counted, and nothing is held
    held       what stays through a run: weights, Adam's moments, reference, critic, the sampler's copy
    moments    what an update adds, at each of four moments that can be its fullest
    show       the table that `train.py --estimate` prints

Sharding divides what is held by the number of GPUs, and nothing else: activations are each GPU's own, and a block
is whole on every GPU while it computes. benchmarks/memory.py compares these sums with what a CPU really takes.

Part of train.py: read model.py first. Run it:

    python train.py --model Qwen/Qwen2.5-7B-Instruct --micro-tokens 16384 --estimate 1 8 16
"""

import dataclasses
import os
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

import model as weights
import sft

# Shapes of the models in runs/, so that asking costs no download:
#   hidden, layers, heads, heads of keys and values, width of the MLP, vocabulary, embeddings tied
QWEN = {
    "Qwen/Qwen2.5-0.5B-Instruct": (896, 24, 14, 2, 4864, 151936, True),
    "Qwen/Qwen2.5-1.5B-Instruct": (1536, 28, 12, 2, 8960, 151936, True),
    "Qwen/Qwen2.5-3B-Instruct": (2048, 36, 16, 2, 11008, 151936, True),
    "Qwen/Qwen2.5-7B-Instruct": (3584, 28, 28, 4, 18944, 152064, False),
}
MASTER = 4  # bytes of a number in float32: weights that are trained, their gradients, each of Adam's moments


def skeleton(name: str) -> PreTrainedModel:
    """The model that --model names, on `meta`."""
    if name in QWEN:
        hidden, layers, heads, kv_heads, inner, vocab, tied = QWEN[name]
        shape = Qwen2Config(
            hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=kv_heads,
            intermediate_size=inner, vocab_size=vocab, tie_word_embeddings=tied,
        )  # fmt: skip
        with torch.device("meta"):
            return Qwen2ForCausalLM(shape)
    if name == "tiny":  # its vocabulary is cut to this size, whatever it is trained on
        shape = sft.Config()
        with torch.device("meta"):
            return sft.make_tiny(_Vocabulary(range(shape.vocab)), shape)
    try:
        return weights.empty_model(weights.smollm2() if name == "smollm2" else name)
    except OSError as error:
        raise ValueError(
            f"--estimate needs {name}'s config.json ({str(error).splitlines()[0]}): give a folder that has one, "
            f"the id of a model on a hub that this machine can reach, or one of {', '.join(QWEN)}"
        ) from None


class _Vocabulary(list):
    pad_token_id = eos_token_id = 0


@dataclass(frozen=True)
class Shape:
    """What the sums need to know of a model: numbers of parameters, and widths."""

    total: int  # all parameters, tied ones once
    block: int  # of one transformer block
    layers: int
    linear: int  # sum of inputs and outputs of a block's linear layers: LoRA's parameters, for each of its ranks
    hidden: int
    inner: int  # of the MLP
    queries: int  # heads x width
    keys: int  # the same of keys, or of values
    vocab: int

    @classmethod
    def of(cls, lm: PreTrainedModel) -> "Shape":
        config, blocks = lm.config, lm.get_decoder().layers
        count = lambda module: sum(p.numel() for p in module.parameters())
        linear = [m for m in blocks[0].modules() if isinstance(m, nn.Linear)]
        width = (
            getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        )
        return cls(
            total=count(lm),
            block=count(blocks[0]),
            layers=len(blocks),
            linear=sum(m.in_features + m.out_features for m in linear),
            hidden=config.hidden_size,
            inner=config.intermediate_size,
            queries=config.num_attention_heads * width,
            keys=config.num_key_value_heads * width,
            vocab=config.vocab_size,
        )

    @property
    def root(self) -> int:
        """Parameters outside the blocks: embeddings, output projection, last norm. FSDP gathers them together."""
        return self.total - self.layers * self.block


def held(shape: Shape, config, ranks: int, compute: int, needs_copy: bool) -> dict[str, float]:
    """Bytes that a rank holds through the whole run.

    compute     bytes of a number that matrices are multiplied in: 2 in bfloat16
    needs_copy  the `hf` sampler has weights of its own: always, but for one rank on a CPU that trains all weights
    """
    adapters = config.lora_rank * shape.linear * shape.layers
    trained = adapters or shape.total
    frozen = shape.total if adapters else 0
    on_gpu = 0 if config.offload_optimizer else 1 / ranks
    items = {
        "weights": (compute * frozen + MASTER * trained) * on_gpu,
        "Adam's two moments": 2 * MASTER * trained * on_gpu,
    }
    if config.kl_coef and not adapters:  # with adapters: the same weights without them
        items["reference"] = 0 if config.offload_reference else compute * shape.total / ranks
    if config.algo == "ppo":  # all but the output projection, and one number in its place
        tied = shape.root < 2 * shape.vocab * shape.hidden
        backbone = shape.total - (0 if tied else shape.vocab * shape.hidden)
        theirs = compute * backbone + 3 * MASTER * adapters if adapters else 3 * MASTER * backbone
        items["critic and its moments"] = theirs * on_gpu
    if needs_copy:
        items["the sampler's copy"] = compute * shape.total
    return items


def activations(shape: Shape, config, compute: int) -> tuple[float, float]:
    """Bytes that wait for the backward pass: those of all blocks, and those of the block that is at work.

    A block keeps what its derivatives need. For each token, in numbers:

        each of two norms   its input (in float32), that normalised, and times its weight       3 hidden
        attention           queries, keys, values, and its output                               2 queries + 2 keys
        MLP                 gate, silu(gate), up, and their product                             4 inner

    PyTorch's attention (on CPUs too, where nothing is masked but the future) never holds its (T, T)
    probabilities: one number a head and token stays, left out here, and the rest is computed again.
    With --activation-checkpointing a block keeps its input alone, and the rest exists for one block at a time.
    """
    tokens = config.micro_tokens
    norm = (MASTER + 2 * compute) * shape.hidden
    block = tokens * (2 * norm + compute * (2 * shape.queries + 2 * shape.keys + 4 * shape.inner))
    if config.activation_checkpointing:
        return tokens * (shape.layers * compute * shape.hidden + norm), block
    return shape.layers * block + tokens * norm, 0.0


def moments(shape: Shape, config, ranks: int, compute: int) -> dict[str, dict[str, float]]:
    """Bytes that an update takes on top of what is held, at the moments that can be its fullest."""
    adapters = config.lora_rank * shape.linear * shape.layers
    trained, is_full = adapters or shape.total, not adapters
    kept, working = activations(shape, config, compute)
    critics = 2 if config.algo == "ppo" else 1  # actor and critic wait for one backward pass
    on_gpu = 0 if config.offload_optimizer else 1 / ranks
    gradients = {"gradients": critics * MASTER * trained * on_gpu}
    root = {"embeddings and output projection, gathered": compute * shape.root}
    head = compute * shape.vocab * shape.hidden * is_full
    chunk = min(weights.chunk_rows(shape.vocab), config.micro_tokens) * shape.vocab
    waiting = {"activations that wait": critics * kept}
    return {
        # Four float32 tensors of (chunk, V) at once; the projection's gradient, and a chunk's share to add to it.
        "the loss": gradients | root | waiting | {"logits of a chunk": 4 * MASTER * chunk, "gradient of the output projection": 2 * head},
        # One block at work, the next one on its way; a gradient, and its float32 copy to be averaged.
        "the first block's backward pass": gradients | root | waiting | {
            "gradient of the output projection": head,
            "a block at work": working + config.micro_tokens * compute * 3 * shape.inner,
            "blocks, gathered": (2 if ranks > 1 else 1) * compute * shape.block,
            "a block's gradient": (compute + MASTER) * (shape.block if is_full else adapters / shape.layers),
        },
        "the end of the backward pass": gradients | root | {
            "gradient of embeddings and output projection": (compute + MASTER) * shape.root * is_full,
        },
        # Parameter after parameter, with two tensors of the size of the one at work.
        "the optimizer's step": gradients | {"the largest parameter, twice": 2 * MASTER * shape.vocab * shape.hidden * is_full * on_gpu},
    }  # fmt: skip


def fullest(shape: Shape, config, ranks: int, compute: int) -> tuple[str, dict[str, float]]:
    """Which moment of an update takes most, and its items."""
    return max(moments(shape, config, ranks, compute).items(), key=lambda m: sum(m[1].values()))


def cache(shape: Shape, config, ranks: int, compute: int) -> float:
    """Bytes of keys and values while the `hf` sampler plays: every episode at once, each as long as it may get."""
    episodes = min(config.concurrency, -(-config.tasks_per_step // ranks) * config.group_size)
    return 2 * compute * shape.layers * shape.keys * episodes * config.max_tokens


def show(config) -> None:
    """Print GiB by purpose, a column for each number of GPUs; where none is given, one for this machine as it is."""
    shape = Shape.of(skeleton(config.model))
    on_gpu = bool(config.estimate) or torch.cuda.is_available()
    here = int(os.environ.get("WORLD_SIZE", 0)) or max(1, torch.cuda.device_count())
    counts, compute = config.estimate or (here,), 2 if on_gpu else MASTER
    with_vllm = config.engine == "vllm" or (config.engine == "auto" and on_gpu)
    columns, names = [], []
    for ranks in counts:
        needs_copy = not with_vllm and (on_gpu or ranks > 1 or config.lora_rank > 0)
        name, update = fullest(shape, config, ranks, compute)
        playing = {} if with_vllm else {"keys and values": cache(shape, config, ranks, compute)}
        columns.append((held(shape, config, ranks, compute, needs_copy), update, playing))
        names.append(f"{ranks}: {name}")
    print(
        f"{config.model}: {shape.total / 1e9:.2f} billion parameters, computing in "
        f"{'bfloat16' if on_gpu else 'float32'}, {config.micro_tokens} tokens in a forward pass."
    )
    print(_row(f"GiB on each {'GPU' if on_gpu else 'process'}, of so many:", counts))
    for part, title in enumerate(("held throughout", "an update adds", "playing adds")):
        for item in dict.fromkeys(item for column in columns for item in column[part]):
            values = [column[part].get(item, 0) / 2**30 for column in columns]
            if any(values):
                print(_row(f"{title}: {item}", values))
    for part, title in ((1, "updating, in all"), (2, "playing, in all")):
        print(_row(title, [sum((each[0] | each[part]).values()) / 2**30 for each in columns]))
    if config.offload_optimizer or config.offload_reference:
        print(_row("in the CPU's memory", [_offloaded(shape, config, n, compute) for n in counts]))
    print(f"An update is fullest in: {'; '.join(names)}.")
    if with_vllm:
        print(
            f"Playing, vLLM takes --vllm-memory {config.vllm_memory:g} of the GPU: {2 * shape.total / 2**30:.1f} GiB for "
            "its weights, the rest for keys and values. It gives all of it back for updates."
        )
    if on_gpu:
        print("Not in these sums: CUDA's and NCCL's own buffers and fragmentation, one or two GiB.")


def _offloaded(shape: Shape, config, ranks: int, compute: int) -> float:
    """GiB that a rank has moved to the CPU's memory: what it would hold on the GPU, less what it does."""
    off = dataclasses.replace(config, offload_optimizer=False, offload_reference=False)
    sums = [
        sum(held(shape, each, ranks, compute, needs_copy=False).values())
        + moments(shape, each, ranks, compute)["the loss"]["gradients"]
        for each in (off, config)
    ]
    return (sums[0] - sums[1]) / 2**30


def _row(name: str, values) -> str:
    cells = (f"{value:8.1f}" if isinstance(value, float) else f"{value:8d}" for value in values)
    return f"{name:62}" + "".join(cells)
