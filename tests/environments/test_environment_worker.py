"""Environments in their process: the same episodes as anywhere, and that none of what they do ends the run."""

import math
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from dtrain.base.errors import UserError
from dtrain.rl.environments.calls import MAX_TIMEOUTS_IN_A_ROW, NOT_TRIED, TIMED_OUT, TimeoutPool
from dtrain.rl.environments.episodes import Observations, environment_seed, run_episodes, turn_seed
from dtrain.rl.environments.stepping import Environments, Turn
from tests.environments.test_environment import Scripted, family, requests_for
from tests.rollout.test_rewards import alive, gone_within

MODULE = Path(__file__).with_name("user_module.py")


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """The working directory with a user's module `mine`."""
    (tmp_path / "mine.py").write_text(MODULE.read_text())
    monkeypatch.chdir(tmp_path)
    return tmp_path


def rows(*makes):
    return [({"prompt": "a", "columns": {"make": make}}, number) for number, make in enumerate(makes)]


def stepped(environments, *texts, is_last=False):
    """The replies to texts by number, None for what is passed over; observations as they are."""
    turns = [Turn(number, text, is_last) for number, text in enumerate(texts) if text is not None]
    return environments.step(turns, lambda place, seen: [seen])


def known(replies):
    return [None if reply.is_lost else reply.earned for reply in replies]


def by_hand(engine, tokenizer, observations, row, request, max_turns):
    """An episode as a loop says it: (ids, sampled, earned)."""
    scope = {}
    exec(MODULE.read_text(), scope)
    environment = scope["Counts"](row, environment_seed(request))
    ids, sampled, earned = [], [], []
    for turn in range(max_turns):
        seed = turn_seed(request.seed, turn)
        (drawn,) = (one for asked in engine.asked for one in asked
                    if (one.prompt_index, one.seed) == (request.prompt_index, seed))  # fmt: skip
        assert list(drawn.prompt) == [*request.prompt, *ids]
        text = tokenizer.encode("abc"[turn])
        ids, sampled = [*ids, *text, tokenizer.eos_id], sampled + [True] * (len(text) + 1)
        value = environment.step("abc"[turn])
        earned += [] if value is None or math.isnan(float(value)) else [float(value)]
        if environment.done or turn + 1 == max_turns:
            break
        from dtrain.inference.request import Completion

        said = observations.encode(environment.observe(), Completion([*text, tokenizer.eos_id]))
        ids, sampled = ids + said, sampled + [False] * len(said)
    return ids, sampled, sum(earned) if earned else None


@pytest.mark.parametrize("threads", [1, 3])
def test_the_same_tokens_masks_and_rewards_as_without_a_process(mine, threads):
    tokenizer, template = family(mine, "qwen25")
    observations, requests = Observations(tokenizer, template), requests_for([7, 8], 5)
    given = [{"prompt": "a", "columns": {"turns": 1 + number}} for number in range(5)]
    engine = Scripted(tokenizer, {number: list("abc") for number in range(5)})
    with Environments("mine.Counts", threads=threads) as environments:
        environments.make([(row, environment_seed(one)) for row, one in zip(given, requests, strict=True)])
        episodes = run_episodes(engine.generate, requests, environments, observations, max_turns=3, max_length=999)
    for episode, row, request in zip(episodes, given, requests, strict=True):
        ids, sampled, earned = by_hand(engine, tokenizer, observations, row, request, 3)
        assert (episode.ids, episode.sampled, episode.earned) == (ids, sampled, earned)
        assert episode.logprobs == [-float(token) if was else 0.0 for token, was in zip(ids, sampled, strict=True)]
    assert [episode.finish for episode in episodes] == ["stop"] * 3 + ["turns"] * 2


def test_one_thread_does_all_in_order_and_what_is_over_is_let_go(mine):
    with Environments("mine.Logs") as environments:
        environments.make(rows(*[None] * 4))
        stepped(environments, None, "a", None, "a")
        first, second = (reply.ids[0].split(" ", 3) for reply in stepped(environments, "a", None, "a"))
        assert first[1] == second[1]  # the thread
        order = [*(f"make {number}" for number in range(4)), "step 1", "step 3", "step 0", "step 2"]
        assert second[2:] == ["4", ",".join(order)]
        stepped(environments, "a", "a", is_last=True)
        (left,) = stepped(environments, None, None, "a")
        assert left.ids[0].split(" ")[2] == "2"
        assert not (mine / "gone 2").exists()
        environments.forget()
        assert (mine / "gone 2").exists()
        environments.make(rows(None))
        (left,) = stepped(environments, "a")
        assert left.ids[0].split(" ")[::2][:2] == [first[0], "1"]  # the process, and one environment in it


def test_as_many_side_by_side_as_are_asked_for(mine):
    with Environments("mine.Meets", threads=3) as environments:
        environments.make(rows(*[None] * 9))
        assert [reply.ids for reply in stepped(environments, *["a"] * 9)][-1] == ["3"]


def test_threads_that_hang_leave_their_places_to_others():
    """Without a process: outcomes as they come, each place once, and no more tries where all hang."""
    pool, held, go = TimeoutPool(2, 0.3), [], threading.Event()
    free = [lambda place=place: place for place in range(5)]
    assert sorted(outcome for part in pool.run(free) for outcome in part) == [(place, place) for place in range(5)]

    def hang():
        held.append(threading.current_thread())
        go.wait(60)

    mixed = [outcome for part in pool.run([free[0], hang, *free[2:]]) for outcome in part]
    assert sorted(mixed, key=lambda outcome: outcome[0]) == [(0, 0), (1, TIMED_OUT), (2, 2), (3, 3), (4, 4)]
    assert pool.stuck == 1
    outcomes = dict(outcome for part in pool.run([hang] * 9) for outcome in part)
    begun = [outcomes[place] for place in range(9)].index(NOT_TRIED)
    # The other thread had one under way.
    assert MAX_TIMEOUTS_IN_A_ROW <= begun <= MAX_TIMEOUTS_IN_A_ROW + 1 and len(held) == 1 + begun
    assert [outcomes[place] for place in range(9)] == [TIMED_OUT] * begun + [NOT_TRIED] * (9 - begun)
    some = [
        outcome for part in TimeoutPool(1, 0.1).run([hang, free[0]] * (MAX_TIMEOUTS_IN_A_ROW + 1)) for outcome in part
    ]  # not in a row
    assert [outcome for _, outcome in sorted(some)] == [TIMED_OUT, 0] * (MAX_TIMEOUTS_IN_A_ROW + 1)
    go.set()
    for thread in held:
        thread.join(10)
    assert pool.stuck == 0
    assert sorted(outcome for part in pool.run(free) for outcome in part) == [(place, place) for place in range(5)]


FAILURES = {  # of a step; whether the process goes with it
    "hang": ("step took longer than 0.5 s (grpo.environment_timeout)", False),
    "raise": ("failed in step:\n", False),
    "quit": ("SystemExit: leaving", False),
    "word": ("step returned '1.0'. It must return a finite number or None", False),
    "infinite": ("step returned inf. It must return a finite number or None", False),
    "large": ("step returned 1e+308. It must return a number of at most 1e+30 in size, or None", False),
    "hang in c": ("the process of the environments took longer than 0.5 s (grpo.environment_timeout) in step", True),
    "exit": ("the process of the environments ended with status 7 in step", True),
    "kill": ("the process of the environments was killed by SIGKILL in step", True),
}
OBSERVATIONS = {
    "raise": "failed in observe:\n",
    "number": "observe returned 3. It must return a text or a list of messages",
    "set": "Messages must be JSON: Object of type set",
}
MAKES = {
    "hang": "make took longer than 0.5 s (grpo.environment_timeout)",
    "raise": "failed in make:\n",
    "number": "make returned 3, which has no method step",
    "exit": "the process of the environments ended with status 7 in make",
}


def opened(said, grace=1.0):
    return Environments("mine.make", timeout=0.5, grace=grace, print_line=said.append)


def test_whatever_happens_to_a_step_the_others_and_later_episodes_are_whole(mine):
    said = []
    with opened(said) as environments:
        environments.make(rows(None))
        assert known(stepped(environments, "a")) == [1.0]
        for failure, (words, ends_process) in FAILURES.items():
            said.clear()
            for _ in range(2):
                environments.make(rows(*[None] * 4))
                replies = known(stepped(environments, "a", "done", f"step {failure}", "done"))
                if failure in ("kill", "hang in c"):  # at once: what was done before may not be told
                    replies[1] = 1.0
                lost = 3 if ends_process else 1
                assert replies == ([None, 1.0, None, None] if ends_process else [1.0, 1.0, None, 1.0]), failure
                later = stepped(environments, "a")
                assert [list(reply.ids) for reply in later] == [[] if ends_process else ["2"]]
                assert known(later) == [None if ends_process else 1.0]
            told = [text for text in said if words in text]
            causes = {"infinite": 0, "large": 0}.get(failure, 1)  # of one kind with "word"
            assert len(said) == len(told) == causes, (failure, said)
            assert all(
                re.search(rf"\nThe rewards of [{lost}{lost + ends_process}] of 4 episodes are unknown$", text)
                for text in told
            ), said
            assert all(text.startswith("environment mine.make") for text in told)
        assert not said or known(stepped(environments, "a")) == [None]  # of an environment that is lost: not asked
        environments.make(rows(None, None))
        assert known(stepped(environments, "a", "step wait")) == [1.0, None]
        (mine / "go").touch()  # it ends after it was given up
        time.sleep(0.3)
        assert [reply.ids for reply in stepped(environments, "a")] == [["2"]]


def test_whatever_happens_to_an_observation_or_a_make(mine):
    said = []
    with opened(said) as environments:
        environments.make(rows(None))
        stepped(environments, "a")
        for failure, words in OBSERVATIONS.items():
            environments.make(rows(None, None, None))
            assert known(stepped(environments, "a", f"observe {failure}", "a")) == [1.0, None, 1.0]
            assert known(stepped(environments, "a", "a", "a")) == [1.0, None, 1.0]
            assert failure == "set" or words in said[-1]  # a cause like the one before
        assert len(said) == 2

        def unreadable(place, seen):
            raise UserError("no template for it")

        (reply,) = environments.step([Turn(0, "a", False)], unreadable)
        assert reply.is_lost and "no template for it" in said[-1]
        for failure, words in MAKES.items():
            environments.make(rows(None, failure, None))
            gone = failure == "exit"
            assert known(stepped(environments, "a", "a", "a")) == ([None] * 3 if gone else [1.0, None, 1.0])
            assert words in said[-1] and f"The rewards of {3 if gone else 1} of 3 episodes" in said[-1]
        environments.make(rows(None))
        assert known(stepped(environments, "a")) == [1.0]


FIRST = [
    *(("step", failure, words) for failure, (words, _) in FAILURES.items() if failure not in ("quit", "hang in c")),
    *(("observe", failure, words) for failure, words in OBSERVATIONS.items()),
    *(("make", failure, words) for failure, words in MAKES.items()),
]


@pytest.mark.parametrize("stage, failure, words", FIRST)
def test_what_has_never_worked_is_the_users_to_mend(mine, stage, failure, words):
    said = []
    with opened(said) as environments, pytest.raises(UserError) as caught:
        environments.make(rows(failure if stage == "make" else None))
        stepped(environments, f"{stage} {failure}")
    assert words in str(caught.value) and str(caught.value).startswith("environment mine.make") and not said
    if failure == "raise":
        assert str(mine / "mine.py") in str(caught.value) and str(caught.value).endswith("RuntimeError: no luck")


def test_what_cannot_be_loaded_or_found_is_said_at_once(mine):
    (mine / "broken.py").write_text("import not_there\ndef make(row, seed): return None\n")
    (mine / "dying.py").write_text("import os\nos._exit(3)\ndef make(row, seed): return None\n")
    for path, words in (
        ("broken.make", "the environments of broken.make cannot be loaded:\n"),
        ("broken.make", "No module named 'not_there'"),
        ("dying.make", "cannot be loaded: the process ended with status 3"),
        ("mine.mak", "environment mine.mak: .* did you mean make?"),
        ("make", "environment make: no environment has this name"),
    ):
        with pytest.raises(UserError, match=words):
            Environments(path)


def test_an_end_that_fails_after_others_have_not_loses_its_episode_alone(mine):
    said = []
    with Environments("mine.Ends", print_line=said.append) as environments:
        environments.make(rows(None, "infinite"))
        full = [Turn(0, "a", False, 1), Turn(1, "a", False, 1)]
        assert known(environments.step(full, lambda place, seen: [7])) == [1.5, None]
        environments.make(rows("infinite"))
        assert known(environments.step(full[:1], lambda place, seen: [7])) == [None]
    (told,) = said
    assert "end returned inf. It must return a finite number" in told and "The rewards of 1 of 2 episodes" in told


def pid(environments):
    environments.make(rows(None))
    return int(stepped(environments, "a")[0].ids[0].split()[0])


def test_a_process_with_threads_that_hang_is_replaced_and_another_is_not(mine):
    with Environments("mine.Acts", timeout=0.5, print_line=lambda text: None) as environments:
        first = pid(environments)
        environments.make(rows(None, None))
        assert [reply.is_lost for reply in stepped(environments, "wait", "a")] == [True, False]
        (mine / "go").touch()
        time.sleep(0.3)
        assert pid(environments) == first
        environments.make(rows(None, None))
        assert [reply.is_lost for reply in stepped(environments, "hang", "a")] == [True, False]
        second = pid(environments)
        assert second != first and gone_within(5, first)
        os.kill(second, signal.SIGKILL)
        assert gone_within(5, second)
        environments.forget()
        assert alive(third := pid(environments))
        environments.close()
        environments.close()
        assert gone_within(5, third)


def test_what_an_environment_prints_is_not_taken_for_its_answer(mine, capfd):
    with Environments("mine.Loud") as environments:
        environments.make(rows(None))
        assert known(stepped(environments, "a")) == [1.0]
    out, err = capfd.readouterr()
    assert out == "" and "an environment prints" in err and "past python" in err


def test_a_killed_parent_leaves_no_process(mine):
    code = f"""
        import sys; sys.path.insert(0, {str(Path(__file__).parents[2])!r})
        from tests.environments.test_environment_worker import Environments, pid, stepped
        environments = Environments("mine.Acts")
        print(pid(environments), flush=True)
        stepped(environments, "hang")
    """
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True, cwd=mine
    )  # fmt: skip
    worker = int(parent.stdout.readline())
    until = time.monotonic() + 20
    while not (mine / "hangs").exists():
        assert time.monotonic() < until
        time.sleep(0.02)
    assert alive(worker)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert gone_within(5, worker)
