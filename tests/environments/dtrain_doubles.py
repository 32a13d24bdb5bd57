"""A taskset of verifiers 0.4, as a package of its own would have it."""

import verifiers.v1 as vf


class DoublesConfig(vf.TasksetConfig):
    count: int = 3
    kind: str = "plain"


class DoubleData(vf.TaskData):
    answer: str


class DoubleTask(vf.Task[DoubleData]):
    @vf.reward(weight=2.0)
    async def right(self, trace) -> float:
        return float(trace.last_reply == self.data.answer)

    @vf.metric
    async def length(self, trace) -> float:
        return float(len(trace.last_reply))


class MachineTask(DoubleTask):
    @vf.reward
    async def ran(self, trace, runtime) -> float:
        return 1.0


class PreparedTask(DoubleTask):
    async def setup(self, trace, runtime) -> None:
        pass


KINDS = {"plain": DoubleTask, "machine": MachineTask, "prepared": PreparedTask}


class Doubles(vf.Taskset[DoubleTask, DoublesConfig]):
    def load(self):
        for number in range(self.config.count):
            data = DoubleData(prompt=f"double {number}", system_prompt="be short", answer=str(2 * number))
            yield KINDS[self.config.kind](data)


__all__ = ["Doubles"]
