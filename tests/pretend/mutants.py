"""dtrain with lines of its source replaced, in a process of its own: what a test must notice."""

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType

_OF_THE_DEVICE = {"tests", "tests.pretend", "tests.world"}  # these hold its state, and know nothing of dtrain
_OF_THE_DEVICE |= {
    f"tests.pretend.{name}" for name in ("card", "cuda", "journal", "kernels", "mutants", "sdpa", "server")
}


@dataclass(frozen=True)
class Mutant:
    """module: of dtrain; old: text that stands in its source once, new: what stands there instead."""

    module: str
    old: str
    new: str


def apply(mutants: Sequence[Mutant]) -> None:
    """From here on, imports give the mutants. What was imported of dtrain, and whatever imports it, is forgotten."""
    for name in list(sys.modules):
        if name.split(".")[0] in ("dtrain", "tests", "tools") and name not in _OF_THE_DEVICE:
            del sys.modules[name]
    sys.meta_path.insert(0, _Finder(mutants))


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, mutants: Sequence[Mutant]):
        self._mutants = mutants

    def find_spec(self, name, path, target=None):
        mine = [mutant for mutant in self._mutants if mutant.module == name]
        found = importlib.machinery.PathFinder.find_spec(name, path)
        if not mine or found is None or found.origin is None:
            return None
        found.loader = _Loader(name, found.origin, mine)
        return found


class _Loader(importlib.machinery.SourceFileLoader):
    def __init__(self, name: str, path: str, mutants: Sequence[Mutant]):
        super().__init__(name, path)
        self._mutants = mutants

    def get_code(self, fullname: str):
        source = self.get_source(fullname)
        for mutant in self._mutants:
            assert source.count(mutant.old) == 1, (
                f"{mutant.old!r} stands {source.count(mutant.old)} times in {fullname}"
            )
            source = source.replace(mutant.old, mutant.new)
        return compile(source, self.path, "exec")

    def exec_module(self, module: ModuleType) -> None:
        exec(self.get_code(module.__name__), module.__dict__)
