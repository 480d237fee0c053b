#!/usr/bin/env bash
# A virtual environment with sglang, for `engine: {kind: sglang, python: FOLDER/bin/python}`: setup_sglang.sh FOLDER
# reroll is not installed in it: what sglang's process needs of reroll, it reads from where reroll is.
set -euo pipefail
folder=$1
[ -f "$folder/.sglang" ] && exit 0
"${PYTHON:-python3}" -m venv "$folder"
"$folder/bin/pip" install --quiet --disable-pip-version-check sglang==0.5.16
touch "$folder/.sglang"
