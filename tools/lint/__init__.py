"""Checks the toolkit's graphs against the documented limits of neuronx-cc, without the compiler:
cd tools && python -m lint

One table of rules (rules.py) and two front ends that convert graphs to operations: fx.py for
TorchNeuron's input (exported programs, AOT graphs of torch.compile) and hlo.py for ModelBuilder's
input (the HLO text of torch_xla's traces, lower.py).
"""

from lint.fx import Recorder, check_fx
from lint.hlo import check_hlo
from lint.rules import Finding, compare_ranks

__all__ = ["Finding", "Recorder", "check_fx", "check_hlo", "compare_ranks"]
