"""Real ranks of which one fails, dies or hangs: the others name it, soon, and end."""

import os
import signal
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from support.processes import CONTEXT, PATIENCE

import lowmem
from lowmem.errors import CheckpointError, DataError, RankError
from lowmem.hf import failures
from lowmem.hf.failures import explain

TIMEOUT = 3


def member(rank, count, store, fault, end):
    """Trains until rank 1 fails in its third step, and sends the error that ended it."""
    torch.set_num_threads(1)
    options = {"timeout": timedelta(seconds=TIMEOUT), "rank": rank, "world_size": count}
    dist.init_process_group("gloo", init_method=f"file://{store}", **options)
    param = torch.nn.Parameter(torch.ones(4))
    opt = lowmem.FusedOptimizer([("weight", param)], "lomo", lr=0.1, placement="replicated", compile=False)
    try:
        with failures.explained():
            for step in range(10):
                if rank == 1 and step == 2:
                    FAULTS[fault]()
                opt.backward(param.sum())
    except Exception as error:
        end.send((type(error).__name__, str(error), opt.last_step.step))
    dist.destroy_process_group()


def fail():
    raise DataError("row 7 is broken")


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def hang():
    os.kill(os.getpid(), signal.SIGSTOP)


FAULTS = {"fail": fail, "die": die, "hang": hang}
SAID = {
    "fail": "rank 1 failed: DataError: row 7 is broken. Continue from the last checkpoint",
    "die": "rank 1 ended without a message: killed (out of memory?), or crashed. Continue",
    "hang": f"rank 1 did not answer within {TIMEOUT} seconds (ddp_timeout of a trainer): dead, hanging, or too slow.",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_rank_that_ended_it_is_named(fault, tmp_path):
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
        assert message.startswith(SAID[fault]) and len(message) < 300
    if fault == "fail":
        assert pipes[1][0].recv()[:2] == ("DataError", "row 7 is broken")
    ranks[1].kill()
    for process in ranks:
        process.join(PATIENCE)
    assert [ranks[0].exitcode, ranks[2].exitcode] == [0, 0]


def test_other_errors_stay_as_they_are(two):
    assert two.run(explained_alone) == [(None, None, True)] * 2
    assert explain(dist.DistBackendError("no group")) is None  # and without a group nobody is asked


def explained_alone(rank):
    """What becomes of an error that is not of a collective, of one that is explained already, and of one that a
    collective has caused."""
    failures._GRACE = PATIENCE  # the machine may be busy
    caused = CheckpointError("checkpoint-4 could not be written")
    caused.__cause__ = RuntimeError("[/third_party/gloo/gloo/transport/tcp/pair.cc:537] Connection reset by peer")
    dist.barrier()
    explained = explain(caused)  # both ranks are there
    dist.barrier()
    kept = explain(RankError("said")), explain(ValueError("mine"))
    return *kept, isinstance(explained, RankError) and "the ranks lost their connection" in str(explained)
