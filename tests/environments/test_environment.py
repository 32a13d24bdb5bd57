"""Episodes with an engine that reads from a list: what it is asked in each turn, token by token, and what comes out."""

import math

import pytest
import torch

from dtrain.base.errors import UserError
from dtrain.data.text.template import ChatTemplate
from dtrain.data.text.tokenizer import Tokenizer
from dtrain.inference.request import Completion, Request, SamplingParams
from dtrain.rl.environments import calls
from dtrain.rl.environments.episodes import Observations, environment_seed, run_episodes, turn_seed
from dtrain.rl.environments.stepping import EnvironmentReply, count_tool_answers
from tests.data import makers, templates

FAMILIES = {  # template, tokenizer, what ends a turn
    "qwen25": (templates.QWEN25, lambda: makers.byte_level(None), "<|im_end|>"),
    "qwen3": (templates.QWEN3, lambda: makers.byte_level(None), "<|im_end|>"),
    "llama3": (templates.LLAMA3, lambda: makers.byte_level(), "<|eot_id|>"),
    "gemma3": (templates.GEMMA3, makers.metaspace, "<end_of_turn>"),
    "llama2": (templates.LLAMA2, makers.metaspace, "</s>"),
}


def family(tmp_path, name):
    source, make, end = FAMILIES[name]
    tokenizer = Tokenizer.from_directory(makers.save(tmp_path / name, make(), eos_token=end, bos_token="<s>"))
    return tokenizer, ChatTemplate(source, name, tokenizer.special_tokens)


class Counting:
    """An environment that answers with the number of the turn, and is done after some."""

    def __init__(self, turns, rewards=(), observation=None):
        self.turns, self.rewards, self.seen = turns, list(rewards), []
        self._observation = observation

    @property
    def done(self):
        return len(self.seen) >= self.turns

    def step(self, completion):
        self.seen.append(completion)
        return self.rewards[len(self.seen) - 1] if self.rewards else None

    def observe(self):
        return f"turn {len(self.seen)}" if self._observation is None else self._observation


class Scripted:
    """Completes each request of a call with the next of the texts that stand for its prompt_index."""

    def __init__(self, tokenizer, script, ends=True):
        self.tokenizer, self.ends, self.asked, self.read = tokenizer, ends, [], []
        self.script = {key: list(texts) for key, texts in script.items()}

    def generate(self, requests):
        self.asked.append(list(requests))
        found = []
        for request in requests:
            ids = self.tokenizer.encode(self.script[request.prompt_index].pop(0))
            ids += [self.tokenizer.eos_id] if self.ends else []
            finish = "length" if len(ids) > request.sampling.max_new_tokens else "stop"
            ids = ids[: request.sampling.max_new_tokens]
            version = 10 - len(self.asked)
            routed = torch.full((len(request.prompt) + len(ids), 2, 1), len(self.asked), dtype=torch.int16)
            routed[-1] = -1  # a later turn reads it
            self.read.append(len(routed) - 1)
            found.append(Completion(ids, [-float(token) for token in ids], finish, version, routed))
        return found


class Here:
    """Environments in this very process; what goes wrong with one is raised."""

    def __init__(self, *environments):
        self.environments = environments

    def step(self, turns, encode):
        replies = []
        for place, turn in enumerate(turns):
            environment = self.environments[turn.number]
            answer = calls.step(environment, turn.text)
            goes_on = not answer["done"] and not turn.is_last
            seen = calls.observe(environment)["observation"] if goes_on else ""
            counts = count_tool_answers(seen)
            ids = encode(place, seen) if goes_on else []
            replies.append(EnvironmentReply(answer["earned"], answer["done"], ids, False, *counts))
        return replies


class Losing(Here):
    """Loses these environments with these steps."""

    def __init__(self, *environments, lost):
        super().__init__(*environments)
        self.lost = lost

    def step(self, turns, encode):
        replies = super().step(turns, encode)
        seen = [len(self.environments[turn.number].seen) for turn in turns]
        return [
            EnvironmentReply(is_lost=True) if self.lost.get(turn.number) == steps else reply
            for turn, steps, reply in zip(turns, seen, replies, strict=True)
        ]


def requests_for(prompt, count, most=40):
    return [Request(prompt, SamplingParams(most), 5, index, 3) for index in range(count)]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_conversation_token_by_token(tmp_path, name):
    """The model sees the conversation as its template writes it, for replies that the template leaves alone."""
    tokenizer, template = family(tmp_path, name)
    asked = [{"role": "user", "content": "two and two?"}]
    prompt = tokenizer.encode(template.render(asked, add_generation_prompt=True))
    replies = ["I say so.", "Four", "Then stop."]
    engine = Scripted(tokenizer, {0: replies})
    environment = Counting(3)
    (episode,) = run_episodes(
        engine.generate,
        requests_for(prompt, 1),
        Here(environment),
        Observations(tokenizer, template),
        max_turns=5,
        max_length=999,
    )
    assert (episode.turns, episode.finish, episode.earned, episode.version) == (3, "stop", None, 7)
    assert [text.strip() for text in environment.seen] == replies
    for turn, (request,) in enumerate(engine.asked):
        text = template.render(asked, add_generation_prompt=True)
        seen, whole = tokenizer.decode(request.prompt), tokenizer.decode(tokenizer.encode(text))
        if name in ("gemma3", "llama2"):  # a reply encoded by itself begins with a space there
            seen, whole = "".join(seen.split()), "".join(whole.split())
        assert seen == whole, turn
        asked += [
            {"role": "assistant", "content": replies[turn]},
            {"role": "user", "content": f"turn {turn + 1}"},
        ]
    first = [next(turn for turn, end in enumerate(engine.read, 1) if place < end) for place in range(engine.read[-1])]
    assert episode.routed[:, 1, 0].tolist() == [*first, -1] and len(prompt) + len(episode.ids) == len(first) + 1
    places = zip(episode.ids, episode.logprobs, episode.sampled, strict=True)
    drawn = [(token, logprob) for token, logprob, was in places if was]
    assert all(logprob == -token for token, logprob in drawn)
    expected = [token for reply in replies for token in [*tokenizer.encode(reply), tokenizer.eos_id]]
    assert [token for token, _ in drawn] == expected
    assert all(logprob == 0.0 for logprob, was in zip(episode.logprobs, episode.sampled, strict=True) if not was)
    assert not episode.sampled[len(tokenizer.encode(replies[0])) + 1]


@pytest.mark.trap(
    "tokens of a turn decoded and encoded again",
    "huggingface/trl #5224",
    "log-probabilities of tokens that were not drawn",
    "tokens stay as they were drawn",
)
def test_sampled_tokens_are_never_encoded_again(tmp_path):
    """Tokens that no encoding of their text would give stay as they were drawn."""
    tokenizer, template = family(tmp_path, "qwen25")
    letters = [tokenizer.encode(letter)[0] for letter in "fox"]
    assert tokenizer.encode("fox") != letters

    class Odd(Scripted):
        def generate(self, requests):
            self.asked.append(requests)
            return [Completion([*letters, self.tokenizer.eos_id], [0.0] * 4, "stop") for _ in requests]

    engine = Odd(tokenizer, {})
    (episode,) = run_episodes(
        engine.generate,
        requests_for([7], 1),
        Here(Counting(2)),
        Observations(tokenizer, template),
        max_turns=9,
        max_length=99,
    )
    (second,) = engine.asked[1]
    assert list(second.prompt[:5]) == [7, *letters, tokenizer.eos_id]
    assert episode.ids[:3] == letters and episode.version is None


def test_a_turn_that_a_stop_text_ended_is_closed_by_the_template(tmp_path):
    tokenizer, template = family(tmp_path, "qwen25")
    observations = Observations(tokenizer, template)
    closed = observations.encode("more", Completion([1, tokenizer.eos_id], [0, 0], "stop"))
    opened = observations.encode("more", Completion([1], [0], "stop"))
    assert opened == [tokenizer.eos_id, *closed]
    said = tokenizer.decode(closed)
    assert said == "\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n"
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    assert "assistant\nb<|im_end|>" in tokenizer.decode(observations.encode(messages, Completion()))
    function = {"name": "f", "arguments": '{"city": "Oslo"}'}
    messages[1] |= {"content": None, "tool_calls": [{"type": "function", "function": function}]}
    call = '<tool_call>\n{"name": "f", "arguments": {"city": "Oslo"}}\n</tool_call>'
    assert call in tokenizer.decode(observations.encode(messages, Completion()))


def test_an_observation_of_a_plain_text_continues_it(tmp_path):
    """Also where the tokenizer puts a space in front of what it begins with."""
    tokenizer, _ = family(tmp_path, "gemma3")
    ids = Observations(tokenizer, None).encode("stop", Completion())
    assert tokenizer.decode([*tokenizer.encode("say"), *ids]) == "saystop"


def test_turns_go_together_and_each_draw_has_a_seed_of_its_own(tmp_path):
    tokenizer, _ = family(tmp_path, "qwen25")
    engine = Scripted(tokenizer, {0: ["a"], 1: ["b", "c", "d"], 2: ["e", "f"]})
    environments = [Counting(1, [1.0]), Counting(3, [0.5, None, 0.25]), Counting(2, [None, None])]
    episodes = run_episodes(
        engine.generate,
        requests_for([7, 8], 3),
        Here(*environments),
        Observations(tokenizer, None),
        max_turns=9,
        max_length=99,
    )
    assert [[one.prompt_index for one in asked] for asked in engine.asked] == [[0, 1, 2], [1, 2], [1]]
    assert [episode.earned for episode in episodes] == [1.0, 0.75, None]
    assert [episode.finish for episode in episodes] == ["stop"] * 3
    seeds = [asked[0].seed for asked in engine.asked]
    assert seeds == [5, turn_seed(5, 1), turn_seed(5, 2)] and len(set(seeds)) == 3
    assert all(one.sample_index == 3 for asked in engine.asked for one in asked)
    assert turn_seed(5, 1) == 4029298448762861439  # fixed: a resumed run must draw the same
    assert len({environment_seed(one) for one in engine.asked[0]}) == 3
    text = tokenizer.decode(list(episodes[1].ids), skip_special_tokens=True)
    assert text == "bturn 1cturn 2d"


def test_bounds(tmp_path):
    tokenizer, _ = family(tmp_path, "qwen25")
    observations = Observations(tokenizer, None)

    def run(script, environment, *, most=40, max_turns=9, max_length=99):
        engine = Scripted(tokenizer, {0: script})
        (episode,) = run_episodes(
            engine.generate, requests_for([7] * 4, 1, most), Here(environment), observations, max_turns=max_turns,
            max_length=max_length,
        )  # fmt: skip
        return episode, engine

    endless = Counting(10**9, [1.0] * 9)
    episode, _ = run(["a"] * 9, endless, max_turns=2)
    assert (episode.turns, episode.finish, episode.earned) == (2, "turns", 2.0)
    assert episode.sampled[-1]  # nothing is read after the last turn
    episode, _ = run(["a" * 30], Counting(1, [0.5]), most=3)
    assert (episode.turns, episode.finish, episode.earned, len(episode.ids)) == (1, "length", 0.5, 3)
    for environment, finish in ((Counting(1), "stop"), (Counting(9), "turns")):  # it ended with the last place
        episode, _ = run(["a"], environment, max_turns=1, max_length=4 + 2)
        assert (episode.finish, len(episode.ids)) == (finish, 2)
    room = len(tokenizer.encode("turn 1"))
    for extra, turns in ((0, 1), (1, 2)):  # with an observation that fills the sequence nothing can be said
        episode, engine = run(["a"] * 9, Counting(10**9), max_length=4 + 2 + room + extra)
        assert (episode.turns, episode.finish) == (turns, "length")
        assert len(episode.prompt) + len(episode.ids) <= 4 + 2 + room + extra
    assert engine.asked[-1][0].sampling.max_new_tokens == 1
    with pytest.raises(ValueError, match="a prompt of 4 tokens leaves no room"):
        run(["a"], Counting(1), max_length=4)


LONG = {  # 100,000 characters; as words, one word, few tokens, many tokens, and what marks the end of a turn
    "words": "The quick brown fox, and two more. " * 3000,
    "one word": "quickbrown" * 10_000,
    "spaces": " " * 100_000,
    "few": "<|im_start|>" * 9_000,
    "bytes": "\U0001f643\u6771" * 50_000,
    "ends": "stop<|im_end|>" * 7_000,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("kind", LONG)
def test_of_an_observation_that_finds_no_room_the_beginning_is_tokenised(tmp_path, monkeypatch, name, kind):
    """Its ids are those of the whole; one that finds room is read as it is."""
    tokenizer, template = family(tmp_path, name)
    completion = Completion([7, tokenizer.eos_id], [0.0] * 2, "stop")
    read, encode = [], tokenizer.encode

    def counted(text):
        read.append(len(text))
        return encode(text)

    monkeypatch.setattr(tokenizer, "encode", counted)
    for observations in (Observations(tokenizer, template), Observations(tokenizer, None)):
        whole = observations.encode(LONG[kind], completion)
        for room in (0, 1000, len(whole), len(whole) + 1):
            read.clear()
            ids = observations.encode(LONG[kind], completion, room)
            assert ids == whole[: len(ids)]
            assert ids == whole if room > len(whole) else len(ids) >= room
            if room <= 1000 and kind != "few":
                assert max(read) < 50_000


def test_only_one_rank_asks_the_environments(tmp_path):
    tokenizer, _ = family(tmp_path, "qwen25")
    sent = []

    def on_first(act):
        sent.append(act())
        return sent[-1]

    def run(environments, first):
        engine = Scripted(tokenizer, {0: ["a", "b"], 1: ["c"]})
        return run_episodes(
            engine.generate, requests_for([7], 2), environments, Observations(tokenizer, None), max_turns=9,
            max_length=99, run_on_first=first,
        )  # fmt: skip

    one = run(Here(Counting(2, [1.0, 2.0]), Counting(1)), on_first)
    received = iter(sent)
    assert run(None, lambda act: next(received)) == one


def test_what_an_environment_may_not_say(tmp_path):
    tokenizer, template = family(tmp_path, "qwen25")
    for environment, template_of, words in (
        (Counting(2, observation=3), template, "returned 3. It must return a text or a list of messages"),
        (Counting(2, observation=[]), template, "a text or a list of messages"),
        (Counting(2, observation=[{"content": "a"}]), template, "a text or a list of messages"),
        (Counting(2, observation=[{"role": "user", "content": "a"}]), None, "needs a prompt of messages"),
        (
            Counting(2, observation=[{"role": "user", "content": {1, 2}}]),
            template,
            "must be JSON: Object of type set",
        ),
        (Counting(2, ["1"]), template, "returned '1'. It must return a finite number"),
        (Counting(2, [math.inf]), template, "returned inf. It must return a finite number"),
    ):
        with pytest.raises(UserError, match=words):
            run_episodes(
                Scripted(tokenizer, {0: ["a", "b"]}).generate, requests_for([7], 1), Here(environment),
                Observations(tokenizer, template_of), max_turns=3, max_length=99,
            )  # fmt: skip


def test_a_lost_environment_ends_its_episode_and_no_other(tmp_path):
    """Behind the completion that it was given, and nobody knows what it earned."""
    tokenizer, _ = family(tmp_path, "qwen25")
    script = {number: list("abcd") for number in range(4)}

    def run(environments):
        engine = Scripted(tokenizer, script)
        return run_episodes(
            engine.generate,
            requests_for([7], 4),
            environments,
            Observations(tokenizer, None),
            max_turns=4,
            max_length=99,
        ), engine

    def fresh():
        return [Counting(4, [1.0, 2.0, 4.0, 8.0]) for _ in range(4)]

    whole, _ = run(Here(*fresh()))
    episodes, engine = run(Losing(*fresh(), lost={0: 1, 2: 3, 3: 4}))
    assert [[one.prompt_index for one in asked] for asked in engine.asked] == [
        [0, 1, 2, 3],
        [1, 2, 3],
        [1, 2, 3],
        [1, 3],
    ]
    assert episodes[1] == whole[1] and whole[1].earned == 15.0
    for number, turns in ((0, 1), (2, 3), (3, 4)):
        one, other = episodes[number], whole[number]
        assert (one.finish, one.earned, one.turns) == ("lost", None, turns)
        for mine, theirs in ((one.ids, other.ids), (one.sampled, other.sampled), (one.logprobs, other.logprobs)):
            assert mine == theirs[: len(mine)]
        assert one.sampled[-1] and sum(one.sampled) == 2 * turns  # a letter and the end of the turn
