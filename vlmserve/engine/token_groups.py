"""Groups of ranks that have requests of their own (`--enable-dp-attention`): rank = group * members + number in it."""

from __future__ import annotations

from dataclasses import replace

from vlmserve.config.engine_args import EngineArgs
from vlmserve_common.compute.shard import AttentionGroup
from vlmserve_common.compute.token_exchange import TokenExchange
from vlmserve_common.parallel.ranks import Ranks


def attention_group(args: EngineArgs, rank: int) -> AttentionGroup | None:
    """A rank's place in its group, to be looked at; None where there is one group."""
    if not args.enable_dp_attention:
        return None
    members = args.tp_size // args.dp_size
    return AttentionGroup(rank=rank % members, size=members)


def join_groups(args: EngineArgs, ranks: Ranks) -> None:
    """Have ranks that have met exchange tokens between their groups, and heads within them."""
    assert ranks.group is not None, "there are several groups"
    members = args.tp_size // args.dp_size
    group, member = divmod(ranks.rank, members)
    own = ranks.make_group(f"attention {group}", member, members) if members > 1 else None
    peers = ranks.make_group(f"peers {member}", group, args.dp_size) if own is not None else ranks.group
    tokens = TokenExchange(group, args.dp_size, peers=peers, members=own, num_members=members, everybody=ranks.group)
    own_group = AttentionGroup(rank=member, size=members, collectives=own, tokens=tokens)
    ranks.shard = replace(ranks.shard, group=own_group)


def tokens_of(ranks: Ranks) -> TokenExchange | None:
    """What ranks of several groups exchange tokens by."""
    return None if ranks.shard.group is None else ranks.shard.group.tokens
