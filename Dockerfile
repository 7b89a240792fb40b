# The HTTP server: docs/deployment.md says how it is built and run, on a CPU and on a GPU.
FROM python:3.11-slim
# an index with PyTorch's builds for CPUs; without it, pip takes the build for CUDA
ARG TORCH_INDEX=
ARG EXTRAS=serve,openvino,gpu
WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY engines engines
COPY export export
COPY mtad mtad
COPY runtime runtime
# with CUDA, Triton compiles its launcher in C at its first launch
RUN pip install --no-cache-dir --constraint constraints.txt ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} ".[$EXTRAS]" \
    && if [ -z "$TORCH_INDEX" ]; then apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev; fi \
    && rm -rf /var/lib/apt/lists/* && useradd --uid 1000 --create-home mtad
# by number: Kubernetes cannot tell that a name is not root
USER 1000
WORKDIR /home/mtad
# the decoding rules, for CPUs of the kind that builds the image; others compile them once more, when they start
RUN python -c "from runtime.decoder.host_runner import compile_rules; compile_rules()"
# compiled kernels, also of a user without a home
ENV TRITON_HOME=/tmp
EXPOSE 8000
# until it serves, a container's first process ignores SIGTERM; SIGINT ends it while the pair opens as well
STOPSIGNAL SIGINT
HEALTHCHECK --start-period=600s CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/ping', timeout=5)"]
ENTRYPOINT ["mtad", "serve"]
CMD ["/pair", "--host", "0.0.0.0"]
