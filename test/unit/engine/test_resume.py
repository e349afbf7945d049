"""Which saved runs are resumed."""

import pytest
import torch
from jobs import make_job

from ltx_neuron.engine.outputs import restore_state, write_run_tensors
from ltx_neuron.errors import UserError
from ltx_neuron.job import Size


def test_a_run_begun_with_another_host_dtype_is_resumed_with_a_message(tmp_path, capsys):
    path, job = tmp_path / "out.resume.safetensors", make_job("rain", Size(64, 64, 9))
    identity = {"seed": 10, "host_dtype": "bfloat16"}
    tensors = {"attention_mask": torch.ones(1, 1024, dtype=torch.int64), "s1_video": torch.zeros(1, 128, 2, 2, 2)}
    tensors |= {"video_context": torch.zeros(1, 1024, 4), "audio_context": torch.zeros(1, 1024, 2)}
    write_run_tensors(path, tensors | {"s1_audio": torch.zeros(1, 8, 9, 16)}, identity)
    here = identity | {"host_dtype": "float32"}
    assert restore_state(path, job, here, torch.float32).stages_left == []
    assert "host_dtype bfloat16, this machine's is float32" in capsys.readouterr().out
    with pytest.raises(UserError, match="is from another run: seed: got 10, wanted 11"):
        restore_state(path, job, here | {"seed": 11}, torch.float32)
    # A worker's next attempt may be on another machine: it begins anew rather than mix the two.
    with pytest.raises(UserError, match="host_dtype: got bfloat16, wanted float32"):
        restore_state(path, job, here, torch.float32, exact=True)
