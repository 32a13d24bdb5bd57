"""Processes that tokenise chunks of rows in parallel. Results keep the order of the jobs, and memory is bounded.

The workers are plain child processes that read jobs from one pipe and write results to another. `multiprocessing` would
need a guarded main module, or a fork of a process with running threads. These workers need neither. They end when their
parent ends for any reason, because their pipe is then closed.
"""

import collections
import pickle
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import IO

from dtrain.base.errors import UserError
from dtrain.data.formats.encoder import EncodedChunk, RowEncoder
from dtrain.data.sources.files import Chunk
from dtrain.data.sources.reading import RowReading

MAX_PENDING = 4  # chunks per worker that may be in progress; bounds the memory
Job = tuple[Chunk, str, RowReading]  # the arguments of `RowEncoder.encode_chunk`


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
        return RuntimeError(f"a tokenising process died with exit status {self.wait()}. Its own error is above")


class Pool:
    """A context manager of processes that encode chunks.

    Attributes:
        encoder: The encoder that each process gets a copy of.
        workers: Number of processes.
    """

    def __init__(self, encoder: RowEncoder, workers: int):
        self.encoder = encoder
        self.workers = workers

    def __enter__(self) -> "Pool":
        # The child imports this package from where the parent did, whatever its working directory is. It sees no GPU.
        start = "import os, sys; os.environ['CUDA_VISIBLE_DEVICES'] = ''; "
        start += f"sys.path[:] = {sys.path!r}; from dtrain.data.rows.pool import serve; serve()"
        self._processes = [
            _Process([sys.executable, "-c", start], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            for _ in range(self.workers)
        ]
        for process in self._processes:
            process.send(self.encoder)
        # There are as many threads as processes, so a thread that starts a job always finds an idle process.
        self._idle = list(self._processes)
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
        """Yield the result of each job, in the order of the jobs.

        Raises:
            UserError: The error of the first row that is wrong.
        """
        pending: collections.deque[Future[EncodedChunk]] = collections.deque()
        for job in jobs:
            pending.append(self._threads.submit(self._call, job))
            if len(pending) >= MAX_PENDING * self.workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()

    def _call(self, job: Job) -> EncodedChunk:
        """Encode a job in an idle process, and wait for the result."""
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
    """Run a worker process: read an encoder from stdin, then encode jobs until the pipe is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process of the group; the parent decides
    jobs, results = sys.stdin.buffer, sys.stdout.buffer
    encoder: RowEncoder = pickle.load(jobs)
    while True:
        try:
            job: Job = pickle.load(jobs)
        except EOFError:
            return
        try:
            result: EncodedChunk | UserError = encoder.encode_chunk(*job)
        except UserError as problem:
            result = UserError(str(problem))
        pickle.dump(result, results, protocol=pickle.HIGHEST_PROTOCOL)
        results.flush()
