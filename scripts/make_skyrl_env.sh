#!/bin/sh
# Makes the environment of a SkyRL Tinker server with the JAX backend. Clients need one of their own (`make test-remote`
# has it): SkyRL and tinker-cookbook want different versions of transformers.
#
# Usage: scripts/make_skyrl_env.sh [FOLDER]        default: .venv-skyrl
#        PYTHON=/path/to/python3.12 scripts/make_skyrl_env.sh
#
# SkyRL starts its engine with `uv run`. FOLDER/bin/uv stands in for that: it runs a module with this
# environment's python. A server, with its address on this machine only:
#
#   PATH="$PWD/.venv-skyrl/bin:$PATH" .venv-skyrl/bin/uv run -m skyrl.tinker.api \
#       --host 127.0.0.1 --port 8000 --base-model MODEL_FOLDER --backend jax \
#       --checkpoints-base FOLDER --database-url sqlite:///FOLDER/tinker.db
set -eu

root=$(cd "$(dirname "$0")/.." && pwd)
folder=${1:-$root/.venv-skyrl}
constraints=$root/constraints-skyrl.txt

python=
for candidate in ${PYTHON:-python3.12 python3}; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' >/dev/null 2>&1; then
        python=$candidate
        break
    fi
done
if [ -z "$python" ]; then
    echo "SkyRL needs Python 3.12; found none among: ${PYTHON:-python3.12 python3}." >&2
    echo "Install it, or name it: PYTHON=/path/to/python3.12 $0" >&2
    exit 1
fi

"$python" -m venv "$folder"
pip="$folder/bin/python -m pip install --quiet"
$pip --upgrade "pip>=25.1"
$pip -c "$constraints" torch
$pip -c "$constraints" "skyrl[tinker,jax]"

cat > "$folder/bin/uv" <<'UV'
#!/bin/sh
# Stands in for `uv run ... -m MODULE ARGUMENTS`. The server reads its parent's command line, so this one stays.
python=$(dirname "$0")/python
while [ "$#" -gt 0 ] && [ "$1" != -m ]; do shift; done
[ "$#" -ge 2 ] || { echo "usage: uv run [options] -m MODULE [arguments]" >&2; exit 2; }
[ "$2" = skyrl.tinker.api ] || exec "$python" "$@"
"$python" "$@" &
server=$!
trap 'kill "$server" 2>/dev/null' TERM INT
wait "$server"
UV
chmod +x "$folder/bin/uv"
echo "$folder is ready"
