"""Memory in which answers travel is used again once the receiver has let go of it."""

import multiprocessing
import os

import pytest
import torch
from torch import Tensor

from lightning_fed.engines.block import ANONYMOUS, Block, Pipe, ReusedBlocks
from lightning_fed.engines.packing import pack, unpack

pytestmark = pytest.mark.skipif(not ANONYMOUS, reason="shared memory has names here, and is not used again")


@pytest.fixture
def pipes() -> tuple[Pipe, Pipe]:
    """Both ends."""
    ours, theirs = multiprocessing.Pipe()
    return Pipe(ours), Pipe(theirs)


def sent(pipes: tuple[Pipe, Pipe], room: ReusedBlocks, value: float, size: int = 1000) -> tuple[Tensor, Block]:
    """What arrives of a tensor with this value, and the sender's block in which it travelled."""
    packed = pack(torch.full((size,), value), room=room)
    pipes[0].send(packed)
    assert isinstance(packed.block, Block)
    return unpack(pipes[1].recv()), packed.block


def test_a_block_that_was_let_go_is_used_again(pipes: tuple[Pipe, Pipe]) -> None:
    room = ReusedBlocks()
    arrived, block = sent(pipes, room, 1.0)
    assert torch.equal(arrived, torch.full((1000,), 1.0))
    assert not block.is_back
    del arrived
    assert block.is_back
    again, same = sent(pipes, room, 2.0)
    assert same is block
    assert torch.equal(again, torch.full((1000,), 2.0))
    assert not block.is_back


def test_a_block_that_has_not_been_read_yet_is_not_written_to(pipes: tuple[Pipe, Pipe]) -> None:
    room = ReusedBlocks()
    pipes[0].send(pack(torch.tensor([1.0]), room=room))
    pipes[0].send(pack(torch.tensor([2.0]), room=room))
    assert [float(unpack(pipes[1].recv())) for _ in range(2)] == [1.0, 2.0]


def test_what_the_receiver_keeps_stays_as_it_is(pipes: tuple[Pipe, Pipe]) -> None:
    room = ReusedBlocks(keep=2)
    part = sent(pipes, room, 0.0)[0][3:5]  # of a tensor that is gone
    kept = [sent(pipes, room, value)[0] for value in (1.0, 2.0, 3.0)]
    for value in (4.0, 5.0, 6.0):
        sent(pipes, room, value)
    assert part.tolist() == [0.0, 0.0]
    assert [float(tensor[0]) for tensor in kept] == [1.0, 2.0, 3.0]


def test_the_sender_keeps_no_more_than_it_is_told(pipes: tuple[Pipe, Pipe]) -> None:
    room = ReusedBlocks(keep=2)
    arrived, blocks = zip(*(sent(pipes, room, value) for value in (1.0, 2.0, 3.0)), strict=True)
    del arrived
    assert all(block.is_back for block in blocks)
    used = {id(sent(pipes, room, 0.0)[1]) for _ in range(4)}
    assert used <= {id(block) for block in blocks[1:]}


def test_a_child_of_the_receiver_that_forgets_a_block_does_not_let_it_go(pipes: tuple[Pipe, Pipe]) -> None:
    arrived, block = sent(pipes, ReusedBlocks(), 1.0)
    child = os.fork()
    if not child:
        del arrived
        os._exit(0)
    os.waitpid(child, 0)
    assert not block.is_back
    del arrived
    assert block.is_back


def test_a_block_is_used_for_messages_of_its_size_alone(pipes: tuple[Pipe, Pipe]) -> None:
    room = ReusedBlocks()
    large = sent(pipes, room, 1.0)[1]
    assert large.is_back
    assert sent(pipes, room, 1.0, size=900)[1] is not large
    assert sent(pipes, room, 1.0, size=1100)[1] is not large
