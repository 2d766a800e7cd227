"""Runs functions of tests on the ranks of a gloo process group, whose processes are reused by later tests."""

import tempfile
import time
import traceback
from multiprocessing.connection import Connection, wait

import torch
import torch.distributed as dist
from support import compiled
from support.processes import CONTEXT, PATIENCE

# The original function, which DeepSpeed's zero.Init replaces for the rest of the process
LINEAR = torch.nn.functional.linear

# Seconds within which the other ranks must answer after one has failed. They may be waiting for it.
GRACE = 5


class RankError(AssertionError):
    """Raised if a function failed on a rank. The message contains the traceback."""


class Ranks:
    """A group of `count` processes. Functions are pickled by name, so they must be at module level."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._start()

    def _start(self) -> None:
        store = tempfile.NamedTemporaryFile(delete=False)  # noqa: SIM115 (exists as long as the group)
        pipes = [CONTEXT.Pipe() for _ in range(self.count)]
        self._ends = [parent for parent, _ in pipes]
        self._processes = [
            CONTEXT.Process(target=_serve, args=(rank, self.count, store.name, child), daemon=True)
            for rank, (_, child) in enumerate(pipes)
        ]
        for process, (_, child) in zip(self._processes, pipes, strict=True):
            process.start()
            child.close()  # if the rank dies, its end of the pipe is closed

    def run(self, function, *args):
        """Returns the results of `function(rank, *args)` in the order of the ranks.

        Raises:
            RankError: on some rank, the function raised an error or hung.
        """
        for end in self._ends:
            end.send((function, args))
        answers = self._answers()
        failed = [f"rank {rank}: {answer}" for rank, (succeeded, answer) in enumerate(answers) if not succeeded]
        if failed:
            self.stop()
            self._start()
            raise RankError("\n".join(failed))
        return [answer for _, answer in answers]

    def _answers(self) -> list[tuple[bool, object]]:
        answers: list[tuple[bool, object]] = [(False, "did not answer")] * self.count
        ranks = {end: rank for rank, end in enumerate(self._ends)}
        deadline = time.monotonic() + PATIENCE
        while ranks and (left := deadline - time.monotonic()) > 0:
            for end in wait(list(ranks), left):
                rank = ranks.pop(end)
                try:
                    answers[rank] = end.recv()
                except EOFError:
                    answers[rank] = False, "died"
                if not answers[rank][0]:
                    deadline = min(deadline, time.monotonic() + GRACE)
        return answers

    def stop(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()


def _serve(rank: int, count: int, store: str, end: Connection) -> None:
    torch.set_num_threads(1)
    compiled.force()
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=count)
    while True:
        try:
            function, args = end.recv()
        except EOFError:
            return
        torch.manual_seed(0)
        torch.nn.functional.linear = LINEAR
        try:
            end.send((True, function(rank, *args)))
        except BaseException:  # the error of pytest.raises is not an Exception
            end.send((False, traceback.format_exc()))
