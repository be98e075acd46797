"""A device's own memory: no two allocations overlap, and every byte is in an account."""

from __future__ import annotations

import gc
import itertools
import threading

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ambidex.device.region import ALIGNMENT, Region
from ambidex.errors import OutOfMemory
from ambidex.memory.ledger import Ledger

CAPACITY = 1 << 20
ACCOUNTS = {"weights": 400_000, "kv_cache": 300_000, "activations": 200_000}


def make(reserved: dict[str, int] | None = None, capacity: int = CAPACITY) -> tuple[Region, Ledger]:
    ledger = Ledger("sim:0", capacity)
    for account, num_bytes in (reserved or ACCOUNTS).items():
        ledger.reserve(account, account, num_bytes)
    return Region(ledger), ledger


def take(region: Region, num_bytes: int, account: str = "weights") -> torch.Tensor:
    return region.empty((num_bytes,), torch.uint8, account)


class RegionMachine(RuleBasedStateMachine):
    """Allocates and frees at random beside a plain list of what is held."""

    def __init__(self) -> None:
        super().__init__()
        self.region, self.ledger = make()
        #: (tensor, its account, the byte that it is filled with).
        self.held: list[tuple[torch.Tensor, str, int]] = []
        self.peaks = dict.fromkeys(ACCOUNTS, 0)
        self.count = 0

    def taken(self, account: str) -> int:
        return sum(tensor.nbytes for tensor, where, _ in self.held if where == account)

    @rule(
        account=st.sampled_from(list(ACCOUNTS)),
        shape=st.lists(st.integers(0, 40), min_size=1, max_size=3),
        dtype=st.sampled_from([torch.uint8, torch.float16, torch.float32, torch.int64]),
    )
    def allocate(self, account: str, shape: list[int], dtype: torch.dtype) -> None:
        size = torch.empty(shape, dtype=dtype, device="meta").nbytes
        if self.taken(account) + size > ACCOUNTS[account]:
            with pytest.raises(OutOfMemory):
                self.region.empty(tuple(shape), dtype, account)
            return
        tensor = self.region.empty(tuple(shape), dtype, account)
        assert tuple(tensor.shape) == tuple(shape) and tensor.dtype is dtype
        assert self.region.owns(tensor)
        assert not tensor.numel() or tensor.data_ptr() % ALIGNMENT == 0
        self.count += 1
        tensor.view(-1).view(torch.uint8).fill_(self.count % 251)
        self.held.append((tensor, account, self.count % 251))
        self.peaks[account] = max(self.peaks[account], self.taken(account))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def keep_a_part(self, data: st.DataObject) -> None:
        """A view keeps all of the memory; it is freed with the last of them."""
        tensor, account, value = self.held[data.draw(st.integers(0, len(self.held) - 1))]
        view = tensor.view(-1)[:1]
        self.held = [item for item in self.held if item[0] is not tensor]
        size = tensor.nbytes
        del tensor
        assert self.region.taken_bytes(account) == self.taken(account) + size
        assert not view.numel() or view.view(torch.uint8)[0] == value

    @rule()
    def free_all(self) -> None:
        self.held.clear()
        assert [self.region.taken_bytes(account) for account in ACCOUNTS] == [0, 0, 0]
        # Everything is one piece again.
        assert len(self.region._free) == 1

    @invariant()
    def nothing_overlaps(self) -> None:
        pieces = sorted(
            (t.data_ptr(), t.data_ptr() + t.nbytes) for t, _, _ in self.held if t.nbytes
        )
        for (_, end), (start, _) in itertools.pairwise(pieces):
            assert end <= start
        for tensor, _, value in self.held:
            assert (tensor.view(-1).view(torch.uint8) == value).all()

    @invariant()
    def accounts_add_up(self) -> None:
        for account in ACCOUNTS:
            assert self.region.taken_bytes(account) == self.taken(account)
            assert self.region.peak_bytes(account) == self.peaks[account]
        free = self.region._free
        assert all(size > 0 for _, size in free)
        assert all(a + n < b for (a, n), (b, _) in itertools.pairwise(free)), "coalesced"
        held = sum(-(-max(t.nbytes, 1) // ALIGNMENT) * ALIGNMENT for t, _, _ in self.held)
        assert sum(size for _, size in free) + held == self.region._end - self.region._base


TestRegion = RegionMachine.TestCase
TestRegion.settings = settings(max_examples=30, stateful_step_count=25, deadline=None)


def test_an_account_takes_no_more_than_is_reserved_for_it() -> None:
    region, ledger = make({"weights": 1000})
    held = take(region, 600)
    with pytest.raises(OutOfMemory) as caught:
        take(region, 401)
    message = "sim:0: 401 bytes wanted for weights, of which 600 bytes of 1000 bytes reserved are"
    assert str(caught.value).startswith(message)
    assert region.taken_bytes("weights") == 600
    with pytest.raises(OutOfMemory, match="staging, of which 0 bytes of 0 bytes reserved"):
        take(region, 1, "staging")
    more = ledger.reserve("weights", "more", 1000)
    kept = take(region, 1400)
    # What is held stays when a reservation goes; nothing more is handed out.
    ledger.release(more)
    with pytest.raises(OutOfMemory):
        take(region, 1)
    del held, kept
    assert region.taken_bytes("weights") == 0
    assert region.peak_bytes("weights") == 2000


def test_freed_memory_is_used_again() -> None:
    region, _ = make({"weights": CAPACITY})
    first = take(region, 1000)
    address = first.data_ptr()
    other = take(region, 1000)
    del first
    assert take(region, 1000).data_ptr() == address
    # Over and over what is one piece only if neighbours are joined.
    del other
    for _ in range(200):
        parts = [take(region, CAPACITY // 8) for _ in range(8)]
        del parts
        whole = take(region, CAPACITY)
        assert whole.data_ptr() == address
        del whole


@pytest.mark.parametrize("order", ["forwards", "backwards", "inside out"])
def test_neighbours_are_joined_in_any_order(order: str) -> None:
    region, _ = make({"weights": CAPACITY})
    parts = [take(region, CAPACITY // 16) for _ in range(16)]
    indices = list(range(16))
    if order == "backwards":
        indices.reverse()
    elif order == "inside out":
        indices.sort(key=lambda index: (index % 2, index))
    for index in indices:
        parts[index] = torch.empty(0)
    assert region.taken_bytes("weights") == 0
    assert len(region._free) == 1


def test_what_it_owns() -> None:
    region, _ = make()
    other, _ = make()
    held = take(region, 100)
    assert region.owns(held) and region.owns(held[50:60]) and not other.owns(held)
    assert not region.owns(torch.zeros(4))
    # Of no memory nobody can say where it lies.
    assert region.owns(torch.zeros(0)) and other.owns(held[:0])


def test_untouched_memory_takes_none_of_the_machines() -> None:
    """A device may be larger than the machine that simulates it."""
    region, _ = make({"weights": 1 << 42}, 1 << 42)
    held = take(region, 1 << 36)
    assert held[123] == 0


def test_more_than_there_are_addresses() -> None:
    with pytest.raises(OutOfMemory, match=r"no .* TiB of addresses for sim:0.*Give it less memory"):
        Region(Ledger("sim:0", 1 << 60))


def test_threads_may_allocate_and_drop() -> None:
    region, _ = make({"weights": 64 << 10, "activations": 64 << 10})
    failures: list[BaseException] = []

    def work(account: str, value: int) -> None:
        try:
            for size in range(1, 300):
                held = [take(region, size, account).fill_(value) for _ in range(5)]
                assert all((tensor == value).all() for tensor in held)
        except BaseException as error:
            failures.append(error)

    accounts = ["weights", "activations"]
    threads = [threading.Thread(target=work, args=(a, i)) for i, a in enumerate(accounts * 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    gc.collect()
    assert not failures
    assert [region.taken_bytes(account) for account in accounts] == [0, 0]
    assert len(region._free) == 1
