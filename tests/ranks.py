"""Ranks of a gloo process group, to run a test's function on: real processes that stay for the next one."""

import multiprocessing
import tempfile
import traceback
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist

# Seconds after which ranks that do not answer are taken for hung.
PATIENCE = 40


class RankError(AssertionError):
    """A rank raised; its traceback is the message."""


class Ranks:
    """So many processes, each a rank of one group. Functions are named by their module, so they must not be nested."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        store = tempfile.NamedTemporaryFile(delete=False)  # noqa: SIM115 (lives as long as the group)
        pipes = [context.Pipe() for _ in range(self.count)]
        self._ends = [ours for ours, _ in pipes]
        self._processes = [
            context.Process(target=_serve, args=(rank, self.count, store.name, theirs), daemon=True)
            for rank, (_, theirs) in enumerate(pipes)
        ]
        for process in self._processes:
            process.start()

    def run(self, function, *args):
        """What `function(rank, *args)` returns on each rank, in their order.

        Raises:
            RankError: it raised on a rank, or hung.
        """
        for end in self._ends:
            end.send((function, args))
        answers = [_answer(end) for end in self._ends]
        failed = [f"rank {rank}: {answer}" for rank, (fine, answer) in enumerate(answers) if not fine]
        if failed:
            self.stop()
            self._start()
            raise RankError("\n".join(failed))
        return [answer for _, answer in answers]

    def stop(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()


def _answer(end: Connection):
    try:
        return end.recv() if end.poll(PATIENCE) else (False, "did not answer")
    except EOFError:
        return False, "died"


def _serve(rank: int, count: int, store: str, end: Connection) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=count)
    while True:
        try:
            function, args = end.recv()
        except EOFError:
            return
        torch.manual_seed(0)
        try:
            end.send((True, function(rank, *args)))
        except BaseException:  # pytest.raises raises one that is no Exception
            end.send((False, traceback.format_exc()))
