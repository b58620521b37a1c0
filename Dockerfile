# The programs, on a CPU. Runs and caches land in the current folder:
#   docker build -t moe-ffn . && docker run --rm --user "$(id -u)" -v "$PWD:/home/user" moe-ffn demo
FROM python:3.11-slim

# The compiler makes the CPU kernels of the experts, which are faster than torch's loop.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*

# torch first and alone, since it takes long and rarely changes. With --build-arg PIP_EXTRA_INDEX_URL=..., an index
# that has torch's build for CPUs, the image is gigabytes smaller.
ARG PIP_EXTRA_INDEX_URL
WORKDIR /src
COPY requirements.lock ./
RUN pip install --no-cache-dir --constraint requirements.lock torch
COPY pyproject.toml README.md LICENSE ./
COPY moe_ffn moe_ffn
RUN pip install --no-cache-dir --constraint requirements.lock ".[train]" \
    && useradd --uid 1000 --create-home user

USER 1000
ENV HOME=/home/user
WORKDIR /home/user
ENTRYPOINT ["moe-ffn"]
