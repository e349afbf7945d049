"""Plans in tests: what a step and a host's model cost is counted once for each size. Exporting a
block takes most of a second, and tens of tests ask for the same few."""

from functools import cache

import pytest

from ltx_neuron import plan
from ltx_neuron.plan import layouts

_step, _steps = plan.step_cost, {}


def _step_once(config, bucket, profile, tp, dtype, sequence_parallel=False):
    """Of a profile a step's cost depends on the attention and on context parallelism."""
    key = config, bucket, profile.attention, profile.context_parallel, tp, dtype, sequence_parallel
    if key not in _steps:
        _steps[key] = _step(config, bucket, profile, tp, dtype, sequence_parallel)
    return _steps[key]


_ONCE = {
    (plan, "step_cost"): _step_once,
    (layouts, "step_cost"): _step_once,
    (plan, "text_weights"): cache(plan.text_weights),
}


@pytest.fixture(scope="module", autouse=True)
def counted_once():
    """Import it for a file's tests."""
    with pytest.MonkeyPatch.context() as patch:
        for (module, name), function in _ONCE.items():
            patch.setattr(module, name, function)
        yield
