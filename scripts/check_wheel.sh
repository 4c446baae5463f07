#!/usr/bin/env bash
# Build the wheel, install it into an empty environment outside the checkout, and use
# it there: the commands and the Python examples of the README.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
uv=$root/.venv/bin/uv
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
unset PYTHONPATH PYTHONDONTWRITEBYTECODE VIRTUAL_ENV
export OMP_NUM_THREADS=1

# From a copy: setuptools would take deleted modules from an old build folder.
mkdir "$place/copy"
cp -r "$root"/{src,pyproject.toml,README.md,LICENSE} "$place/copy"
rm -rf "$place"/copy/src/*.egg-info
"$uv" build -q --wheel --out-dir "$place/dist" "$place/copy"
rm -rf "$place/copy"
"$uv" venv -q --python "$root/.venv/bin/python" "$place/env"
"$uv" pip install -q -p "$place/env" -c "$root/constraints.txt" "$place"/dist/*.whl
mkdir "$place/empty"
cd "$place/empty"
export PATH=$place/env/bin:$PATH

python - "$place/env" <<'PY'
import sys

import esper

assert esper.__file__.startswith(sys.argv[1]), esper.__file__
PY
esper --help >/dev/null
esper grow --task letter --controller early
esper train --preset quick --rng-seed 0 --name wheel \
    --budget.rounds 2 --envs 4 --judging.hosts 2
esper report wheel
test -s runs/wheel/report.html
"$uv" pip install -q -p "$place/env" -c "$root/constraints.txt" \
    "esper-lite[rl] @ file://$(echo "$place"/dist/*.whl)"
python - "$root/README.md" <<'PY'
import re
import sys
from pathlib import Path

text = Path(sys.argv[1]).read_text(encoding="utf-8")
for example in re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL):
    exec(compile(example, "README.md", "exec"), {})
PY
echo "The wheel works outside the checkout."
