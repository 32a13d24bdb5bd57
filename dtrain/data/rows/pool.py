"""Chunks of rows to samples in parallel processes, in order, with bounded memory.

The workers are plain child processes that read jobs from a pipe and write results to another. Unlike those of
`multiprocessing` they need neither a guarded main module nor a fork of a process full of threads, and they end when
their parent does, however it ends, since their pipe then does.
"""

import collections
import pickle
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import IO

from dtrain.base.errors import UserError
from dtrain.data.formats.encoder import EncodedChunk, RowEncoder
from dtrain.data.sources.files import Chunk

AHEAD = 4  # chunks in flight per worker
Job = tuple[Chunk, str, Mapping[str, str]]  # rows, their format, their names of our columns


class _Process(subprocess.Popen[bytes]):
    stdin: IO[bytes]
    stdout: IO[bytes]

    def send(self, message: RowEncoder | Job) -> None:
        try:
            pickle.dump(message, self.stdin)
            self.stdin.flush()
        except BrokenPipeError as problem:
            raise self.died() from problem

    def died(self) -> RuntimeError:
        return RuntimeError(f"a tokenising process died with exit status {self.wait()}; its own error stands above")


class Pool:
    """`workers` processes that encode chunks; a context manager."""

    def __init__(self, encoder: RowEncoder, workers: int):
        self.encoder, self.workers = encoder, workers

    def __enter__(self) -> "Pool":
        # The child finds this package where the parent did, wherever it was started, and no device.
        start = "import os, sys; os.environ['CUDA_VISIBLE_DEVICES'] = ''; "
        start += f"sys.path[:] = {sys.path!r}; from dtrain.data.rows.pool import serve; serve()"
        self._processes = [
            _Process([sys.executable, "-c", start], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            for _ in range(self.workers)
        ]
        for process in self._processes:
            process.send(self.encoder)
        self._idle = list(self._processes)  # one for each thread
        self._threads = ThreadPoolExecutor(self.workers)
        return self

    def __exit__(self, *problem) -> None:
        for process in self._processes:
            process.kill()
        self._threads.shutdown(wait=True, cancel_futures=True)
        for process in self._processes:
            process.wait()
            process.stdout.close()

    def encode(self, jobs: Iterable[Job]) -> Iterator[EncodedChunk]:
        """Yield the result of each job, in the order of the jobs. Raises the UserError of the first row with one."""
        pending: collections.deque[Future[EncodedChunk]] = collections.deque()
        for job in jobs:
            pending.append(self._threads.submit(self._call, job))
            if len(pending) >= AHEAD * self.workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()

    def _call(self, job: Job) -> EncodedChunk:
        process = self._idle.pop()
        try:
            process.send(job)
            result = pickle.load(process.stdout)
        except (EOFError, pickle.UnpicklingError) as problem:
            raise process.died() from problem
        finally:
            self._idle.append(process)
        if isinstance(result, UserError):
            raise result
        return result


def serve() -> None:
    """Serve as a worker: read an encoder, then jobs until the pipe ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides
    jobs, results = sys.stdin.buffer, sys.stdout.buffer
    encoder: RowEncoder = pickle.load(jobs)
    while True:
        try:
            job: Job = pickle.load(jobs)
        except EOFError:
            return
        try:
            answer: EncodedChunk | UserError = encoder.encode_chunk(*job)
        except UserError as problem:
            answer = UserError(str(problem))
        pickle.dump(answer, results, protocol=pickle.HIGHEST_PROTOCOL)
        results.flush()
