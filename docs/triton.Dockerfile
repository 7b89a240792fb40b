# The image of kubernetes.yaml: Triton's own container with this package in its Python.
#   docker build --file docs/triton.Dockerfile --build-arg TRITON=<an image tritonserver:*-py3> --tag mtad-triton:0.1.0 .
# From 24.12 on: before, Python is 3.10, and Triton's own modules need numpy 1.
ARG TRITON
FROM ${TRITON}
WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY engines engines
COPY export export
COPY mtad mtad
COPY runtime runtime
ENV PIP_BREAK_SYSTEM_PACKAGES=1
# compiled kernels, also of a user without a home
ENV TRITON_HOME=/tmp
# the kernels' launcher is compiled in C at their first launch
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/* \
    && pip install --no-cache-dir --constraint constraints.txt '.[serve,gpu]'
# the decoding rules, for CPUs of the kind that builds the image; others compile them once more, when they start
RUN python3 -c "from runtime.decoder.host_runner import compile_rules; compile_rules()"
