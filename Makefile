# Two commands for everyone: `make demo` and `make test`. Each makes .venv first when it is missing or stale.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
unexport PYTHONDONTWRITEBYTECODE  # which containers set: two hundred processes of the tests would compile all anew
JOBS ?= 2
# Of every folder the tests that take the least time for what they check; those of formulas and settings first.
QUICK := tests/activation/test_checkpoint.py tests/bank/test_cards.py tests/bank/test_progress.py tests/bench/test_table.py tests/cli/test_main.py \
  tests/comm/test_collectives.py tests/comm/test_mesh.py tests/compress/test_papers.py tests/course \
  tests/deepspeed/test_names.py tests/deepspeed/test_parameters.py $(filter-out %mutations.py,$(wildcard tests/engine/test_config*.py)) \
  tests/checkpoint/test_tree.py tests/checkpoint/test_tensors.py tests/checkpoint/test_sampler.py \
  tests/gpu/test_check.py::test_the_twins_themselves_do_not_race tests/grading/test_compare.py tests/grading/test_stubs.py tests/kernels/test_rms_norm.py tests/measure tests/offload/test_blocks.py tests/offload/test_pipeline.py \
  tests/model tests/notebook/test_show.py tests/optim tests/parallel/test_conjugates.py tests/plan/test_formulas.py tests/plan/test_public.py tests/plan/test_time.py tests/plan/test_transformer.py $(filter-out %server.py %pickle.py %folder.py %silence.py,$(wildcard tests/ranks/test_*.py)) tests/site/test_pages.py \
  tests/zero/test_flat.py tests/zero/test_stages.py::test_fp32_equals_one_process_bit_for_bit \
  tests/test_contributing.py tests/test_mutants.py::test_every_chapter_is_complete

.PHONY: help install demo test quick lint gpu-check lab grade notebooks new-lesson site serve clean

help:
	@echo "make demo        install what is missing, then train one model by DDP and ZeRO-1, 2, 3 (about 2 minutes)"
	@echo "make test        install what is missing, then run every check"
	@echo "make quick       ruff, mypy and some tests of every folder, while you work (under 90 seconds)"
	@echo "make lint        ruff and mypy alone"
	@echo "make gpu-check   on a machine with a GPU: what only a GPU can show, in 9 minutes, into out/gpu/; installs nothing"
	@echo "make lab         open the course in JupyterLab, with the whole project beside it"
	@echo "make grade       grade the exercises you wrote; one chapter: make grade ARGS='-k 01_collectives'"
	@echo "make site        build the study site into site/"
	@echo "make serve       show the study site at http://127.0.0.1:8000 and rebuild it when a file changes"
	@echo "make notebooks   run every chapter and write its notebook; ARGS=--fresh measures timed cells anew"
	@echo "make new-lesson NAME=17_name  lay out a new chapter with an exercise and its grader"
	@echo "make clean       remove .venv and out/"

install: $(STAMP)

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
	  { echo "error: Python 3.11 or newer is needed, $(PYTHON) is `$(PYTHON) --version 2>&1`. Try: make $(MAKECMDGOALS) PYTHON=python3.12"; exit 2; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || \
	  { echo "error: $(PYTHON) has no venv module. Install it (Debian, Ubuntu: apt install python3-venv) and run make again"; exit 2; }
	@echo "Installing into $(VENV) (about 3 minutes, once) ..."
	@$(PYTHON) -m venv $(VENV) || { echo "error: could not create $(VENV): see the line above, then run make again"; exit 2; }
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --retries 5 -e '.[dev]' > $(VENV)/install.log 2>&1 || \
	  { tail -5 $(VENV)/install.log; echo "error: the installation failed; $(VENV)/install.log has it all. Check the network and disk space, then run make again"; exit 2; }
	@$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib/python*/site-packages || true  # on every core, where pip uses one; what is for another Python (a file of torch) fails, here as there
	@touch $@

demo: $(STAMP)
	@$(BIN)/refimpl demo $(ARGS)

test: $(STAMP) lint
	@echo "Tests, then every chapter's notebook once more: 20 to 45 minutes on two cores, by their speed."
	$(BIN)/python -m pytest -rs -n $(JOBS) --dist loadgroup $(ARGS)
	$(BIN)/python -m pytest --nbval --nbval-current-env --nbval-cell-timeout 120 \
	  --nbval-sanitize-with course/nbval.cfg -n $$(($(JOBS) + 1)) --dist loadfile course  # one more: kernels wait for each other's ranks

quick: $(STAMP) lint
	$(BIN)/python -m pytest -n $(JOBS) --dist loadgroup $(QUICK) $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# With the Python that has the GPU's torch, which a .venv of ours need not have: nothing is installed.
gpu-check:
	@$(PYTHON) -c 'import sys; from importlib.util import find_spec as has; sys.exit(not (has("numpy") and has("torch")))' || { echo "error: $(PYTHON) lacks torch, or numpy, which torch.distributed sends objects by. Try: make gpu-check PYTHON=.venv/bin/python (make demo makes it), or another Python that has torch for CUDA; if numpy alone is missing: $(PYTHON) -m pip install numpy pytest"; exit 2; }
	@$(PYTHON) -m refimpl.gpu $(ARGS)

lab: $(STAMP)
	$(BIN)/jupyter lab --LabApp.default_url=/lab/tree/course/00_start.ipynb $(ARGS)

grade: $(STAMP)
	@$(BIN)/python -m pytest exercises $(ARGS)

notebooks: $(STAMP)
	$(BIN)/python -m refimpl.notebook.execute $(ARGS) course/[0-9]*.py

new-lesson: $(STAMP)
	@$(BIN)/python -m refimpl.grading.new_lesson '$(NAME)'

site: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict $(ARGS)

serve: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve --strict $(ARGS)

clean:
	rm -rf $(VENV) out
