# make demo    install into .venv, quantize the embedded digits models, print the table
# make quick   before each commit: ruff, mypy and the tests that take little time: 2 minutes
# make test    what CI runs: install into .venv, run ruff, mypy and the tests but the slow ones: 10 minutes
# make test ROOM=planning   the tests of one room, qtk/planning, and its doctests; ROOM=qtk: the files beside the rooms
# make test-all     before a release: the slow tests too, matrices in full: hours
# make test-kernels after a change of kernels/, ops/, numerics/ or csrc/: all of their tests, and the record that they passed: 13 to 15 minutes
# make planted      after a change of the suite: plants faults and counts which are found: an hour
# make test-oldest  the tests with the oldest torch that is promised, in .venv-oldest
# make lint    ruff and mypy alone
# make docs    the documentation as a site in build/site
# make dist    a wheel, which compiles its C++ kernels when qtk build-kernels is called, and the sources, in dist/
# make bench   the benchmarks; ARGS="--quick" is passed on
# make bench-gpu  the tables of benchmarks/RESULTS.md that need a GPU, in ten minutes; without a GPU it says so and fails
# An active virtual environment is used instead of .venv.

PYTHON3 ?= python3
VENV    := $(or $(VIRTUAL_ENV),$(CURDIR)/.venv)
PYTHON  := $(VENV)/bin/python
OUTPUT  ?= qtk-output
ARGS    ?=

# A stamp says that this checkout is what the environment holds; it lives and dies with the environment.
STAMPS  := $(VENV)/.qtk-$(shell printf '%s' '$(CURDIR)' | cksum | cut -d ' ' -f 1)
STAMP    = find $(VENV) -maxdepth 1 -name '.qtk-*' ! -path '$(STAMPS)' -exec rm -r {} + && mkdir -p $(STAMPS) && touch
SOURCES := pyproject.toml setup.py $(wildcard csrc/*)

# Compiles the C++ kernels against the torch just installed; without a compiler the package works without them.
KERNELS  = $(PYTHON) -m pip install --quiet "setuptools>=77" && \
           $(PYTHON) -m pip install --no-build-isolation --no-deps --editable .

OLDEST  := $(CURDIR)/.venv-oldest
# Compiled files are kept whatever the environment says: each of many processes would compile qtk and the tests again.
PYTEST   = PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(PYTHON) -m pytest -n 2 --dist loadscope --durations=15
ROOM    ?=
PLACES   = $(if $(ROOM),$(or $(shell $(PYTHON3) tests/rooms.py $(ROOM)),$(error there is no room $(ROOM): no folder of this name in tests or qtk)))

.PHONY: demo dist docs quick test test-all test-kernels test-oldest planted pytest lint bench bench-gpu clean
.DEFAULT_GOAL := test

demo: $(STAMPS)/demo
	$(VENV)/bin/qtk quantize --output $(OUTPUT) --force

quick: $(if $(ROOM),$(STAMPS)/all,lint)
	$(PYTEST) --door quick $(PLACES) $(ARGS)

test: $(if $(ROOM),$(STAMPS)/all,lint)
	$(PYTEST) $(PLACES) $(ARGS)

test-all: lint
	$(PYTEST) --door all $(ARGS)

test-kernels: $(STAMPS)/all
	$(PYTEST) tests/kernels tests/ops tests/numerics tests/ptx tests/invariants $(ARGS)
	$(PYTHON) tests/kernels/passed.py --record

planted: $(STAMPS)/all
	$(PYTHON) tests/planted/plant.py $(ARGS)

pytest: $(STAMPS)/all
	$(PYTEST) $(ARGS)

# In a copy of the source, for the C++ kernels are compiled in place against the torch of the environment.
# Triton 3.6, which comes with torch 2.11, interprets its kernels with numpy before 2.4 alone; only tests do that.
test-oldest:
	test -x $(OLDEST)/bin/python || $(PYTHON3) -m venv $(OLDEST)
	$(OLDEST)/bin/python -m pip install --quiet "torch==2.11.*" torchvision "numpy<2.4"
	rm -rf $(OLDEST)/source && mkdir $(OLDEST)/source
	git ls-files -z | xargs -0 cp --parents --target-directory $(OLDEST)/source
	$(MAKE) -C $(OLDEST)/source pytest VIRTUAL_ENV=$(OLDEST)

docs: $(STAMPS)/docs
	NO_MKDOCS_2_WARNING=1 $(PYTHON) -m mkdocs build --strict

lint: $(STAMPS)/all
	$(PYTHON) -m ruff check .
	$(PYTHON) -m mypy

bench: $(STAMPS)/all
	set -e; for file in benchmarks/*/bench_*.py; do $(PYTHON) $$file $(ARGS); done

bench-gpu: $(STAMPS)/all
	$(PYTHON) benchmarks/measure_gpu.py $(ARGS)

$(STAMPS)/demo: $(SOURCES) | $(PYTHON)
	$(PYTHON) -m pip install --editable ".[vision,onnx,demo]"
	$(KERNELS)
	$(STAMP) $@

$(STAMPS)/all: $(SOURCES) | $(PYTHON)
	$(PYTHON) -m pip install --editable ".[all]"
	$(KERNELS)
	$(STAMP) $@ $(STAMPS)/demo

$(STAMPS)/docs: $(SOURCES) | $(PYTHON)
	$(PYTHON) -m pip install --editable ".[docs]"
	$(STAMP) $@

$(PYTHON):
	$(PYTHON3) -m venv $(VENV)
	$(PYTHON) -m pip install --quiet --upgrade pip

dist: $(PYTHON)
	$(PYTHON) -m pip install --quiet "setuptools>=77"
	$(PYTHON) -m pip wheel --quiet --no-deps --wheel-dir dist .
	$(PYTHON) -c "from setuptools.build_meta import build_sdist; build_sdist('dist')"

clean:
	rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache
