"""How ranks share experts, as settings say."""

from __future__ import annotations

from vlmserve.config.engine_args import EngineArgs
from vlmserve_common.compute.shard import ExpertSharing


def expert_sharing(args: EngineArgs) -> ExpertSharing:
    """Of all ranks alike."""
    return ExpertSharing(
        ep_size=args.ep_size,
        a2a=args.moe_a2a_backend,
        redundant=args.ep_num_redundant_experts,
        counted=args.enable_eplb,
    )
