#!/bin/sh
# The venv of the two checks that need PyTorch/XLA (test/xla/test_nxd_*.py and python -m lint):
#
#     test/xla/make_xla_venv.sh DIR [PYTHON]
#
# torch_xla has no release after 2.9 and wants the torch of the same number; from PyPI that torch brings about 7 GB of CUDA
# libraries, which are linked but not used here. transformers stays below 5 because NxD 0.18 imports transformers.utils.fx.
set -eu
dir=${1:?usage: test/xla/make_xla_venv.sh DIR [PYTHON]}
here=$(cd "$(dirname "$0")/../.." && pwd)
"${2:-python3}" -m venv "$dir"
pip() { "$dir/bin/python" -m pip install -q "$@"; }
pip "torch==2.9.*" "torch_xla==2.9.*"
pip -e "$here[dev,plot]" "jaxlib>=0.7" "protobuf>=5" requests "transformers>=4.57,<5"
pip --no-deps ltx-core ltx-pipelines -c "$here/constraints.txt"
"$dir/bin/python" -c "import torch_xla, jaxlib, transformers; print('ready:', torch_xla.__version__, jaxlib.__version__)"
