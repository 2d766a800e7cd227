"""If one of several processes dies or hangs, the others soon report it and exit."""

import os
import signal
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from support.processes import CONTEXT, PATIENCE

import lowmem
from lowmem.errors import CheckpointError, RankError
from lowmem.hf import processes

TIMEOUT = 3


def member(rank, count, store, fault, end):
    """Trains until rank 1 fails in its third step, and sends the resulting error."""
    torch.set_num_threads(1)
    options = {"timeout": timedelta(seconds=TIMEOUT), "rank": rank, "world_size": count}
    dist.init_process_group("gloo", init_method=f"file://{store}", **options)
    param = torch.nn.Parameter(torch.ones(4))
    opt = lowmem.FusedOptimizer([("weight", param)], "lomo", lr=0.1, placement="replicated", compile=False)
    try:
        with processes.explained():
            for step in range(10):
                if rank == 1 and step == 2:
                    FAULTS[fault]()
                opt.backward(param.sum())
    except Exception as error:
        end.send((type(error).__name__, str(error), opt.last_step.step))
    dist.destroy_process_group()


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def hang():
    os.kill(os.getpid(), signal.SIGSTOP)


FAULTS = {"die": die, "hang": hang}
EXPECTED = {
    "die": "another rank failed or exited. See the first error that the launcher shows",
    "hang": "another rank did not answer in time (ddp_timeout of a trainer): it died, hangs, or is too slow.",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_other_ranks_exit_with_an_explanation(fault, tmp_path):
    pipes = [CONTEXT.Pipe() for _ in range(3)]
    ranks = [
        CONTEXT.Process(target=member, args=(rank, 3, str(tmp_path / "store"), fault, pipe[1]))
        for rank, pipe in enumerate(pipes)
    ]
    for process in ranks:
        process.start()
    answers = [pipes[rank][0].recv() if pipes[rank][0].poll(PATIENCE) else None for rank in (0, 2)]
    for name, message, steps in answers:
        assert (name, steps) == ("RankError", 2), message
        assert len(message) < 300
    # the second rank may notice that the first one exited
    assert any(message.startswith(EXPECTED[fault]) for _, message, _ in answers)
    ranks[1].kill()
    for process in ranks:
        process.join(PATIENCE)
    assert [ranks[0].exitcode, ranks[2].exitcode] == [0, 0]


def caused(error):
    error.__cause__ = RuntimeError("[/third_party/gloo/gloo/transport/tcp/pair.cc:537] Connection reset by peer")
    return error


def explained_alone(rank):
    for error in (ValueError("mine"), RankError("said"), caused(RankError("said too"))):
        with pytest.raises(type(error), match=str(error)), processes.explained():
            raise error
    with pytest.raises(RankError, match="another rank failed"), processes.explained():
        raise caused(CheckpointError("checkpoint-4 could not be written"))


def test_other_errors_are_not_changed(two):
    two.run(explained_alone)
    with pytest.raises(dist.DistBackendError), processes.explained():  # without a group, no other ranks exist
        raise dist.DistBackendError("no group")
