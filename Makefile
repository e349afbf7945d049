# make demo: from a fresh clone to outputs/demo.mp4.   make test: what a change needs before a commit.
# make test-all: everything that needs no Neuron device and no package of its own, as CI runs it.
# make serve-demo: the demo's model behind http://127.0.0.1:8000/v1 (docs/serving.md).
PYTHON ?= python3
# Processes that test. Each waits half of its time, for ranks that start, leases and health checks.
WORKERS ?= 3
# The default, for CPUs.
TORCH ?= torch==2.13.0
# Another transformers than constraints.txt's, with the versions of its own packages that it takes.
TRANSFORMERS ?=
# An environment for each pair of them: CONTRIBUTING.md.
VENV ?= .venv
PY := $(VENV)/bin/python
DEMO := src/ltx_neuron/demo
CKPT := $(DEMO)/ltx-2.3-demo.safetensors
PROMPT := "a red circle glides slowly to the right on a navy ground"
SIZE := --height 128 --width 192 --num-frames 49 --frame-rate 24 --two-stage

.PHONY: demo demo-sheet demo-style serve-demo demo-artifacts test test-all stress lint venv
venv: $(VENV)/installed

PINS := $(VENV)/constraints.txt
$(VENV)/installed: pyproject.toml requirements.txt constraints.txt
	$(PYTHON) -m venv $(VENV)
	grep -vE "^(#$(if $(TRANSFORMERS),|transformers|tokenizers|huggingface_hub))" constraints.txt > $(PINS)
	$(PY) -m pip install -q "$(TORCH)" $(TRANSFORMERS) -c $(PINS)
	$(PY) -m pip install -q -r requirements.txt -c $(PINS)
	$(PY) -m pip install -q --no-deps ltx-core ltx-pipelines -c $(PINS)
	touch $@

demo-artifacts: venv
	$(PY) shards/shard_backbone_weights.py --checkpoint-path $(CKPT)
	$(PY) shards/shard_gemma3_weights.py --gemma-root $(DEMO)/gemma --checkpoint-path $(CKPT)
	$(PY) compile/compile_transformer.py --checkpoint-path $(CKPT) $(SIZE)
	$(PY) compile/compile_gemma3.py --gemma-root $(DEMO)/gemma --checkpoint-path $(CKPT)

demo: demo-artifacts
	$(PY) src/generate_ltx23.py --neuron-gemma --checkpoint-path $(CKPT) --gemma-root $(DEMO)/gemma \
	  --spatial-upsampler-path $(DEMO)/upsampler.safetensors $(SIZE) \
	  --prompt $(PROMPT) --output-path outputs/demo.mp4 --perf-dump-path outputs/demo-perf.json

# The README's picture: six prompts of the demo's world.
demo-sheet: demo-artifacts
	$(PY) src/generate_ltx23.py --neuron-gemma --checkpoint-path $(CKPT) --gemma-root $(DEMO)/gemma \
	  --spatial-upsampler-path $(DEMO)/upsampler.safetensors $(SIZE) \
	  --prompts-file tools/demo_prompts.jsonl --output-dir outputs/demo-sheet
	$(PY) tools/contact_sheet.py --output outputs/demo.png outputs/demo-sheet/*.mp4

# The demo's prompt with the demo's LoRA.
STYLE := --lora $(DEMO)/blueprint-lora.safetensors
demo-style: demo-artifacts
	$(PY) shards/shard_backbone_weights.py --checkpoint-path $(CKPT) $(STYLE)
	$(PY) src/generate_ltx23.py --neuron-gemma --checkpoint-path $(CKPT) --gemma-root $(DEMO)/gemma \
	  --spatial-upsampler-path $(DEMO)/upsampler.safetensors $(SIZE) $(STYLE) \
	  --prompt $(PROMPT) --output-path outputs/demo-style.mp4

serve-demo: demo-artifacts
	$(PY) -m ltx_neuron.serve --neuron-gemma --checkpoint-path $(CKPT) --gemma-root $(DEMO)/gemma \
	  --spatial-upsampler-path $(DEMO)/upsampler.safetensors $(SIZE)

lint: venv
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	PYTHONPATH=src $(VENV)/bin/lint-imports --no-cache --no-logo
	$(if $(filter .venv,$(VENV)),PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(PY) -m pyright --pythonpath $(PY))

# loadfile: a file's tests share its fixtures, in one worker. Files begin in the order of the folders,
# so that the last ones are short.
PYTEST := OMP_WAIT_POLICY=passive $(PY) -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

test: venv lint
	$(PYTEST) test/integration test/unit

test-all: venv lint
	$(PYTEST) test/slow test/integration test/unit

# Kills, busy loops and pauses, for hours; STRESS_SHARE=0.1 does a tenth of them.
stress: venv
	$(PY) -m pytest test/stress
