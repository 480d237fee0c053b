# reroll with Ray, data, LoRA, trackers and agents. It runs on a CPU, and on NVIDIA GPUs where the container runtime lends them.
#   docker build -t reroll .
#   docker run --rm -it --gpus all --shm-size 8g -v "$PWD":/work reroll train config.yaml
# The sandbox of the code rewards makes namespaces of its own where it may (`--security-opt seccomp=unconfined`); elsewhere it
# falls back to Landlock and says so: `docker run --rm --entrypoint python reroll -m reroll_zoo.sandbox`.
ARG PYTHON=3.12
FROM python:${PYTHON}-slim

# A compiler for C++ programs of the code reward and for Triton's kernels; git for packages that are installed from sources.
RUN apt-get update && apt-get install -y --no-install-recommends g++ git && rm -rf /var/lib/apt/lists/*

# The packages first: a change of reroll's own files then leaves this layer alone.
WORKDIR /opt/reroll
COPY pyproject.toml constraints.txt README.md LICENSE ./
RUN mkdir reroll && touch reroll/__init__.py \
 && pip install --no-cache-dir -c constraints.txt '.[ray,data,gguf,lora,trackers,agents,math]' \
 && pip uninstall -y reroll && rm -r reroll

COPY reroll reroll
COPY reroll_zoo reroll_zoo
RUN pip install --no-cache-dir --no-deps .

# Not root: what a policy writes is judged in here.
RUN useradd --create-home reroll && mkdir /work && chown reroll /work
USER reroll
WORKDIR /work
ENV REROLL_MODELS=/work/models
ENTRYPOINT ["reroll"]
CMD ["--help"]
