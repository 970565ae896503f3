# A server with the compressed cache on a CPU. Not built or tested by this project's CI, which has no container runtime.
#
#   docker build -t sglang-csa2 .
#   docker run --rm -p 30000:30000 -v MODELS:/models:ro -v csa2-cache:/cache --shm-size 2g sglang-csa2 \
#       --model-path /models/YOUR_MODEL --csa2-arena-size 8GiB
FROM python:3.12-slim

# g++: kernels are compiled once, for the processor they run on, into CSA2_CACHE_DIR. libnuma1: SGLang's CPU backend.
RUN apt-get update && apt-get install -y --no-install-recommends g++ libnuma1 && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/sglang-csa2
COPY pyproject.toml requirements.lock README.md LICENSE ./
COPY csa2 csa2
COPY sgl_kernels sgl_kernels
COPY python python
RUN PIP_CONSTRAINT=requirements.lock pip install --no-cache-dir .

RUN useradd --create-home csa2 && install -d -o csa2 /cache
USER csa2
WORKDIR /home/csa2
ENV CSA2_CACHE_DIR=/cache
VOLUME /cache
EXPOSE 30000
ENTRYPOINT ["python", "-m", "sglang.launch_server", "--kv-compress", "csa2", "--device", "cpu", "--host", "0.0.0.0", "--port", "30000"]
