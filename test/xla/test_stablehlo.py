"""What the stand-in for TorchNeuron (test/torchneuron) demands of replica groups is what jaxlib's
verifier of StableHLO demands."""

import runpy

import pytest
from neuron_groups import LAYOUTS, STAND_IN

from ltx_neuron.backends import mesh

ir = pytest.importorskip("jaxlib.mlir.ir", reason="jaxlib is not installed")

TEXT = """
%x = stablehlo.constant dense<0.0> : tensor<4xf32>
%y = "stablehlo.all_reduce"(%x) ({{
^bb0(%a: tensor<f32>, %b: tensor<f32>):
  %c = stablehlo.add %a, %b : tensor<f32>
  stablehlo.return %c : tensor<f32>
}}) {{replica_groups = dense<{groups}> : tensor<{shape}xi64>}} : (tensor<4xf32>) -> tensor<4xf32>
"""
REFUSED = [[[4, 5, 6, 7]], [[0, 4]], [[1, 5]], [[0, 1], [1, 2]], [[0, 1], [2, 4]]]
ACCEPTED = [
    [[0, 1, 2, 3]],
    [[0, 2], [1, 3]],
    *(part for layout in LAYOUTS.values() for part in mesh.groups(layout, 4).values()),
]


def refused_by_stablehlo(groups: list[list[int]]) -> str | None:
    from jaxlib.mlir.dialects import stablehlo

    with ir.Context() as context:
        stablehlo.register_dialect(context)
        try:
            ir.Module.parse(TEXT.format(groups=groups, shape=f"{len(groups)}x{len(groups[0])}"))
        except ir.MLIRError as error:
            return str(error)
    return None


@pytest.mark.parametrize("groups", REFUSED + ACCEPTED)
def test_replica_groups_are_refused_where_stablehlo_refuses_them(groups):
    message = runpy.run_path(str(STAND_IN / "stablehlo.py"))["refusal"](groups)
    real = refused_by_stablehlo(groups)
    assert (message is None) == (real is None) == (groups in ACCEPTED)
    assert message is None or message in real
