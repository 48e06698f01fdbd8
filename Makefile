# Everything a newcomer and a machine need: `make demo`, `make test`. Nothing outside this folder
# is touched; what is installed goes into $(VENV).

VENV ?= .venv
PY := $(VENV)/bin/python

# torch 2.13 starts at Python 3.10, and KaMinPar's wheels end at 3.13. DGL's end at 3.11: later ones do
# without it. The first interpreter in range that can make virtual environments is taken;
# PYTHON=/path/to/python3.11 names another.
USABLE := import ensurepip, sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))
PYTHON ?= $(shell for p in python3.11 python3 python3.13 python3.12 python3.10 python; do \
	$$p -c '$(USABLE)' >/dev/null 2>&1 && echo $$p && break; done)

TESTS ?= tests
BENCH ?= list

.PHONY: help python install demo test lint format typecheck docs docs-serve bench clean

help: python
	@echo "make demo       install, then train a distributed GraphSAGE on a generated graph"
	@echo "make test       install, then run the test-suite (TESTS=tests/test_x.py for a part of it)"
	@echo "make lint       check the style (ruff)        make typecheck   check the types (mypy)"
	@echo "make docs       these pages as a site in build/site          make docs-serve  the same, while you edit"
	@echo "make bench      python -m benchmarks; BENCH='run NAME' chooses what"
	@echo "make install    the package in $(VENV)        make clean       remove what was made"

python:
	@if $(or $(PYTHON),false) -c '$(USABLE)' >/dev/null 2>&1; then \
		echo "Python: $(PYTHON)"; \
	else \
		echo "No usable Python found: torch 2.13 needs 3.10, and KaMinPar has wheels up to 3.13."; \
		echo "This machine's python3 is: $$(python3 --version 2>&1)," \
			"$$(python3 -c 'import ensurepip' >/dev/null 2>&1 && echo with || echo without) the venv module."; \
		echo "Install one with its venv module (Debian and Ubuntu: apt install python3-venv; anywhere:"; \
		echo "pyenv install 3.11, conda create -n sar python=3.11), then run make again, or"; \
		echo "name it: make PYTHON=/path/to/python3.11 demo"; \
		exit 1; \
	fi

$(PY):
	@$(MAKE) --no-print-directory python
	$(PYTHON) -m venv $(VENV)

# A stamp for each set of extras: installed again when the lists of requirements change.
$(VENV)/.installed-%: setup.py requirements.txt constraints.txt | $(PY)
	$(PY) -m pip install --disable-pip-version-check -c constraints.txt -e '.[$*]'
	@touch $@

install: $(VENV)/.installed-plot
demo: $(VENV)/.installed-plot
	$(PY) examples/demo.py

# One thread for each process, unless the caller says otherwise: several ranks share the cores.
# As many workers as cores, at most 8: the ranks of a test are threads of one interpreter.
test: export OMP_NUM_THREADS ?= 1
test: $(VENV)/.installed-test
	$(PY) -m pytest --numprocesses auto --maxprocesses 8 --dist worksteal $(TESTS)

lint: $(VENV)/.installed-lint
	$(PY) -m ruff check .

format: $(VENV)/.installed-lint
	$(PY) -m ruff check --fix .

typecheck: $(VENV)/.installed-lint
	$(PY) -m mypy

# Warnings are errors. The variable silences a note on the future of mkdocs.
docs docs-serve: export NO_MKDOCS_2_WARNING := 1
docs: $(VENV)/.installed-docs
	$(PY) -m mkdocs build --strict

docs-serve: $(VENV)/.installed-docs
	$(PY) -m mkdocs serve

bench: $(VENV)/.installed-plot
	$(PY) -m benchmarks $(BENCH)

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
