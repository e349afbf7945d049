"""The whole step, or the whole guided pass, as one graph."""

from torch import nn

from ltx_neuron.models.signatures import GuidedStepInputs, StepInputs, TailOutputs, X0Outputs


class Step(nn.Module):
    """The whole step, or the whole guided pass, as one graph: head, all blocks, tail."""

    def __init__(
        self,
        head: nn.Module,
        blocks: nn.Module,
        tail: nn.Module,
        signatures: tuple[type, type, type],
    ):
        super().__init__()
        self.head, self.blocks, self.tail, self.signatures = head, blocks, tail, signatures

    def forward(self, inputs: StepInputs | GuidedStepInputs) -> TailOutputs | X0Outputs:
        values = inputs._asdict()
        # As a backend runs the cut program: each part takes its fields by name from what is there.
        parts = zip((self.head, self.blocks, self.tail), self.signatures, strict=True)
        for module, signature in parts:
            outputs = module(signature(*(values[name] for name in signature._fields)))
            values |= outputs._asdict()
        return outputs
