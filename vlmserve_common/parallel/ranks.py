"""A rank's connections to the other processes that share its model."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from vlmserve_common.compute.communicator import Communicator
from vlmserve_common.compute.shard import Shard
from vlmserve_common.compute.token_exchange import TokenExchange
from vlmserve_common.parallel.group import IDLE_TIMEOUT, Orders, ProcessGroup, TakenAhead
from vlmserve_common.parallel.meeting import MeetingPlace, meet
from vlmserve_common.parallel.presence import Presence

_CPU = torch.device("cpu")


class Ranks:
    """The rank with part `shard` of a model, connected to all other ranks. The first rank decides, and they obey.

    rank = stage * tensor-parallel size + tensor-parallel rank. place: where all ranks meet. about, look: see `meet`.
    comm: connections for computing. group: of the ranks of this stage; None for a rank that is alone in its stage.
    orders: from the first rank to all. presence: of ranks on other machines.

    results: from the rank that samples to the first rank, in a pipeline; None at other ranks. Raises EngineError as
    `meet` does, and RankLostError later on.
    """

    def __init__(
        self,
        place: MeetingPlace,
        shard: Shard,
        device: torch.device,
        about: Mapping[str, str],
        look: Callable[[], object] = lambda: None,
    ) -> None:
        width, stage, stages = shard.size, shard.stage.rank, shard.stage.size
        self.shard, self.rank, self.size = shard, stage * width + shard.rank, place.size
        self._device, self._called = device, f"rank {self.rank} of {place.size}"
        self._store = meet(place, self.rank, about, look)  # which has to outlive the groups
        self.host = place.own_host()
        """This machine's address for other ranks."""
        # on one machine, the starter of the ranks looks after them
        self.presence = None if place.is_file else Presence(place, self._store, self.rank)
        self._groups: list[ProcessGroup] = []
        self._failures = 0
        # from the first stage on, so that no rank waits for one that waits for it
        self.group = self._make(f"stage {stage}", shard.rank, width) if width > 1 else None
        before = self._make(f"link {self.rank - width}", 1, 2) if stage else None
        behind = self._make(f"link {self.rank}", 0, 2) if stage < stages - 1 else None
        self._told = self._make("orders", self.rank, place.size, device=_CPU, forever=True)
        self.orders = Orders(self._told.broadcast)
        self.results: Orders | None = None
        if stages > 1 and (shard.is_entry or shard.samples):
            # the first rank may be paused, and leave results unread for long
            returning = self._make("results", int(shard.is_entry), 2, device=_CPU, forever=not shard.is_entry)
            self.results = Orders(returning.hand_on)
        members, peers, tokens = self._join_groups()
        guesses = None
        if stages > 1 and (shard.stage.is_first or shard.stage.is_last):
            guesses = self._make(f"guesses {shard.rank}", int(shard.stage.is_first), 2)
        self.comm = Communicator(shard, self.group, members, tokens, before, behind, guesses)
        every = (self.group, members, None if peers is self.group else peers)
        self.computing = tuple(group for group in every if group is not None)
        """Groups that exchange in the middle of a step, links to other stages excepted."""

    def take_orders(self) -> Callable[[], bytes]:
        """Return a function that waits for the next order, at every rank but the first. To be called once."""
        return self.orders.take if self.shard.stage.size == 1 else TakenAhead(self.orders).take

    def share_memory(self) -> None:
        """Exchange through shared memory from now on, if all ranks compute on one machine's CPU. All ranks call this
        once their operators are loaded."""
        for group in (self._told, *self.computing):
            group.share_memory()

    def smallest(self, number: int) -> int:
        """Return the smallest of the numbers that all ranks call this with."""
        return self._told.smallest(number)

    def tell_first(self, what: str, fact: bytes) -> list[bytes]:
        """Tell the first rank a fact of this one. All ranks call this, with another `what` each time. Returns the facts
        of all ranks there, and nothing elsewhere."""
        self._store.set(f"{what}/{self.rank}", fact)  # type: ignore[arg-type]
        return [self._store.get(f"{what}/{rank}") for rank in range(self.size)] if self.rank == 0 else []

    def failure(self, own: str) -> str:
        """Return why a rank could not do what all ranks were to do; "" if all could. own: this rank's reason. All ranks
        call this; the others learn their own reason only."""
        if self.smallest(not own):
            return ""
        self._failures += 1
        told = self.tell_first(f"failure {self._failures}", own.encode())
        return next((fact.decode() for fact in told if fact), own)

    def close(self) -> None:
        """Disconnect; the other ranks see that this one is gone."""
        for group in self._groups:
            group.close()
        if self.presence is not None:
            self.presence.close()

    def _join_groups(self) -> tuple[ProcessGroup | None, ProcessGroup | None, TokenExchange | None]:
        """Connect attention groups: the members of this rank's group, its peers in all groups, and their exchange."""
        groups, own = self.shard.groups, self.shard.attention
        if groups == 1:
            return None, None, None
        assert self.group is not None, "there are several groups"
        number = self.shard.rank // own.size
        members = self._make(f"attention {number}", own.rank, own.size) if own.size > 1 else None
        peers = self._make(f"peers {own.rank}", number, groups) if members is not None else self.group
        tokens = TokenExchange(number, groups, peers=peers, members=members, num_members=own.size, everybody=self.group)
        return members, peers, tokens

    def _make(
        self, name: str, rank: int, size: int, *, device: torch.device | None = None, forever: bool = False
    ) -> ProcessGroup:
        """Make a group of `size` ranks, of which this is number `rank`. forever: waiting in it has no time limit."""
        group = ProcessGroup(
            self._store,
            name,
            rank=rank,
            size=size,
            device=device or self._device,
            host=self.host,
            called=self._called,
            **({"timeout": IDLE_TIMEOUT} if forever else {}),
        )
        self._groups.append(group)
        return group
