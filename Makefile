# make demo   installs what is missing, builds, trains a small GPT on this project's own text
# make test   the same, and runs every test
.PHONY: help setup build demo test sweep bench bench-torch golden bless gpu-tools gpu-pack study-paci study-delay study-staleness

SHELL := bash
CARGO ?= cargo
PYTHON ?= python3
TARGET := $(if $(CARGO_TARGET_DIR),$(CARGO_TARGET_DIR),target)
RELEASE := $(TARGET)/release/paceline

help:
	@sed -n 's/^# //p' Makefile

setup:
	@scripts/setup.sh

build: setup
	$(CARGO) build --release --locked

demo: build
	scripts/demo.sh $(RELEASE)

# The same random cases each time: a failure here is the change's. `make sweep` draws new ones.
test: export PROPTEST_RNG_SEED ?= 20261130
test: setup
	scripts/no_llvm.sh
	$(CARGO) test --workspace --locked

# make sweep  the long tests too: many shapes, many mutated specs, and 10,000 random plans run by the interpreter
#             (compiler/plan/tests/sweep.rs, which prints what there were)
sweep: setup
	$(CARGO) test --workspace --locked --release -- --include-ignored --skip ten_thousand_random_specs
	$(CARGO) test --locked --release -p paceline-plan --test root -- --ignored --nocapture ten_thousand_random_specs

# make bench  times check, compile and training of examples/bench-gpt.pace, and the check of a large schedule
bench: build
	scripts/bench.sh $(RELEASE)

# make bench-torch  the same, in turn with PyTorch (PYTHON=... names one with torch and numpy)
bench-torch: build
	scripts/bench.sh $(RELEASE) $(PYTHON)

# make study-paci, study-delay, study-staleness  make the runs of a study that docs/studies lacks, then its plot and page
# (BUDGET=20 begins no run that would end later than that many minutes)
study-paci study-delay study-staleness: study-%: build
	scripts/corpus.sh $(TARGET)/corpus
	$(CARGO) run --release --locked -p paceline-studies -- $* --paceline $(RELEASE) --corpus $(TARGET)/corpus \
	  --scratch $(TARGET)/studies $(if $(BUDGET),--budget-minutes $(BUDGET))

# make golden  rewrites tests/golden (PYTHON=... as above)
golden:
	$(PYTHON) scripts/golden.py

# make gpu-tools  installs NVIDIA's assembler and disassembler, with which the tests look at device code (no GPU is needed)
gpu-tools: .gpu-tools/versions
	.gpu-tools/nvidia/cu13/bin/ptxas --version

.gpu-tools/versions: scripts/gpu-tools.txt
	$(PYTHON) -m pip install --quiet --upgrade --no-deps --require-hashes --target .gpu-tools -r scripts/gpu-tools.txt
	cp scripts/gpu-tools.txt .gpu-tools/versions

# make gpu-pack  makes target/gpu-pack: copy it to a machine with a GPU and run its gpu-check
gpu-pack: build
	$(CARGO) build --release --locked --no-default-features --target-dir $(TARGET)/no-llvm
	scripts/gpu_pack.sh $(RELEASE) $(TARGET)/no-llvm/release/paceline $(TARGET)/gpu-pack

# make bless  accepts changed snapshots; read them with git diff before committing
bless: setup
	INSTA_UPDATE=always $(CARGO) test --workspace --locked
