#!/usr/bin/env bash
# Build the sdist and the wheel, install the wheel into an empty environment outside the
# checkout, and use it there: the commands and the Python examples of the README.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
uv=$root/.venv/bin/uv
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
unset PYTHONPATH PYTHONDONTWRITEBYTECODE VIRTUAL_ENV
export OMP_NUM_THREADS=1

# From a copy: setuptools would take deleted modules from an old build folder.
mkdir "$place/copy"
cp -r "$root"/{src,tests,docs,examples,pyproject.toml,MANIFEST.in,LICENSE} "$root"/*.md "$place/copy"
rm -rf "$place"/copy/src/*.egg-info
build=("$uv" build -q --build-constraints "$root/tools.txt" --require-build-hashes)
"${build[@]}" --wheel --out-dir "$place/dist" "$place/copy"
"${build[@]}" --sdist --out-dir "$place/sdist" "$place/copy"
"${build[@]}" --wheel --out-dir "$place/again" "$place"/sdist/*.tar.gz
rm -rf "$place/copy"
"$root/.venv/bin/python" - "$place"/dist/*.whl "$place"/again/*.whl "$place"/sdist/*.tar.gz <<'PY'
import sys
import tarfile
import zipfile


def files(path):
    """Names and checksums of the files of a wheel."""
    with zipfile.ZipFile(path) as wheel:
        return {file.filename: file.CRC for file in wheel.infolist()}


wheel, again = files(sys.argv[1]), files(sys.argv[2])
different = {name for name, _ in wheel.items() ^ again.items()}
assert not different, f"another file in the wheel of the sdist: {sorted(different)}"
parts = [name.split("/")[1:] for name in tarfile.open(sys.argv[3]).getnames()]
tests = ["/".join(part) for part in parts if part[:1] == ["tests"]]
assert not tests, f"the sdist has tests: {tests}"
for name in ("README.md", "LICENSE", "CHANGELOG.md", "examples/README.md", "docs/ppo.md"):
    assert name.split("/") in parts, f"the sdist has no {name}"
PY
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
    --budget.rounds 2 --num_envs 4 --evaluation.hosts 2
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
