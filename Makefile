.PHONY: kernels demo test quick lint bench gpu gpus clean
PYTHON ?= python3
BIN := .venv/bin
# Sources are compiled once, whatever is set outside: tests start many processes.
export PYTHONDONTWRITEBYTECODE :=

# The stamp is new when what it installs changes. editable_mode=compat: a path, not an import hook, so that the package is
# found from a folder beside this one too, where a folder of the same name lies.
.venv/stamp: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
		--config-settings editable_mode=compat -e '.[torch,hf,highs,explore,pictures,parquet,cluster,test,lint]'
	touch $@

# What is not on disk, by two processes side by side. Processes that run beside each other later would each compile it all.
kernels: .venv/stamp
	@echo 'compiling the kernels of the solver and the planner that are not on disk; nothing else is printed meanwhile'
	@$(BIN)/python -c 'import zbsolve.planner.planning as p, zbsolve.search.solver as s; p.compiled(); s.compiled_bounds()' \
		& bounds=$$!; $(BIN)/python -c 'import zbsolve.search.solver as s; s.compiled()' && wait $$bounds

demo: kernels
	$(BIN)/python -m benchmarks demo demo

# Three processes for two cores, a file's tests in one of them: most tests use one core, and some wait for ranks that hang.
# Files in the order that tests/conftest.py gives.
TESTS = HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder

test: kernels
	$(TESTS)

# All tests but those that take seconds each or start processes.
quick: kernels
	$(TESTS) -q -m "not slow"

lint: .venv/stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: kernels
	$(BIN)/python -m benchmarks speed sizes

# What one GPU can show, in less than twelve minutes once all is installed. This needs a CUDA build of torch.
.venv/gpu-stamp: .venv/stamp
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
		--config-settings editable_mode=compat -e '.[cuda]'
	touch $@

gpu: .venv/gpu-stamp kernels
	$(BIN)/python -m benchmarks gpu

# The main job on all GPUs of this machine; its last line says what it found.
gpus: .venv/gpu-stamp kernels
	$(BIN)/python -m benchmarks demo gpus

clean:
	rm -rf .venv build *.egg-info demo
