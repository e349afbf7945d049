"""What StableHLO demands of replica groups, as jaxlib's verifier does."""


def refusal(groups: list[list[int]]) -> str | None:
    """What StableHLO's verifyReplicaGroups says to replica groups; None if it accepts them."""
    ids = [rank for ranks in groups for rank in ranks]
    for rank in ids:
        if ids.count(rank) > 1:
            return f"replica id #{rank} seen more than once"
    for rank in range(len(ids)):
        if rank not in ids:
            return f"replica id #{rank} not seen in replica groups"
    return None
