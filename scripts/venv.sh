#!/usr/bin/env bash
# Make .venv and install Foredraft into it, editable: scripts/venv.sh [cpu|cuda12|cuda13]. Quiet, repeatable.
# Uses uv where it is installed, else python -m venv and pip. PYTHON names the interpreter (3.11 or later).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

backend=${1:-cpu}
case $backend in
  cpu) wheel=mlx-cpu extras=dev,report ;;
  cuda12) wheel=mlx-cuda-12 extras=dev,report,cuda12 ;;
  cuda13 | cuda) wheel=mlx-cuda-13 extras=dev,report,cuda13 ;;
  *) echo "error: BACKEND=$backend: expected cpu, cuda12 or cuda13" >&2; exit 2 ;;
esac

find_python() { # the first interpreter that runs and is new enough; a pyenv shim may exist and do neither
  local name
  for name in ${PYTHON:-python3 python3.13 python3.12 python3.11 python}; do
    if "$name" -c 'import sys, venv; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
      echo "$name"
      return
    fi
  done
  echo "error: no Python 3.11 or later found (tried ${PYTHON:-python3 python3.13 python3.12 python3.11 python}); install" \
    "one with its venv module, or name it: make PYTHON=/path/to/python3.12" >&2
  exit 2
}

uv=$(command -v uv || true)
install() { if [ -n "$uv" ]; then uv pip install -q --python .venv "$@"; else .venv/bin/python -m pip install -q "$@"; fi; }
remove() { if [ -n "$uv" ]; then uv pip uninstall -q --python .venv "$@"; else .venv/bin/python -m pip uninstall -qy "$@"; fi; }
version() { .venv/bin/python -c "import sys, importlib.metadata as m; print(m.version(sys.argv[1]))" "$1" 2>/dev/null; }

export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1 PIP_ROOT_USER_ACTION=ignore
if ! .venv/bin/python -c '' 2>/dev/null; then
  python=$(find_python)
  echo "making .venv with $("$python" --version) ($([ -n "$uv" ] && echo uv || echo "venv and pip"))"
  rm -rf .venv
  if [ -n "$uv" ]; then uv venv -q --seed --python "$python" .venv; else "$python" -m venv .venv; fi
fi

echo "installing Foredraft and its dependencies (a few minutes the first time)"
log=.venv/install.log
if ! { install -e ".[$extras]" && date; } >"$log" 2>&1; then
  grep -iE 'error' "$log" | tail -n 5 >&2 || tail -n 5 "$log" >&2
  echo "error: the installation failed; the whole log is in $log; mend the cause and run the same command again" >&2
  exit 2
fi

if [ "$(uname -s)" = Linux ]; then # backend wheels overwrite each other's libmlx.so: leave exactly the one asked for
  for other in mlx-cpu mlx-cuda-12 mlx-cuda-13; do
    if [ "$other" != "$wheel" ] && version "$other" >/dev/null; then
      echo "replacing $other with $wheel"
      remove "$other" >>"$log" 2>&1
      install --force-reinstall --no-deps "$wheel==$(version mlx)" >>"$log" 2>&1
    fi
  done
fi
rm -f .venv/.ready-*
touch ".venv/.ready-$backend"
