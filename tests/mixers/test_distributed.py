"""Two processes with DDP or FSDP train every mixer as one process does."""

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from longlens.mixers.base import create_mixer, list_mixers


def build(name, options):
    torch.manual_seed(0)
    return nn.Sequential(create_mixer(name, 16, max_length=20, dtype=torch.float64, **options))


def data():
    torch.manual_seed(1)
    return torch.randn(4, 20, 16, dtype=torch.float64)


def train(model, x):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    for _ in range(2):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    return model


def worker(rank, folder, names):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    x, states = data()[rank::2], {}
    for name, options in names.items():
        states["ddp", name] = train(DistributedDataParallel(build(name, options)), x).module.state_dict()
        sharded = build(name, options)
        fully_shard(sharded)
        state = train(sharded, x).state_dict()
        states["fsdp", name] = {key: v.full_tensor() if isinstance(v, DTensor) else v for key, v in state.items()}
    torch.save(states, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def trained(tmp_path_factory, small_options):
    """The states of all layers, trained by two processes: of each rank."""
    folder = tmp_path_factory.mktemp("ranks")
    mp.spawn(worker, (str(folder), {name: small_options(name) for name in list_mixers()}), nprocs=2)
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(2)]


@pytest.mark.parametrize("how", ["ddp", "fsdp"])
@pytest.mark.parametrize("name", list_mixers())
def test_two_processes_equal_one(trained, small_options, name, how):
    expected = dict(train(build(name, small_options(name)), data()).state_dict())
    for states in trained:
        torch.testing.assert_close(states[how, name], expected, rtol=0, atol=1e-9)
