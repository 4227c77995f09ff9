"""
Samplers: requests in, sampled turns out.

    add(key, ids, ...) ...  ->  step()  ->  [(key, sampled ids, their log-probabilities)]

    HFEngine     any Hugging Face model on any device, a wave a turn, from keyed generators
    VLLMEngine   vLLM: continuous batching across turns, and a prefix cache    Kwon et al. 2023, arXiv 2309.06180
    open_engine  the one that --engine names

Both have add, step, sync, sleep, wake and close, and rollout.py's loop knows nothing else of them. Token ids in, token ids
out: no text passes through here. (api_model.py has a third, whose `step` may also return an exception or no ids.)

Read model.py first, rollout.py next.
"""

import os
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import contextmanager
from importlib.util import find_spec

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AttentionInterface, Cache, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from curriculum import seed_for

# --- Hugging Face ---


class SlotCache(Cache):
    """Keys and values of many unfinished trajectories: column j of a slot holds token j of its trajectory.

    A turn's new tokens are written behind the ones already there, so nothing is ever computed twice, and a
    slot's stale columns need no clearing: attention is masked to columns at or before the token's position.
    `Cache` grows by concatenation, a copy of everything at every token; these buffers grow by doubling.
    """

    def __init__(self):
        self.keys: list[Tensor] = []  # one a layer, each (slots, heads, columns, head_dim)
        self.values: list[Tensor] = []
        self.rows = slice(0, 0)  # the slots that the present forward pass works on
        self.positions = torch.zeros(
            0, 0, dtype=torch.long
        )  # (rows, W) the column of each new token
        self.columns = 0  # how many columns any of those rows needs
        self.filled = 0  # how many any slot ever needed

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args, **kwargs):
        """Called by each attention layer: store the new (rows, heads, W, D), return all (rows, heads, columns, D)."""
        if layer_idx == len(self.keys):
            self.keys.append(key_states[:0, :, :0])
            self.values.append(value_states[:0, :, :0])
        slot = torch.arange(self.rows.start, self.rows.stop, device=key_states.device)[:, None]
        self.filled = max(self.filled, self.columns)
        present = []
        for buffers, new in ((self.keys, key_states), (self.values, value_states)):
            buffers[layer_idx] = self._grown(buffers[layer_idx], new)
            buffers[layer_idx][slot, :, self.positions] = new.transpose(1, 2)
            present.append(buffers[layer_idx][self.rows, :, : self.columns])
        return tuple(present)

    def move(self, sources: Tensor, targets: Tensor) -> None:
        """Copy slots `sources` over slots `targets`, all at once: with the two swapped in both it is an exchange."""
        for buffers in (self.keys, self.values):
            for buffer in buffers:
                used = buffer[:, :, : self.filled]
                used[targets] = used[sources]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Part of the library's interface; positions and masks are given explicitly, so nothing hangs on it."""
        return self.columns

    def _grown(self, buffer: Tensor, new: Tensor) -> Tensor:
        slots, heads, columns, dim = buffer.shape
        need = (self.rows.stop, heads, self.columns, dim)
        if need[0] <= slots and need[2] <= columns:
            return buffer
        shape = (
            max(slots, need[0]),
            heads,
            max(2 * columns, need[2]) if need[2] > columns else columns,
            dim,
        )
        grown = new.new_zeros(shape)
        grown[:slots, :, :columns] = buffer
        return grown


# A wave ends when at most this share of its rows is still writing. Those go on in the next one: few completions
# run to their limit, and a step for one row costs nearly as much as a step for ten.
STRAGGLERS = 1 / 8


class HFEngine:
    """Samples with a Hugging Face model on any device, in waves.

    `in_waves` asks the loop to call `step` only when no observation is on its way; `step` then samples one
    turn for every request, in key order, each row from a generator keyed by (seed, key). So results depend
    on the requests alone, never on which environment happened to answer first. The last few rows of a wave,
    those with the longest turns, are not waited for: they are finished in a later one.

    A key is a tuple that names the turn: (..., sample, turn). Requests that share all but its last part are
    turns of one trajectory, and only what is new since its last turn is computed; a trajectory that makes
    no request in a wave is over, and its slot is given away.

    lm        unsharded; stop_ids end a turn
    returns   `step`: [(key, sampled ids, their logprobs at the sampling temperature)]
    """

    in_waves = True

    def __init__(
        self, lm: PreTrainedModel, stop_ids: set[int], seed: int = 0, prefill_tokens: int = 8192
    ):
        self.lm, self.seed, self.prefill_tokens = lm, seed, prefill_tokens
        self.device = lm.device
        self.stop_ids = torch.tensor(sorted(stop_ids), device=self.device)
        self.version = 0
        self.waiting: dict[tuple, tuple[list[int], int, float]] = {}
        self.begun: dict[tuple, tuple[list[int], list[float]]] = {}  # what stragglers have written
        self.seconds = 0.0  # spent in `step`, for benchmarks and metrics
        lm.set_attn_implementation("shared_heads")
        self._forget()

    def add(
        self, key: tuple, ids: list[int], max_new_tokens: int, temperature: float = 1.0
    ) -> None:
        """Ask for a turn after `ids`. temperature 0 is greedy; its logprobs are those at temperature 1."""
        self.waiting[key] = (ids, max_new_tokens, temperature)

    @torch.inference_mode()
    def step(self) -> list[tuple[tuple, list[int], list[float]]]:
        """Write until (nearly) every waiting request has its turn; returns those that have."""
        if not self.waiting:
            return []
        started = time.perf_counter()
        keys = self._by_slot(sorted(self.waiting))  # row i of this wave works in slot i
        requests = [self.waiting.pop(key) for key in keys]
        unread = [self._unread(key, ids) for key, (ids, _, _) in zip(keys, requests, strict=True)]
        start = [len(ids) - len(new) for (ids, _, _), new in zip(requests, unread, strict=True)]
        drawn, slots = self._write(keys, requests, self._read(unread, start))
        self.cached, finished = {}, []
        for key, (prompt, most, temperature), (ids, logprobs, is_finished), slot in zip(
            keys, requests, drawn, slots, strict=True
        ):
            self.cached[key[:-1]] = (
                slot,
                prompt + ids[:-1],
            )  # the last one was sampled, never read
            old_ids, old_logprobs = self.begun.pop(key, ([], []))
            turn = old_ids + ids, old_logprobs + logprobs
            if is_finished:
                finished.append((key, *turn))
            else:
                self.begun[key] = turn
                self.waiting[key] = (prompt + ids, most - len(ids), temperature)
        self.seconds += time.perf_counter() - started
        return finished

    def sync(self, named_weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Take new weights by parameter name, and forget every key and value computed with the old ones."""
        own = dict(self.lm.named_parameters())
        with torch.no_grad():
            for name, weight in named_weights:
                if (
                    own[name].data_ptr() != weight.data_ptr()
                ):  # with one rank it is the trainer's own tensor
                    own[name].copy_(weight)
        self.version = version
        self._forget()

    def sleep(self) -> None:
        """Give memory back for the update."""
        self._forget()

    def wake(self) -> None:
        """Nothing to do: the weights stayed where they are."""

    def close(self) -> None:
        """Nothing to do."""

    def _forget(self) -> None:
        assert not self.begun, "new weights in the middle of a turn"
        self.cache = SlotCache()
        self.cached: dict[
            tuple, tuple[int, list[int]]
        ] = {}  # trajectory -> (slot, ids whose keys it holds)

    def _unread(self, key: tuple, ids: list[int]) -> list[int]:
        _, known = self.cached.get(key[:-1], (0, []))
        new = ids[len(known) :]
        # Nothing new where the same question is asked once more: then all of it is read again.
        return new if new and ids[: len(known)] == known else ids

    def _by_slot(self, keys: list[tuple]) -> list[tuple]:
        """Order the wave's keys so that row i is the trajectory in slot i, without a gap.

        Slots of trajectories that are over are filled from the end, new trajectories come last.
        """
        slot_of = {key: self.cached[key[:-1]][0] for key in keys if key[:-1] in self.cached}
        known = sorted(slot_of, key=slot_of.get)
        inside = {slot_of[key]: key for key in known if slot_of[key] < len(known)}
        outside = [key for key in known if slot_of[key] >= len(known)]
        gaps = [slot for slot in range(len(known)) if slot not in inside]
        if gaps:
            self.cache.move(torch.tensor([slot_of[key] for key in outside]), torch.tensor(gaps))
        inside |= dict(zip(gaps, outside, strict=True))
        return [inside[slot] for slot in range(len(known))] + [
            key for key in keys if key not in slot_of
        ]

    def _read(self, unread: list[list[int]], start: list[int]) -> Tensor:
        """Feed every row its unread tokens; returns the logits (n, V) behind each row's last one."""
        logits, first = [], 0
        while first < len(unread):
            last, width = first, 0
            while last < len(
                unread
            ):  # as many rows as fit the budget, padding included; at least one
                wider = max(width, len(unread[last]))
                if last > first and (last + 1 - first) * wider > self.prefill_tokens:
                    break
                last, width = last + 1, wider
            rows = unread[first:last]
            ids = torch.tensor([row + [0] * (width - len(row)) for row in rows], device=self.device)
            begin = torch.tensor(start[first:last], device=self.device)
            hidden = self._forward(slice(first, last), ids, begin)  # (rows, W, H)
            ends = torch.tensor([len(row) - 1 for row in rows], device=self.device)
            logits.append(
                self._logits(hidden[torch.arange(last - first, device=self.device), ends])
            )
            first = last
        return torch.cat(logits)

    def _write(
        self, keys: list[tuple], requests: list[tuple], logits: Tensor
    ) -> tuple[list[tuple[list[int], list[float], bool]], list[int]]:
        """Sample until all rows but a few stragglers have stopped or used up their tokens.

        returns   ids, logprobs and whether it is finished, for each row; each row's slot
        """
        n = len(keys)
        most = torch.tensor([most for _, most, _ in requests], device=self.device)
        temperature = torch.tensor([warmth for *_, warmth in requests], device=self.device)
        start = torch.tensor([len(ids) for ids, _, _ in requests], device=self.device)
        uniforms = [self._uniforms(key, int(most.max())) for key in keys]
        uniforms = torch.stack(uniforms).to(self.device)
        ids = torch.zeros_like(uniforms, dtype=torch.long)  # (n, tokens of the longest turn)
        logprobs, lengths = torch.zeros_like(uniforms), torch.zeros_like(most)
        is_finished = torch.zeros(n, dtype=torch.bool, device=self.device)
        occupant = torch.arange(n, device=self.device)  # occupant[slot]: the row that works there
        rows = occupant.clone()  # those worked on, in slots 0, 1, ...
        for t in range(int(most.max())):
            tokens, logprob = sample(logits, temperature[rows], uniforms[rows, t])
            ids[rows, t], logprobs[rows, t] = tokens, logprob
            lengths[~is_finished] = t + 1
            is_finished[rows] |= torch.isin(tokens, self.stop_ids) | (t + 1 >= most[rows])
            going = ~is_finished[rows]
            active = int(going.sum())
            if active <= STRAGGLERS * n:
                break
            if 4 * active <= 3 * len(
                rows
            ):  # many have stopped: move the others up, go on with those
                front = torch.where(~going[:active])[0]
                back = active + torch.where(going[active:])[0]
                there, here = torch.cat([front, back]), torch.cat([back, front])
                self.cache.move(there, here)
                for held in (occupant, tokens):
                    held[here] = held[there]
                rows, tokens = occupant[:active].clone(), tokens[:active]
            hidden = self._forward(slice(0, len(rows)), tokens[:, None], start[rows] + t)
            logits = self._logits(hidden[:, 0])
        drawn = [
            (row[:length], numbers[:length], done)
            for row, numbers, length, done in zip(
                ids.tolist(), logprobs.tolist(), lengths.tolist(), is_finished.tolist(), strict=True
            )
        ]
        return drawn, torch.argsort(occupant).tolist()

    def _forward(self, rows: slice, ids: Tensor, start: Tensor) -> Tensor:
        """One pass over slots `rows`: ids (rows, W) go to columns start, start+1, ... of each."""
        positions = start[:, None] + torch.arange(ids.shape[1], device=self.device)  # (rows, W)
        columns = int(positions.max()) + 1
        self.cache.rows, self.cache.positions, self.cache.columns = rows, positions, columns
        visible = (
            torch.arange(columns, device=self.device) <= positions[..., None]
        )  # (rows, W, columns)
        out = self.lm.get_decoder()(
            input_ids=ids,
            position_ids=positions,
            attention_mask=visible[:, None],
            past_key_values=self.cache,
            use_cache=True,
        )
        return out.last_hidden_state

    def _logits(self, hidden: Tensor) -> Tensor:
        return self.lm.get_output_embeddings()(hidden)

    def _uniforms(self, key: tuple, count: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed_for(self.seed, "sampling", key))
        used = len(self.begun.get(key, ([], []))[0])  # a straggler goes on where it stopped
        return torch.rand(used + count, generator=generator)[used:]


def shared_heads_attention(module, query, key, value, attention_mask, scaling=None, **kwargs):
    """`sdpa`, up to three times as fast for one new token a row where query heads share their keys (GQA, MQA).

    Heads that share keys become positions that share keys: the kernel reads those once, not once a head.
    """
    B, heads, width, dim = query.shape
    shared = heads // key.shape[1]
    if width > 1 or shared == 1 or attention_mask is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **kwargs
        )
    folded = query.reshape(B, key.shape[1], shared, dim)
    out = nn.functional.scaled_dot_product_attention(
        folded, key, value, attn_mask=attention_mask, scale=scaling
    )
    return out.reshape(B, heads, 1, dim).transpose(1, 2).contiguous(), None


AttentionInterface.register("shared_heads", shared_heads_attention)
AttentionMaskInterface.register("shared_heads", sdpa_mask)


def sample(logits: Tensor, temperature: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Draw one token a row by inverting its cumulative distribution, and score it.

    logits       (n, V);  temperature (n,), 0 for the most likely token;  uniforms (n,) in [0, 1)
    returns      tokens (n,), logprobs (n,) of the distribution really sampled, temperature applied
    """
    greedy = temperature == 0
    logprobs = (logits.float() / temperature.masked_fill(greedy, 1.0)[:, None]).log_softmax(
        -1
    )  # (n, V)
    cumulative = logprobs.exp().cumsum(-1)
    # Times the sum as computed, which rounding keeps from being exactly 1: no draw falls off the end.
    point = uniforms[:, None] * cumulative[:, -1:]
    drawn = torch.searchsorted(cumulative, point, right=True)[:, 0].clamp(max=logits.shape[1] - 1)
    tokens = torch.where(greedy, logits.argmax(-1), drawn)
    return tokens, logprobs.gather(-1, tokens[:, None])[:, 0]


# --- vLLM ---


class VLLMEngine:
    """Samples with vLLM, in this process, on GPUs or (its CPU build) on CPUs.

    A request joins the batch the moment it is added and leaves it the moment it is finished, so a slow
    environment or a long completion holds nobody back. Keys and values of what a trajectory has read and
    written stay in the prefix cache: its next turn costs only the new tokens.

    The random numbers are vLLM's own, one generator for all: the same requests in another order give other
    completions, equal in distribution.

    path         a folder or hub id: its architecture, and the weights until the first `sync`
    max_tokens   the longest trajectory
    memory       share of the GPU's memory for weights and cache
    """

    in_waves = False

    def __init__(
        self,
        path: str,
        stop_ids: set[int],
        seed: int = 0,
        max_tokens: int = 4096,
        memory: float = 0.5,
    ):
        # In this process weights pass by reference; in another one they would go through a pipe.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        # At each sync it warns of layers that got no weights: those that have none, and a tied head.
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB; the GPU's share is `memory`
        from vllm import LLM, SamplingParams

        self.on_gpu = torch.cuda.is_available()
        self.sampling = SamplingParams
        with _only_own_modules_inspected():
            self.llm = LLM(
                model=path,
                dtype="bfloat16" if self.on_gpu else "float32",
                max_model_len=max_tokens,
                seed=seed,
                # Of the distribution sampled from, with the temperature in it: what the trainer compares with.
                logprobs_mode="processed_logprobs",
                enable_prefix_caching=True,
                generation_config="vllm",  # the model's own top_p and top_k would bias every ratio
                gpu_memory_utilization=memory,
                enable_sleep_mode=self.on_gpu,
                enforce_eager=not self.on_gpu,  # compiling takes a minute, for kernels that a CPU has not
                # torchrun has made the processes already, each with an engine of its own.
                distributed_executor_backend="external_launcher" if "RANK" in os.environ else None,
            )
        self.stop_ids = sorted(stop_ids)
        self.version = 0
        self.keys: dict[str, tuple] = {}  # vLLM's request id -> our key
        self.count = 0
        self.seconds = 0.0  # spent in `step`
        self.prompt_tokens = self.cached_tokens = 0  # of requests, and of these what the cache knew

    def add(
        self, key: tuple, ids: list[int], max_new_tokens: int, temperature: float = 1.0
    ) -> None:
        """Ask for a turn after `ids`. temperature 0 is greedy; its logprobs are those at temperature 1."""
        params = self.sampling(
            temperature=temperature, max_tokens=max_new_tokens, logprobs=0, detokenize=False,
            stop_token_ids=self.stop_ids, ignore_eos=True,
        )  # fmt: skip
        self.count += 1
        self.keys[str(self.count)] = key
        self.llm.llm_engine.add_request(str(self.count), {"prompt_token_ids": ids}, params)

    def step(self) -> list[tuple[tuple, list[int], list[float]]]:
        """One token for every running request; returns the turns that this finished, often none."""
        if not self.keys:
            return []
        started = time.perf_counter()
        finished = []
        for output in self.llm.llm_engine.step():
            if output.finished:
                (turn,) = output.outputs
                ids = list(turn.token_ids)
                logprobs = [of[i].logprob for of, i in zip(turn.logprobs, ids, strict=True)]
                finished.append((self.keys.pop(output.request_id), ids, logprobs))
                self.prompt_tokens += len(output.prompt_token_ids)
                self.cached_tokens += output.num_cached_tokens or 0
        self.seconds += time.perf_counter() - started
        return finished

    def sync(self, named_weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Take new weights by their Hugging Face names, one at a time, in place; forget the prefix cache."""
        assert not self.keys, "new weights in the middle of a turn"
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": named_weights})
        self.llm.apply_model(_repack_head)
        # Keys and values of the old weights would be taken for those of the new ones.
        is_empty = self.llm.llm_engine.reset_prefix_cache()
        assert is_empty, "vLLM kept its prefix cache"
        self.version = version

    def sleep(self) -> None:
        """Give the GPU's memory back for the update: weights wait in the CPU's, the cache is dropped."""
        if self.on_gpu:
            self.llm.sleep(level=1)

    def wake(self) -> None:
        """Take the memory again; the weights are the old ones until `sync`."""
        if self.on_gpu:
            self.llm.wake_up()

    def close(self) -> None:
        """End vLLM, and with it this process's groups: it takes torch.distributed for its own. Collective."""
        self.llm.llm_engine.engine_core.shutdown()


@contextmanager
def _only_own_modules_inspected():
    # Without Triton, as on CPUs, vLLM looks through every attribute of every loaded module for kernels to replace.
    # That breaks on objects that answer for any attribute (llvmlite's) or for none (Flask's `request`).
    from vllm.triton_utils import dispatcher

    class OwnModules:
        @property
        def modules(self) -> dict:
            return {name: m for name, m in sys.modules.items() if name.split(".")[0] == "vllm"}

    everything, dispatcher.sys = dispatcher.sys, OwnModules()
    try:
        yield
    finally:
        dispatcher.sys = everything


def _repack_head(model: nn.Module) -> None:
    # On CPUs vLLM multiplies by a packed copy of the output projection. With tied embeddings a reload changes
    # the embeddings and leaves that copy as it was: the sampler would go on with its first weights.
    head = getattr(model, "lm_head", None)
    if getattr(head, "cpu_linear", None) is not None:
        head.quant_method.process_weights_after_loading(head)


# --- which one ---


def check_engine(name: str) -> None:
    """raises ValueError, in one sentence, where --engine asks for what is not installed."""
    if name == "vllm" and find_spec("vllm") is None:
        raise ValueError(
            "--engine vllm needs vLLM: pip install -r requirements-gpu.txt (without a GPU: run `make test` once, "
            "which installs its CPU build), or choose --engine hf"
        )


def open_engine(
    name: str,
    path: str,
    twin: Callable[[], PreTrainedModel],
    stop_ids: set[int],
    seed: int,
    max_tokens: int,
    memory: float,
):
    """What --engine names: auto is vllm where it is installed and there is a GPU, else hf.

    path   of the model's configuration, for vLLM;  twin   makes the model that HFEngine samples with
    """
    if name == "auto":
        name = "vllm" if torch.cuda.is_available() and find_spec("vllm") else "hf"
    if dist.get_rank() == 0:
        print(f"sampling with --engine {name}")
    if name == "hf":
        return HFEngine(twin(), stop_ids, seed)
    return VLLMEngine(path, stop_ids, seed + dist.get_rank(), max_tokens, memory)
