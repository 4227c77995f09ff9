"""
An agent's memory: how a conversation with an environment becomes one growing list of token ids.

    instructions, observation  ->  prompt ids  ->  (completion ids, observation ids) x K turns  ->  Trajectory

    parse_react   the two-line form Thought / Action     Yao et al. 2022 (ReAct), arXiv 2210.03629
    Chat          a tokenizer's chat template, cut into the two pieces that an append-only history needs
    Trajectory    the token buffer: ids, loss_mask, logprobs, and the turns they stand for

Token in, token out: ids that the model sampled are kept as sampled, never decoded and encoded again, because
text -> ids is not the inverse of ids -> text and the trainer would then score tokens nobody sampled.

Read env_server.py first, model.py next.
"""

import re
from dataclasses import dataclass, field

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

# What every agent is told after the environment's own instructions.
FORMAT = """Each turn, write one short thought and then exactly one action, in this form:
Thought: what you know and what to do next
Action: the action"""

# --- reading what the agent wrote ---

_ACTION = re.compile(r"^[ \t]*Action:", re.MULTILINE)
_THOUGHT = re.compile(r"^\s*Thought:[ \t]*")


def parse_react(completion: str) -> tuple[str, str, str]:
    """Split a completion into (thought, action, error); error is "" where the form was kept.

    The action is the first non-empty line after the one line that starts with `Action:`; what a model
    writes below that line is commentary. The thought is everything above it, with or without `Thought:`.
    What stands before </think>, or after a <think> that was never closed, is not looked at: there a
    model may weigh several actions.
    A broken form is the agent's mistake, not an exception: error is the sentence it will be shown.

    >>> parse_react("Thought: the key is near.\\nAction: go to red key 1")
    ('the key is near.', 'go to red key 1', '')
    >>> parse_react("Thought: hm")[2]
    'No action found. End your turn with one line: Action: the action'
    """
    completion = completion.rpartition("</think>")[2].partition("<think>")[0]
    marks = list(_ACTION.finditer(completion))
    before = completion[: marks[0].start()] if marks else completion
    thought = _THOUGHT.sub("", before, count=1).strip()
    if not marks:
        return thought, "", "No action found. End your turn with one line: Action: the action"
    if len(marks) > 1:
        return (
            thought,
            "",
            f"{len(marks)} actions found. Write exactly one line: Action: the action",
        )
    lines = completion[marks[0].end() :].strip().splitlines()
    if not lines:
        return thought, "", "The action is empty. Write it after the colon: Action: the action"
    return thought, lines[0].strip(), ""


# --- the chat template, in pieces ---

_MARK = "zqOBSERVATIONqz"  # stands for an observation while the template is taken apart
_SAID = "zqCOMPLETIONqz"  # stands for a completion


class Chat:
    """A tokenizer's chat template as two functions on ids: `prompt` once, then `between` every turn.

        prompt(instructions, o1)   <system> instructions <user> o1 <assistant>
        between(o2)                                               <user> o2 <assistant>

    with the end-of-turn token between a completion and `between` written by the model itself, or by
    `Trajectory.add_completion` where the model was cut off. Nothing sampled is ever rendered again, so
    a template that rewrites history (dropping earlier <think> blocks, say) cannot do so here. A template
    whose rendering of a whole conversation is not these pieces joined is refused at construction.

    tokenizer   any Hugging Face tokenizer with a chat template
    raises      ValueError, in one sentence, for a template that cannot be taken apart
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self.tokenizer = tokenizer
        self._encoded: dict[str, list[int]] = {}  # what has been encoded before
        if not tokenizer.chat_template:
            raise ValueError(
                f"{tokenizer.name_or_path} has no chat template: use an instruct model, or set one on its tokenizer"
            )
        special = set(tokenizer.all_special_tokens) | set(tokenizer.get_added_vocab())
        # Gemma's vocabulary adds runs of newlines in the same way: those end nothing, and stay as they are.
        special = sorted(filter(str.strip, special), key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, special)))
        turn = [{"role": "user", "content": "u"}, {"role": "assistant", "content": _SAID}]
        rendered = self._render(turn + [{"role": "user", "content": _MARK}])
        between = rendered.split(_SAID)[-1]  # end of turn, headers, observation, headers
        if rendered.count(_SAID) != 1 or between.count(_MARK) != 1:
            raise ValueError(
                f"the chat template of {tokenizer.name_or_path} does not render every message once and "
                "as it is: no way to tell what stands between two turns"
            )
        ids = self._encode(between)
        self.end_of_turn = ids[0]
        self._end_text = tokenizer.decode(ids[:1])
        if not between.startswith(self._end_text) or self.end_of_turn not in self._special_ids():
            raise ValueError(
                f"the chat template of {tokenizer.name_or_path} closes the agent's turn with "
                f"{between[:20]!r}, not with one special token: no way to tell where a turn ends"
            )
        self._before, self._after = between.split(_MARK)
        # The model's own end-of-text closes a turn too: some chat models use either.
        self.stop_ids = {self.end_of_turn, tokenizer.eos_token_id} - {None}
        self._check_append_only()

    def prompt(self, instructions: str, observation: str) -> list[int]:
        """Ids of the conversation up to where the agent speaks for the first time."""
        text = f"{instructions}\n\n{FORMAT}"
        return self._encode(self._render(self._opening(text, self._clean(observation))))

    def between(self, observation: str) -> list[int]:
        """Ids from after the agent's end-of-turn token to where it speaks again."""
        # Encoded together with the end-of-turn token, then cut: a tokenizer may encode a piece of text
        # differently at the start of a string than in the middle of one.
        ids = self._encode(self._before + self._clean(observation) + self._after)
        return ids[ids.index(self.end_of_turn) + 1 :]

    def decode(self, ids: list[int]) -> str:
        """The text of a completion, without its end-of-turn token."""
        return self.tokenizer.decode([i for i in ids if i not in self.stop_ids]).strip()

    def clip(self, observation: str, max_tokens: int) -> str:
        """Cut an observation's middle out, visibly, so that it is at most `max_tokens` tokens long.

        Where not even the words that say so fit, as much of them as does stands for the observation.
        """
        ids = self._encode(self._clean(observation))
        if len(ids) <= max_tokens:
            return observation
        keep = max_tokens
        while True:  # the mark itself costs tokens, and a cut may fall inside a character
            keep -= 1
            mark = f" [... {len(ids) - keep} of {len(ids)} tokens left out ...] "
            head, tail = ids[: (keep + 1) // 2], ids[len(ids) - keep // 2 :]
            text = self.tokenizer.decode(head) + mark + self.tokenizer.decode(tail)
            excess = len(self._encode(self._clean(text))) - max_tokens
            if excess <= 0:
                return text
            if keep <= 1:
                return self.tokenizer.decode(self._encode(mark.strip())[:max_tokens])
            keep = max(1, keep - excess + 1)

    def _opening(self, instructions: str, observation: str) -> list[dict]:
        system = [{"role": "system", "content": instructions}]
        user = [{"role": "user", "content": observation}]
        try:
            self._render(system + user)
        except TemplateError:  # what a template raises that knows no system role
            return [{"role": "user", "content": f"{instructions}\n\n{observation}"}]
        return system + user

    def _render(self, messages: list[dict]) -> str:
        return self.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )

    def _encode(self, text: str) -> list[int]:
        # A group's episodes start alike, and many an observation returns.
        if text not in self._encoded:
            if len(self._encoded) > 100_000:
                self._encoded.clear()
            self._encoded[text] = self.tokenizer.encode(text, add_special_tokens=False)
        return list(self._encoded[text])

    def _special_ids(self) -> set[int]:
        return set(self.tokenizer.all_special_ids) | set(self.tokenizer.get_added_vocab().values())

    def _clean(self, observation: str) -> str:
        # A web page that contains "<|im_end|>" must not be able to end its own turn and speak for the user.
        # Stripped, because many templates strip and the pieces must be the same for all.
        text = observation.encode("utf-8", "replace").decode("utf-8").strip()
        return self._special.sub(lambda m: m[0][0] + " " + m[0][1:], text)

    def _check_append_only(self) -> None:
        say, hear = (
            {"role": "assistant", "content": _SAID},
            {"role": "user", "content": "two\nlines"},
        )
        opening = self._opening("Do it.", "first")
        whole = self._render(opening + [say, hear, say, hear])
        joined = self._render(opening) + 2 * (_SAID + self._before + "two\nlines" + self._after)
        if joined != whole:
            raise ValueError(
                f"the chat template of {self.tokenizer.name_or_path} is not append-only: a longer conversation "
                "does not start with the shorter one, so no token list can serve as history. "
                "Choose a model whose template only appends"
            )


# --- the record ---


@dataclass
class Turn:
    """One exchange: what the agent saw, what it wrote, what that earned."""

    observation: str
    completion: str
    thought: str
    action: str
    start: int  # ids[start:stop] are the tokens the agent sampled in this turn
    stop: int
    reward: float = 0.0
    format_error: bool = False
    is_sent: bool = False  # to the environment: neither cut off in the middle nor of broken form
    invalid: bool = False  # the environment refused it


@dataclass
class Trajectory:
    """One episode as tokens and turns. It only ever grows.

    A three-turn episode, `s` sampled, `.` not:

        ids        <prompt> go left <end> <obs 2> open <end> <obs 3> take key <end> <obs 4>
        loss_mask  .        s  s    s     .       s    s     .       s    s   s     .

    The observation after the last turn stays in (mask 0): a critic needs to see that state. Entry `t` of
    `loss_mask` and `logprobs` describes token `t`; `logprobs` is the sampler's, and 0 where the mask is 0.
    """

    env: str
    task: str
    group: int = 0  # which of the step's tasks; the trajectories of one group share a baseline
    sample: int = 0  # 0 .. G-1 within the group
    max_turns: int = 0
    category: str = ""
    weights_version: int = 0
    ids: list[int] = field(default_factory=list)
    loss_mask: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    observation: str = ""  # the latest, not yet answered
    success: bool = False
    end: str = ""  # terminated | max_turns | max_tokens | error; "" while it runs
    error: str = ""  # what went wrong, where end is error

    @property
    def episode_return(self) -> float:
        """The sum of the turns' rewards, undiscounted: the one return used in training and evaluation."""
        return sum((turn.reward for turn in self.turns), 0.0)

    def add_context(self, ids: list[int]) -> None:
        """Append tokens that the agent reads: prompt, headers, observations."""
        self.ids += ids
        self.loss_mask += [0] * len(ids)
        self.logprobs += [0.0] * len(ids)

    def add_completion(
        self, ids: list[int], logprobs: list[float], chat: Chat, close: bool = True
    ) -> Turn:
        """Append one turn of sampled tokens, and parse it.

        Where the sampler stopped for length, the end-of-turn token that the template needs is appended (if
        `close`) with mask 0: training on a token nobody sampled gives ratios without bound.
        """
        assert len(ids) == len(logprobs) > 0, f"{len(ids)} sampled ids, {len(logprobs)} logprobs"
        start = len(self.ids)
        self.ids += ids
        self.loss_mask += [1] * len(ids)
        self.logprobs += logprobs
        if close and ids[-1] != chat.end_of_turn:
            self.add_context([chat.end_of_turn])
        completion = chat.decode(ids)
        thought, action, error = parse_react(completion)
        turn = Turn(
            self.observation,
            completion,
            thought,
            action,
            start,
            start + len(ids),
            format_error=bool(error),
        )
        self.observation = error
        self.turns.append(turn)
        return turn
