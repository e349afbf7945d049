"""Checks that neuronx-cc takes the toolkit's graphs: against its documented limits, before anyone
pays for a compile.

  ltx-neuron lint

One table of rules (rules.py) and two front ends that read graphs into operations: fx.py for what
TorchNeuron is given (exported programs, AOT graphs of torch.compile) and hlo.py for what
ModelBuilder is given (the HLO text that torch_xla traces, lower.py).
"""

from ltx_neuron.lint.fx import Recorder, check_fx
from ltx_neuron.lint.hlo import check_hlo
from ltx_neuron.lint.rules import Finding, compare_ranks

__all__ = ["Finding", "Recorder", "check_fx", "check_hlo", "compare_ranks"]
