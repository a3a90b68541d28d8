"""Two processes with DistributedDataParallel train as one."""

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel

from longlens import LaSAttention


def build():
    torch.manual_seed(0)
    return LaSAttention(16, 4, max_rate=0.1, dtype=torch.float64)


def data():
    torch.manual_seed(1)
    return torch.randn(4, 20, 16, dtype=torch.float64)


def worker(rank, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    model = DistributedDataParallel(build())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        model(data()[rank::2]).square().mean().backward()
        optimizer.step()
    torch.save(model.module.state_dict(), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def test_two_processes_equal_one(tmp_path):
    mp.spawn(worker, (str(tmp_path),), nprocs=2)
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        model(data()).square().mean().backward()
        optimizer.step()
    for rank in range(2):
        state = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        torch.testing.assert_close(state, dict(model.state_dict()), rtol=0, atol=1e-13)
