"""Memory in which things travel is used again once sender and receivers have let go of it."""

import multiprocessing
import os

import pytest
import torch
from torch import Tensor

from lightning_fed.engines import block
from lightning_fed.engines.block import ANONYMOUS, Block, Memory, Pipe, ReusedBlocks
from lightning_fed.engines.packing import Packed, pack, unpack

needs_flags = pytest.mark.skipif(not ANONYMOUS, reason="shared memory has names here, and is not used again")


@pytest.fixture
def pipes() -> tuple[Pipe, Pipe]:
    """Both ends."""
    ours, theirs = multiprocessing.Pipe()
    return Pipe(ours), Pipe(theirs)


def packed(blocks: ReusedBlocks, value: float, size: int = 1000) -> tuple[Packed, Memory]:
    """A tensor of this value, as it is sent, and the memory in which it travels."""
    packed = pack(torch.full((size,), value), allocate=blocks)
    assert isinstance(packed.block, Block)
    return packed, packed.block.memory


def sent(pipes: tuple[Pipe, Pipe], blocks: ReusedBlocks, value: float, size: int = 1000) -> tuple[Tensor, Memory]:
    """What arrives of it, when the sender has nothing of it any more, and the memory in which it travelled."""
    thing, memory = packed(blocks, value, size)
    pipes[0].send(thing)
    return unpack(pipes[1].recv()), memory


def test_tensors_arrive_with_the_order_of_their_values_in_memory() -> None:
    """Sums run in this order. A part of a tensor takes the space of its values alone."""
    images, part = torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last), torch.rand(6, 6)[::2, ::3]
    there = pack([images, images.transpose(0, 3), part])
    assert there.block is not None
    assert there.block.bytes.numel() < 4 * (2 * images.numel() + part.numel()) + 1000
    for arrived, expected in zip(unpack(there), [images, images.transpose(0, 3), part.contiguous()], strict=True):
        assert torch.equal(arrived, expected)
        assert arrived.stride() == expected.stride()


@needs_flags
def test_memory_that_was_let_go_is_used_again(pipes: tuple[Pipe, Pipe]) -> None:
    blocks = ReusedBlocks()
    arrived, memory = sent(pipes, blocks, 1.0)
    assert torch.equal(arrived, torch.full((1000,), 1.0))
    assert not memory.is_back
    del arrived
    assert memory.is_back
    again, same = sent(pipes, blocks, 2.0)
    assert same is memory
    assert torch.equal(again, torch.full((1000,), 2.0))
    assert not memory.is_back


@needs_flags
def test_what_both_ends_send_at_once_waits_in_the_pipe_however_many_tensors_it_has(pipes: tuple[Pipe, Pipe]) -> None:
    """Else each would wait until the other reads. The names alone are 300 KiB."""
    states = [{f"the.name.of.one.of.many.tensors.of.a.network.{k}": torch.tensor([k]) for k in range(n, n + 4000)} for n in (0, 1)]
    for pipe, state in zip(pipes, states, strict=True):
        os.set_blocking(pipe.connection.fileno(), False)  # where it would wait, it fails
        pipe.send([pack(state), pack(state)])
    for pipe, state in zip(reversed(pipes), states, strict=True):
        for packed in pipe.recv():
            arrived = unpack(packed)
            assert arrived == state
            assert list(arrived) == list(state)


@needs_flags
def test_each_of_several_receivers_has_to_let_go(pipes: tuple[Pipe, Pipe]) -> None:
    blocks = ReusedBlocks()
    thing, memory = packed(blocks, 1.0)
    arrived = {}
    for receiver in range(3):
        pipes[0].send(thing)
        arrived[receiver] = unpack(pipes[1].recv())
    del thing, arrived[1]
    assert sent(pipes, blocks, 2.0)[1] is not memory
    del arrived[2]
    assert not memory.is_back
    assert arrived.pop(0).eq(1).all()
    assert memory.is_back
    assert packed(blocks, 3.0)[1] is memory


@needs_flags
def test_what_the_sender_will_send_to_others_stays_as_it_is(pipes: tuple[Pipe, Pipe]) -> None:
    blocks = ReusedBlocks()
    thing, memory = packed(blocks, 1.0)
    pipes[0].send(thing)
    assert unpack(pipes[1].recv()).eq(1).all()
    assert memory.is_back  # the first has let go, the second has not been sent it yet
    assert sent(pipes, blocks, 2.0)[1] is not memory
    pipes[0].send(thing)
    assert unpack(pipes[1].recv()).eq(1).all()


def test_what_has_not_been_read_yet_is_not_written_to(pipes: tuple[Pipe, Pipe]) -> None:
    blocks = ReusedBlocks()
    pipes[0].send(pack(torch.tensor([1.0]), allocate=blocks))
    pipes[0].send(pack(torch.tensor([2.0]), allocate=blocks))
    assert [float(unpack(pipes[1].recv())) for _ in range(2)] == [1.0, 2.0]


def test_what_the_receiver_keeps_stays_as_it_is(pipes: tuple[Pipe, Pipe]) -> None:
    blocks = ReusedBlocks(keep=2)
    part = sent(pipes, blocks, 0.0)[0][3:5]  # of a tensor that is gone
    kept = [sent(pipes, blocks, value)[0] for value in (1.0, 2.0, 3.0)]
    for value in (4.0, 5.0, 6.0):
        sent(pipes, blocks, value)
    assert part.tolist() == [0.0, 0.0]
    assert [float(tensor[0]) for tensor in kept] == [1.0, 2.0, 3.0]


@needs_flags
def test_the_sender_keeps_no_more_than_it_is_told(pipes: tuple[Pipe, Pipe]) -> None:
    blocks = ReusedBlocks(keep=2)
    arrived, memories = zip(*(sent(pipes, blocks, value) for value in (1.0, 2.0, 3.0)), strict=True)
    del arrived
    assert all(memory.is_back for memory in memories)
    used = {id(sent(pipes, blocks, 0.0)[1]) for _ in range(4)}
    assert used <= {id(memory) for memory in memories[1:]}


@needs_flags
def test_a_child_of_the_receiver_that_forgets_memory_does_not_let_it_go(pipes: tuple[Pipe, Pipe]) -> None:
    arrived, memory = sent(pipes, ReusedBlocks(), 1.0)
    child = os.fork()
    if not child:
        del arrived
        os._exit(0)
    os.waitpid(child, 0)
    assert not memory.is_back
    del arrived
    assert memory.is_back


@needs_flags
def test_memory_is_used_for_messages_of_its_size_alone(pipes: tuple[Pipe, Pipe]) -> None:
    blocks = ReusedBlocks()
    large = sent(pipes, blocks, 1.0)[1]
    assert large.is_back
    assert sent(pipes, blocks, 1.0, size=900)[1] is not large
    assert sent(pipes, blocks, 1.0, size=1100)[1] is not large


def test_memory_with_a_name_is_not_used_again(pipes: tuple[Pipe, Pipe], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block, "ANONYMOUS", False)  # as on macOS, where nobody says that it has been let go
    blocks = ReusedBlocks()
    kept = [sent(pipes, blocks, value) for value in (1.0, 2.0, 3.0)]
    assert len({id(memory) for _, memory in kept}) == 3
    assert [float(arrived[0]) for arrived, _ in kept] == [1.0, 2.0, 3.0]
