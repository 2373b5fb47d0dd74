# tunesmith's recipes. `just` alone lists them; `scripts/just` does the same where just is not installed.
#
# A setting can be given in three ways, and all reach the binary:
#   just train CONFIG=configs/run_lora.yaml TRAIN_BATCH_SIZE=1
#   just CONFIG=configs/run_lora.yaml train
#   TRAIN_BATCH_SIZE=1 just train CONFIG=configs/run_lora.yaml

set positional-arguments

# the YAML that the recipes work on
export CONFIG := env("CONFIG", "")

# where TensorBoard listens
export TB_PORT := env("TB_PORT", "6006")

# the folder whose runs TensorBoard shows
export TB_LOGDIR := env("TB_LOGDIR", "runs")

# the file that `process` writes
export OUT := env("OUT", "processed.jsonl")

# the repository that `download-model` fetches
export MODEL := env("MODEL", "")

tunesmith := justfile_directory() / "target/release/tunesmith"

# lists the recipes
@_default:
    "{{ just_executable() }}" --justfile "{{ justfile() }}" --list --unsorted

# builds the binary where its sources have changed
@_build:
    if [ -x "{{ tunesmith }}" ]; then quiet=--quiet; else quiet= && echo "first build: this takes a few minutes" >&2; fi; \
    cargo build --release --locked $quiet

# builds tunesmith and says what this machine has and lacks
[group('start here')]
install *ARGS:
    cargo build --release --locked
    @"{{ tunesmith }}" doctor "$@"

# fine-tunes the embedded small model: answers before and after, adapter, report (about two minutes)
[group('start here')]
[no-exit-message]
@quickstart *ARGS: _build
    start=--overwrite; for word; do case $word in --resume* | --overwrite | *resume_from_checkpoint=*) start= ;; esac; done; \
    "{{ tunesmith }}" train examples/quickstart/quickstart.yaml $start "$@"

# runs a small example, under a minute each: just example chat | instruction | tools | dapt | freeze | continue
[group('start here')]
[no-exit-message]
@example NAME *ARGS: _build
    shift; adapter=runs/examples/chat/adapter; \
    if [ "{{ NAME }}" = continue ] && [ ! -d "$adapter" ]; then "{{ tunesmith }}" train examples/chat/chat.yaml; fi; \
    "{{ tunesmith }}" train "examples/{{ NAME }}/{{ NAME }}.yaml" --overwrite "$@"

# fine-tunes: just train CONFIG=configs/run_lora.yaml
[group('train')]
[no-exit-message]
@train *ARGS: _build
    "{{ tunesmith }}" train "$@"

# fine-tunes with several ranks on this machine: just train-distributed CONFIG=configs/run_lora.yaml NPROC=2
[group('train')]
[no-exit-message]
@train-distributed *ARGS: _build
    nproc=${NPROC:-auto}; left=$#; while [ "$left" -gt 0 ]; do \
        case $1 in NPROC=*) nproc=${1#NPROC=} ;; NUM_GPUS=*) export "$1" ;; *) set -- "$@" "$1" ;; esac; shift; left=$((left - 1)); \
    done; "{{ tunesmith }}" launch --nproc "$nproc" -- train "$@"

# `train` with TensorBoard beside it, on TB_PORT, stopped afterwards
[group('train')]
[no-exit-message]
@train-with-tb *ARGS: _build
    scripts/tensorboard with "{{ tunesmith }}" train "$@"

# shows TensorBoard for TB_LOGDIR on TB_PORT until Ctrl-C
[group('train')]
[no-exit-message]
@tensorboard *ARGS:
    scripts/tensorboard show "$@"

# stops a TensorBoard that train-with-tb left behind
[group('train')]
@tb-stop *ARGS:
    scripts/tensorboard stop "$@"

# shows counts, lengths, label shares and rendered rows of a data set
[group('data')]
[no-exit-message]
@data *ARGS: _build
    "{{ tunesmith }}" data "$@"

# writes the rows that a run would train on, in one form, with a report: just process CONFIG=… OUT=rows.jsonl
[group('data')]
[no-exit-message]
@process *ARGS: _build
    left=$#; while [ "$left" -gt 0 ]; do \
        case $1 in OUT=*) OUT=${1#OUT=} ;; *) set -- "$@" "$1" ;; esac; shift; left=$((left - 1)); \
    done; "{{ tunesmith }}" process --out "$OUT" "$@"

# fetches a model of the hub: just download-model MODEL=owner/name [--revision R] [--dir DIR]; --dataset for rows
[group('data')]
[no-exit-message]
@download-model *ARGS: _build
    "{{ tunesmith }}" download "$@"

# prints every effective setting and where it came from
[group('data')]
[no-exit-message]
@config *ARGS: _build
    "{{ tunesmith }}" config "$@"

# shows what a run needs on each rank, what fits, and how long it takes: just plan CONFIG=… [--gpus 2 --vram 24GiB]
[group('data')]
[no-exit-message]
@plan *ARGS: _build
    "{{ tunesmith }}" plan "$@"

# shows memory in use on each device; with CONFIG=… what its largest pass holds
[group('train')]
[no-exit-message]
@memory-check *ARGS: _build
    "{{ tunesmith }}" memory-check "$@"

# shows GPUs, driver, CUDA, NCCL and links; the processor's cores, memory and measured rates
[group('train')]
[no-exit-message]
@gpu-info *ARGS: _build
    "{{ tunesmith }}" gpu-info "$@"

# turns a configuration of Axolotl, LLaMA-Factory or SFT-Play into ours: just import their.yaml --out ours.yaml
[group('data')]
[no-exit-message]
@import *ARGS: _build
    "{{ tunesmith }}" import "$@"

# answers a prompt: just infer CONFIG=configs/run_lora.yaml --prompt "…"
[group('ask')]
[no-exit-message]
@infer *ARGS: _build
    "{{ tunesmith }}" infer "$@"

# answers a file of prompts: just infer-batch CONFIG=… --in questions.jsonl --out answers.jsonl
[group('ask')]
[no-exit-message]
@infer-batch *ARGS: _build
    "{{ tunesmith }}" infer "$@"

# talks with a model in the terminal: just chat CONFIG=configs/run_lora.yaml
[group('ask')]
[no-exit-message]
@chat *ARGS: _build
    "{{ tunesmith }}" chat "$@"

# asks the base and the run's result the held-out rows: just eval CONFIG=configs/run_lora.yaml [--rows N] [--checkpoint DIR] [--compare A B]
[group('evaluate')]
[no-exit-message]
@eval *ARGS: _build
    "{{ tunesmith }}" eval "$@"

# the same on the validation rows
[group('evaluate')]
[no-exit-message]
@eval-val *ARGS: _build
    "{{ tunesmith }}" eval --split val "$@"

# the same on the test rows
[group('evaluate')]
[no-exit-message]
@eval-test *ARGS: _build
    "{{ tunesmith }}" eval --split test "$@"

# the same on the first 200 rows
[group('evaluate')]
[no-exit-message]
@eval-quick *ARGS: _build
    "{{ tunesmith }}" eval --rows 200 "$@"

# the same on all held-out rows
[group('evaluate')]
[no-exit-message]
@eval-full *ARGS: _build
    "{{ tunesmith }}" eval "$@"

# merges a run's adapter into its base: just merge CONFIG=…; or --base DIR --adapter DIR --output DIR
[group('take along')]
[no-exit-message]
@merge *ARGS: _build
    "{{ tunesmith }}" merge "$@"

# the same, written in bfloat16
[group('take along')]
[no-exit-message]
@merge-bf16 *ARGS: _build
    "{{ tunesmith }}" merge --dtype bfloat16 "$@"

# writes a model for where it will serve: just export CONFIG=… --gguf q8_0 | --hf | --peft
[group('take along')]
[no-exit-message]
@export *ARGS: _build
    "{{ tunesmith }}" export "$@"

# builds the engine that ranks as processes talk through (needs a C++ compiler and Debian's libgloo-dev)
[group('develop')]
@gloo:
    shim/gloo/build

# kills ranks at fifty moments, and reduces 16 Mi elements with every engine (about five minutes)
[group('develop')]
rank-test:
    shim/gloo/build
    cargo test --locked --test it -- --ignored --nocapture a_rank_killed sixteen_mi

# NCCL on the GPUs of this machine, against a plain oracle
[group('develop')]
gpu-test:
    TUNESMITH_TEST_ENGINE=nccl cargo test --locked --test it -- --ignored --nocapture nccl_alone

# formatting and lints
[group('develop')]
check:
    cargo fmt --check
    cargo clippy --all-targets --locked -- -D warnings

# all tests
[group('develop')]
test *ARGS:
    cargo test --locked "$@"

# kills runs at every operation on files and 200 times at random, fills and breaks their disks (about 20 minutes)
[group('develop')]
crash-test *ARGS:
    cargo test --locked --test it run::crash:: -- --ignored --nocapture --test-threads 1 "$@"

# holds GGUF exports of twelve families against llama.cpp (needs PYTHON with cyllama, gguf, torch, transformers, peft; a few minutes)
[group('develop')]
[no-exit-message]
@gguf-check *ARGS: _build
    "${PYTHON:-python3}" scripts/gguf_check.py --tunesmith "{{ tunesmith }}" "$@"

# holds exported folders and adapters of all families against Transformers and PEFT (needs PYTHON with both; a few minutes)
[group('develop')]
[no-exit-message]
@export-check *ARGS: _build
    "${PYTHON:-python3}" scripts/export_check.py --binary "{{ tunesmith }}" "$@"

# training speed, memory and where the time goes: just bench --shape smollm2-135m
[group('develop')]
[no-exit-message]
@bench *ARGS: _build
    "{{ tunesmith }}" bench "$@"

# the architecture guide and the API, with warnings denied
[group('develop')]
doc *ARGS:
    RUSTDOCFLAGS="-D warnings" cargo doc --no-deps --locked "$@"

# makes the quickstart's base model again, from scratch (about ten minutes; needs python3 with tokenizers)
[group('develop')]
quickstart-pretrain *ARGS: _build
    mkdir -p .cache/quickstart
    python3 examples/quickstart/make_corpus.py --out .cache/quickstart/corpus.jsonl
    python3 examples/quickstart/make_tokenizer.py --corpus .cache/quickstart/corpus.jsonl --out .cache/quickstart/blank
    "{{ tunesmith }}" train examples/quickstart/pretrain.yaml --overwrite "$@"
    cd runs/quickstart-pretrain/model && cp config.json model.safetensors tokenizer.json tokenizer_config.json "{{ justfile_directory() }}/examples/quickstart/model/"

# removes what was built and cached; runs/ stays
[group('develop')]
clean:
    cargo clean
    rm -rf .cache

# exactly what continuous integration runs: formatting, lints, tests, docs
[group('develop')]
ci: check test doc
