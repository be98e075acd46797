"""Every byte of one memory, planned before it is taken.

There is one :class:`Ledger` per memory (the host, each device); a part of a memory, such as a NUMA
node of the host, is a child of its ledger. Whoever allocates more than a few
KiB reserves it first, under a name and in an account; what does not fit is refused with numbers.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

from ambidex.errors import OutOfMemory

#: The memory of the machine itself. A further part of it (a NUMA node) is ``host:NAME``; any other
#: memory is an accelerator's.
HOST = "host"

#: What memory is used for, in the order of the start-up table.
ACCOUNTS = ("weights", "kv_cache", "activations", "graphs", "staging", "runtime")


@dataclass(frozen=True, slots=True, eq=False)
class Reservation:
    """Bytes of one memory that belong to one named thing. Compared by identity."""

    ledger_name: str
    account: str
    name: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class LedgerRow:
    """The sum of one account."""

    account: str
    num_bytes: int
    num_reservations: int


@dataclass(frozen=True, slots=True)
class MemorySnapshot:
    """A ledger at one moment, as it crosses to other processes."""

    name: str
    capacity_bytes: int
    #: Account -> reserved bytes, every account in the order of :data:`ACCOUNTS`.
    accounts: dict[str, int]

    @property
    def reserved_bytes(self) -> int:
        return sum(self.accounts.values())

    @property
    def free_bytes(self) -> int:
        return self.capacity_bytes - self.reserved_bytes

    @property
    def is_host(self) -> bool:
        """Whether it is the machine's own memory, and not an accelerator's."""
        return is_host_memory(self.name)


def is_host_memory(name: str) -> bool:
    """Whether a memory of this name is the machine's own; see :data:`HOST`."""
    return name.partition(":")[0] == HOST


class Ledger:
    """The reservations of one memory of ``capacity_bytes``. Thread-safe."""

    def __init__(self, name: str, capacity_bytes: int, parent: Ledger | None = None) -> None:
        assert capacity_bytes >= 0, "a capacity is not negative"
        self.name = name
        self.capacity_bytes = capacity_bytes
        self._parent = parent
        self._children: list[Ledger] = []
        #: With the same bytes' reservation in the parent.
        self._reservations: dict[Reservation, Reservation | None] = {}
        self._used_bytes = 0
        self._by_account: dict[str, int] = {}
        # A child's is taken before its parent's, never the other way round.
        self._lock = threading.Lock()

    def child(self, name: str, capacity_bytes: int) -> Ledger:
        """A ledger for a part of this memory: what is reserved there is reserved here too."""
        ledger = Ledger(name, capacity_bytes, self)
        self._children.append(ledger)
        return ledger

    @property
    def children(self) -> tuple[Ledger, ...]:
        return tuple(self._children)

    @property
    def used_bytes(self) -> int:
        return self._used_bytes

    @property
    def free_bytes(self) -> int:
        return self.capacity_bytes - self._used_bytes

    def reserved_bytes(self, account: str) -> int:
        """What is reserved in one account."""
        return self._by_account.get(account, 0)

    def reserve(self, account: str, name: str, num_bytes: int) -> Reservation:
        """Take ``num_bytes``; raises :class:`OutOfMemory` where they exceed what is free, here or
        in the memory that this is a part of."""
        assert account in ACCOUNTS, f"there is no account {account}"
        assert num_bytes >= 0, "a reservation is not negative"
        reservation = Reservation(self.name, account, name, num_bytes)
        with self._lock:
            if num_bytes > self.free_bytes:
                raise OutOfMemory(
                    f"{self.name}: {format_bytes(num_bytes)} wanted for {name} ({account}), "
                    f"{format_bytes(self.free_bytes)} of {format_bytes(self.capacity_bytes)} free. "
                    f"Reserved so far: {self._summary()}."
                )
            above = self._parent.reserve(account, name, num_bytes) if self._parent else None
            self._add(reservation, above)
        return reservation

    def record(self, account: str, name: str, num_bytes: int) -> Reservation:
        """Reserve what was held already when the capacity was measured, and is no part of it: the
        capacity grows by ``num_bytes``, and what is free stays."""
        assert account in ACCOUNTS, f"there is no account {account}"
        assert num_bytes >= 0, "a reservation is not negative"
        reservation = Reservation(self.name, account, name, num_bytes)
        with self._lock:
            self.capacity_bytes += num_bytes
            self._add(reservation, None)
        return reservation

    def set_free(self, num_bytes: int) -> None:
        """The memory was measured again: beside what is reserved, all of which is really held by
        now, ``num_bytes`` are free."""
        assert num_bytes >= 0, "free memory is not negative"
        with self._lock:
            self.capacity_bytes = self._used_bytes + num_bytes

    def _add(self, reservation: Reservation, above: Reservation | None) -> None:
        account, num_bytes = reservation.account, reservation.num_bytes
        self._reservations[reservation] = above
        self._used_bytes += num_bytes
        self._by_account[account] = self._by_account.get(account, 0) + num_bytes

    def release(self, reservation: Reservation) -> None:
        """Give a reservation of this ledger back, once."""
        with self._lock:
            assert reservation in self._reservations, f"{reservation} is not reserved here"
            self._give_back(reservation)

    def release_all(self) -> None:
        """Give everything back, that of all children too."""
        for ledger in self._children:
            ledger.release_all()
        with self._lock:
            for reservation in list(self._reservations):
                self._give_back(reservation)

    def _give_back(self, reservation: Reservation) -> None:
        above = self._reservations.pop(reservation)
        self._used_bytes -= reservation.num_bytes
        self._by_account[reservation.account] -= reservation.num_bytes
        if self._parent is not None and above is not None:
            self._parent.release(above)

    def reservations(self, account: str | None = None) -> list[Reservation]:
        """All reservations, or those of one account; the largest first."""
        with self._lock:
            chosen = [r for r in self._reservations if account in (None, r.account)]
        return sorted(chosen, key=lambda r: (-r.num_bytes, r.name))

    def table(self) -> list[LedgerRow]:
        """One row an account, in the order of :data:`ACCOUNTS`, empty ones too."""
        with self._lock:
            return self._rows()

    def snapshot(self) -> MemorySnapshot:
        with self._lock:
            accounts = {row.account: row.num_bytes for row in self._rows()}
            return MemorySnapshot(self.name, self.capacity_bytes, accounts)

    def _rows(self) -> list[LedgerRow]:
        sizes: dict[str, list[int]] = {account: [] for account in ACCOUNTS}
        for reservation in self._reservations:
            sizes[reservation.account].append(reservation.num_bytes)
        return [LedgerRow(account, sum(each), len(each)) for account, each in sizes.items()]

    def _summary(self) -> str:
        rows = [row for row in self._rows() if row.num_bytes]
        parts = [f"{row.account} {format_bytes(row.num_bytes)}" for row in rows]
        return ", ".join(parts) or "nothing"


def format_bytes(num_bytes: int) -> str:
    """A size for people: ``format_bytes(1610612736)`` is ``1.50 GiB``."""
    for unit, size in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if abs(num_bytes) >= size:
            return f"{num_bytes / size:.2f} {unit}"
    return f"{num_bytes} bytes"


def format_seconds(seconds: float) -> str:
    """A time for people, in three digits: ``12.3 s``, ``45.6 ms``, ``789 us``."""
    unit, size = next((u for u in (("s", 1.0), ("ms", 1e-3)) if seconds >= u[1]), ("us", 1e-6))
    number = seconds / size
    digits = 0 if number >= 100 else 1 if number >= 10 else 2
    return f"{number:,.{digits}f} {unit}"
