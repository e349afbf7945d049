# ltx-neuron on AWS Neuron's container for inference: the last with NxD, whose SDK 2.31.1 has the
# versions of the extra "neuron". The image has no weights. Everything is read and written in /work.
#
#   docker build -t ltx-neuron .
#   docker run --device=/dev/neuron0 -v "$PWD:/work" ltx-neuron doctor
#
# The same for a machine without an accelerator:
#
#   docker build -t ltx-neuron:cpu --build-arg BASE=python:3.11-slim .
#   docker run -v "$PWD:/work" ltx-neuron:cpu doctor
ARG BASE=public.ecr.aws/neuron/pytorch-inference-neuronx:2.9.0-neuronx-py312-sdk2.31.1-ubuntu24.04
FROM ${BASE}

WORKDIR /opt/ltx-neuron
COPY pyproject.toml README.md LICENSE constraints.txt ./
COPY src src
# Where the base has Neuron's packages, the extra of its stack only checks their versions: NxD's
# torch-neuronx is 2.9, TorchNeuron's a later one.
RUN case "$(python -m pip show torch-neuronx 2>/dev/null)" in \
        '') python -m pip install --no-cache-dir -c constraints.txt ".[hdr,plot,serve]" ;; \
        *'Version: 2.9.'*) python -m pip install --no-cache-dir ".[neuron,hdr,plot,serve]" ;; \
        *) python -m pip install --no-cache-dir ".[torchneuron,hdr,plot,serve]" ;; \
    esac \
 && python -m pip install --no-cache-dir --no-deps -c constraints.txt ltx-core

WORKDIR /work
EXPOSE 8000
ENTRYPOINT ["ltx-neuron"]
CMD ["--help"]
