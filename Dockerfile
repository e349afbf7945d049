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
# Where the base has Neuron's packages, the extra only checks their versions.
RUN if python -m pip show --quiet torch-neuronx; then \
        python -m pip install --no-cache-dir ".[neuron,plot,serve]"; \
    else \
        python -m pip install --no-cache-dir -c constraints.txt ".[plot,serve]"; \
    fi \
 && python -m pip install --no-cache-dir --no-deps -c constraints.txt ltx-core

WORKDIR /work
EXPOSE 8000
ENTRYPOINT ["ltx-neuron"]
CMD ["--help"]
