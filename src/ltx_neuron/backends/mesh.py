"""The groups of ranks over which a run's graphs have collectives, by name.

Rank c * tp + t has the tokens of part c and the heads of part t. A tensor-parallel group therefore
has consecutive cores, on Trainium one chip's. A graph contains only a group's name, so one graph
serves every rank; which ranks form the group is data of the process or of the compiled executable.
"""

from collections.abc import Mapping

from ltx_neuron.config.profiles import Profile

# c10d's name of the default group, the same in every process. Graphs mean the tensor-parallel
# group by it, so that those without a part for context parallelism are the same in every world.
WORLD = "0"
# Of a run with context parallelism; a rank that loads a graph renames WORLD to TENSOR.
TENSOR, CONTEXT = "tp", "cp"

Groups = Mapping[str, list[list[int]]]  # of ranks by name: lists of ranks that divide the world


def groups(profile: Profile, tp: int) -> Groups:
    """Every group of ranks beside the world's."""
    if (cp := profile.context_parallel) == 1:
        return {}
    return {
        TENSOR: [[c * tp + t for t in range(tp)] for c in range(cp)],
        CONTEXT: [[c * tp + t for c in range(cp)] for t in range(tp)],
    }


def compiled(profile: Profile, tp: int) -> Groups:
    """The groups of compiled graphs' collectives: without context parallelism the world."""
    return groups(profile, tp) or {TENSOR: [[*range(tp)]]}
