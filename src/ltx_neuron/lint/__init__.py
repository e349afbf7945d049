"""ltx-neuron lint: checks the toolkit's graphs against the documented limits of neuronx-cc, without
the compiler.

One table of rules (rules.py) and two front ends that convert graphs to operations: fx.py for
TorchNeuron's input (exported programs, AOT graphs of torch.compile) and hlo.py for ModelBuilder's
input (the HLO text of torch_xla's traces, lower.py).
"""

from ltx_neuron.lint.fx import Recorder, check_fx
from ltx_neuron.lint.hlo import check_hlo
from ltx_neuron.lint.rules import Finding, compare_ranks

__all__ = ["Finding", "Recorder", "check_fx", "check_hlo", "compare_ranks"]
