"""A user's module of environments, which tests copy into a directory as `mine.py`."""

import os
import re
import sqlite3
import sys
import threading
import time


class Number:
    def __float__(self):
        return 0.25


def act(what):
    if what == "hang":
        open("hangs", "w").close()
        time.sleep(1000)
    if what == "hang in c":
        re.match("(a+)+$", "a" * 60 + "!")
    if what == "wait":
        while not os.path.exists("go"):
            time.sleep(0.01)
    if what == "exit":
        time.sleep(0.2)  # what was done before is told by then
        os._exit(7)
    if what == "kill":
        os.kill(os.getpid(), 9)
    if what == "raise":
        raise RuntimeError("no luck")
    if what == "quit":
        sys.exit("leaving")
    messages = [{"role": "user", "content": {1}}]
    return {"word": "1.0", "infinite": float("inf"), "large": 1e308, "number": 3, "set": messages}.get(what)


class Told:
    """Does what its completion says: "step ..", "observe ..", "done"."""

    def __init__(self, row, seed):
        self.row, self.seed, self.done, self.steps = row, seed, False, 0

    def step(self, text):
        when, _, what = text.partition(" ")
        self.what, self.steps = what if when == "observe" else "", self.steps + 1
        self.done = text == "done"
        given = act(what) if when == "step" else None
        return 1.0 if given is None else given

    def observe(self):
        given = act(self.what)
        return f"{self.steps}" if given is None else given


class Ends(Told):
    def end(self):
        return float("inf") if self.row["columns"].get("make") else 0.5


def make(row, seed):
    given = act(row["columns"].get("make"))
    return Told(row, seed) if given is None else given


class Counts:
    """As many turns, rewards and observations as its row and seed say."""

    def __init__(self, row, seed):
        self.columns, self.seed, self.seen = row["columns"], seed, []

    @property
    def done(self):
        return len(self.seen) >= self.columns["turns"]

    def step(self, text):
        self.seen.append(text)
        return [None, Number(), float("nan"), 2, self.seed / 2**64][(len(self.seen) + self.columns["turns"]) % 5]

    def observe(self):
        said = f"turn {len(self.seen)} {self.seen[-1][::-1]} {self.seed}"
        return said if len(self.seen) % 2 else ({"role": "user", "content": said}, {"role": "user", "content": "b"})


log, lock, living = [], threading.Lock(), 0


class Logs:
    """Says in what order, in which threads and in which process all was done. Its data belongs to one thread."""

    def __init__(self, row, seed):
        global living
        self.seed, self.done, self.table = seed, False, sqlite3.connect(":memory:")
        living += 1
        log.append(f"make {seed}")

    def __del__(self):
        global living
        living -= 1
        open(f"gone {self.seed}", "w").close()

    def step(self, text):
        self.table.execute("create table if not exists one (two)")
        log.append(f"step {self.seed}")

    def observe(self):
        return f"{os.getpid()} {threading.get_ident()} {living} {','.join(log)}"


class Acts(Logs):
    def step(self, text):
        act(text)


barrier, inside, most = threading.Barrier(3), 0, 0


class Meets(Logs):
    """A step that ends when two more are under way."""

    def step(self, text):
        global inside, most
        with lock:
            inside += 1
            most = max(most, inside)
        barrier.wait(20)
        with lock:
            inside -= 1

    def observe(self):
        return str(most)


class Loud(Told):
    def step(self, text):
        self.what = ""
        print("an environment prints")
        os.write(1, b"past python\n")
        assert sys.stdin.read() == "" and "torch" not in sys.modules
        return 1.0
