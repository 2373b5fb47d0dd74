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

# the file that `process`, `style`, `render` and `dapt-docx` write; each has a place of its own in data/
export OUT := env("OUT", "")

# what `style` puts at the beginning of every system message
export STYLE := env("STYLE", "")

# the merged model that `merge-test` loads, and what it asks
export MERGED := env("MERGED", "")
export PROMPT := env("PROMPT", "")

# how many ranks `train-distributed` starts
export NPROC := env("NPROC", "")

# the repository that `download-model` fetches
export MODEL := env("MODEL", "")

tunesmith := justfile_directory() / "target/release/tunesmith"

# lists the recipes
@_default:
    "{{ just_executable() }}" --justfile "{{ justfile() }}" --list --unsorted

# builds the binary where its sources have changed
@_build:
    if [ -x "{{ tunesmith }}" ]; then quiet=--quiet; else quiet= && echo "first build: some 340 crates are compiled; allow half an hour on two cores, less on more" >&2; fi; \
    cargo build --release --locked $quiet

# builds tunesmith and says what this machine has and lacks
[group('start here')]
install *ARGS:
    @[ -x "{{ tunesmith }}" ] || echo "first build: some 340 crates are compiled; allow half an hour on two cores, less on more" >&2
    cargo build --release --locked
    @"{{ tunesmith }}" doctor "$@"

# fine-tunes the embedded small model: answers before and after, adapter, report (about two minutes)
[group('start here')]
[no-exit-message]
@quickstart *ARGS: _build
    start=--overwrite; for word; do case $word in --resume* | --overwrite | *resume_from_checkpoint=*) start= ;; esac; done; \
    "{{ tunesmith }}" train examples/quickstart/quickstart.yaml $start "$@"

# runs a small example, under a minute each: just example chat | instruction | tools | dapt | classification | freeze | continue
[group('start here')]
[no-exit-message]
@example NAME *ARGS: _build
    name=$1; shift; adapter=runs/examples/chat/adapter; \
    if [ ! -f "examples/$name/$name.yaml" ]; then \
        names=$(for one in examples/*/; do one=$(basename "$one"); if [ -f "examples/$one/$one.yaml" ]; then printf ' %s' "$one"; fi; done); \
        echo "example: there is no example $name; there are:$names" >&2; exit 2; \
    fi; \
    if [ "$name" = continue ] && [ ! -d "$adapter" ]; then "{{ tunesmith }}" train examples/chat/chat.yaml; fi; \
    "{{ tunesmith }}" train "examples/$name/$name.yaml" --overwrite "$@"

# fine-tunes: just train CONFIG=configs/run_lora.yaml
[group('train')]
[no-exit-message]
@train *ARGS: _build
    "{{ tunesmith }}" train "$@"

# SFT-Play's recipe: QLoRA, `train` with configs/run_bnb.yaml, unless CONFIG=… names another
[group('train')]
[no-exit-message]
@train-bnb *ARGS: _build
    CONFIG=${CONFIG:-configs/run_bnb.yaml} "{{ tunesmith }}" train tuning.mode=qlora tuning.backend=bnb "$@"

# SFT-Play's recipe: QLoRA on long rows, `train` with configs/run_unsloth.yaml, unless CONFIG=… names another
[group('train')]
[no-exit-message]
@train-unsloth *ARGS: _build
    CONFIG=${CONFIG:-configs/run_unsloth.yaml} "{{ tunesmith }}" train tuning.mode=qlora tuning.backend=unsloth "$@"

# goes on with pretraining on raw text: `train` with configs/dapt.yaml, unless CONFIG=… names another
[group('train')]
[no-exit-message]
@dapt-train *ARGS: _build
    CONFIG=${CONFIG:-configs/dapt.yaml} "{{ tunesmith }}" train "$@"

# fine-tunes with several ranks on this machine: just train-distributed CONFIG=… [NPROC=2 | NUM_GPUS=2 | ACCELERATE_CONFIG_FILE=…]
[group('train')]
[no-exit-message]
@train-distributed *ARGS: _build
    scripts/distributed "{{ tunesmith }}" "$@"

# `train-distributed` with TensorBoard beside it, on TB_PORT, stopped afterwards
[group('train')]
[no-exit-message]
@train-distributed-tb *ARGS: _build
    scripts/tensorboard with scripts/distributed "{{ tunesmith }}" "$@"

# the same as DeepSpeed's JSON says: just train-deepspeed CONFIG=… DEEPSPEED_CONFIG=deepspeed/zero2.json NPROC=2
[group('train')]
[no-exit-message]
@train-deepspeed *ARGS: _build
    DEEPSPEED_CONFIG=${DEEPSPEED_CONFIG:-deepspeed/zero2.json} scripts/distributed "{{ tunesmith }}" "$@"

# `train-deepspeed` with TensorBoard beside it
[group('train')]
[no-exit-message]
@train-deepspeed-tb *ARGS: _build
    DEEPSPEED_CONFIG=${DEEPSPEED_CONFIG:-deepspeed/zero2.json} scripts/tensorboard with scripts/distributed "{{ tunesmith }}" "$@"

# writes configs/accelerate/default.yaml for this machine; asks only in a terminal, and nothing with --yes
[group('train')]
[no-exit-message]
@setup-accelerate *ARGS: _build
    "{{ tunesmith }}" setup-accelerate "$@"

# `train` with TensorBoard beside it, on TB_PORT, stopped afterwards
[group('train')]
[no-exit-message]
@train-with-tb *ARGS: _build
    scripts/tensorboard with "{{ tunesmith }}" train "$@"

# `train` with TensorBoard on TB_PORT, which stays until tb-stop
[group('train')]
[no-exit-message]
@train-and-watch *ARGS: _build
    scripts/tensorboard watch "{{ tunesmith }}" train "$@"

# shows TensorBoard for TB_LOGDIR on TB_PORT until Ctrl-C
[group('train')]
[no-exit-message]
@tensorboard *ARGS:
    scripts/tensorboard show "$@"

# removes TensorBoard's event files below TB_LOGDIR
[group('train')]
@tb-clean *ARGS:
    scripts/tensorboard clean "$@"

# says which folder TensorBoard shows, and at which address
[group('train')]
@tb-open *ARGS:
    scripts/tensorboard open "$@"

# stops the TensorBoard of train-and-watch, or one that train-with-tb left behind
[group('train')]
@tb-stop *ARGS:
    scripts/tensorboard stop "$@"

# shows counts, lengths, label shares and rendered rows of a data set
[group('data')]
[no-exit-message]
@data *ARGS: _build
    "{{ tunesmith }}" data "$@"

# makes the folders that the recipes write into: data/raw, processed, processed_with_style, rendered; models; runs
[group('data')]
@setup-dirs:
    mkdir -p data/raw data/processed data/processed_with_style data/rendered models runs

# reads configuration, model description and rows, shows a row and what the run needs, before any training: just check CONFIG=…
[group('data')]
[no-exit-message]
@check *ARGS: _build
    "{{ tunesmith }}" data --rows 1 "$@" && echo && "{{ tunesmith }}" plan "$@" && \
    echo "the configuration and its rows are sound; next: just train CONFIG=…" >&2

# writes the rows that a run would train on, in one form, with a report: just process CONFIG=… [OUT=data/processed/train.jsonl]
[group('data')]
[no-exit-message]
@process *ARGS: _build
    scripts/rows process "{{ tunesmith }}" "$@"

# the same with STYLE at the beginning of every chat's system message: just style CONFIG=… STYLE="Answer in one line."
[group('data')]
[no-exit-message]
@style *ARGS: _build
    scripts/rows style "{{ tunesmith }}" "$@"

# the same as the model sees them, with the token ids and the labels of every row: just render CONFIG=…
[group('data')]
[no-exit-message]
@render *ARGS: _build
    scripts/rows render "{{ tunesmith }}" "$@"

# `process`, `style` and `render` one after the other, into data/: just full-pipeline CONFIG=… [STYLE=…]
[group('data')]
[no-exit-message]
@full-pipeline *ARGS: _build setup-dirs
    scripts/rows pipeline "{{ tunesmith }}" "$@"

# turns documents (DOCX, HTML, Markdown, text) into rows: just dapt-docx papers/ OUT=data/papers.jsonl [model.name=…]
[group('data')]
[no-exit-message]
@dapt-docx *ARGS: _build
    scripts/rows ingest "{{ tunesmith }}" "$@"

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

# loads the merged model and lets it answer: just merge-test CONFIG=… (or MERGED=DIR) [PROMPT=…]
[group('take along')]
[no-exit-message]
@merge-test *ARGS: _build
    scripts/merge-test "{{ tunesmith }}" "$@"

# writes a model for where it will serve: just export CONFIG=… --gguf q8_0 | --hf | --peft
[group('take along')]
[no-exit-message]
@export *ARGS: _build
    "{{ tunesmith }}" export "$@"

# builds the engine that ranks as processes talk through, as a run does that first needs it (g++, Debian's libgloo-dev)
[group('develop')]
@gloo:
    shim/gloo/build

# kills ranks at sixty moments, stops one, cuts a cable; torchrun, Accelerate, Slurm's script; 16 Mi elements with every engine (five minutes; needs root, torchrun and accelerate)
[group('develop')]
rank-test:
    shim/gloo/build
    cargo test --locked --test it -- --include-ignored --nocapture a_rank_killed a_stopped_rank two_machines sixteen_mi torchrun accelerate_launch the_script_for_slurm

# holds every strategy's curve over fifty steps against that of one process (a few minutes)
[group('develop')]
rank-curves:
    shim/gloo/build
    cargo test --locked --test it -- --ignored --nocapture over_fifty_steps

# NCCL on the GPUs of this machine, against a plain oracle
[group('develop')]
gpu-test:
    TUNESMITH_TEST_ENGINE=nccl cargo test --locked --test it -- --ignored --nocapture nccl_alone

# formats every source, those too that cargo fmt does not see because a line of src/registry.rs declares them
[group('develop')]
format:
    find src tests -name '*.rs' -exec rustfmt --edition 2024 {} +

# formatting and lints
[group('develop')]
lint:
    find src tests -name '*.rs' -exec rustfmt --check --edition 2024 {} +
    cargo clippy --all-targets --locked -- -D warnings

# all tests
[group('develop')]
test *ARGS:
    cargo test --locked "$@"

# holds the classification example against the same run in PyTorch, and what it wrote against Transformers and PEFT (scripts/golden/requirements.txt)
[group('develop')]
classify-check *ARGS: _build
    "${PYTHON:-python3}" scripts/classify_check.py --tunesmith "{{ tunesmith }}" "$@"

# kills runs (lora, qlora, two ranks) at every operation on files and 200 times at random, fills and breaks their disks (about an hour)
[group('develop')]
crash-test *ARGS:
    cargo test --locked --test it -- run::crash:: run::power:: --ignored --nocapture --test-threads 1 "$@"

# fuzzes the readers of outside input with libFuzzer, 1,000,000 executions each: just fuzz [TARGET…] (needs a C++ compiler; hours)
[group('develop')]
[no-exit-message]
@fuzz *ARGS:
    scripts/fuzz "$@"

# holds GGUF exports of all families against llama.cpp (needs PYTHON with xllamacpp, cffi, torch, transformers, peft; a few minutes)
[group('develop')]
[no-exit-message]
@gguf-check *ARGS: _build
    "${PYTHON:-python3}" scripts/gguf_check.py --tunesmith "{{ tunesmith }}" "$@"

# holds exported folders and adapters of all families against Transformers and PEFT (needs PYTHON with both; a few minutes)
[group('develop')]
[no-exit-message]
@export-check *ARGS: _build
    "${PYTHON:-python3}" scripts/export_check.py --binary "{{ tunesmith }}" "$@"

# steps of 1, 2 and 4 ranks on this machine, beside what the model of docs/scaling.md says (on a quiet machine)
[group('develop')]
[no-exit-message]
@scaling-check *ARGS: _build
    "{{ tunesmith }}" bench --shape small --mode full --seq 256 --batch 2 --steps 10 --ranks 1,2,4 "$@"
    "{{ tunesmith }}" bench --shape small --mode lora --seq 256 --batch 2 --steps 10 --ranks 1,2,4 "$@"

# training speed, memory and where the time goes: just bench --shape smollm2-135m
[group('develop')]
[no-exit-message]
@bench *ARGS: _build
    "{{ tunesmith }}" bench "$@"

# the architecture guide and the API, with warnings denied
[group('develop')]
doc *ARGS:
    RUSTDOCFLAGS="-D warnings" cargo doc --no-deps --locked "$@"

# draws the guides' pictures again, those with curves from runs of the examples (a minute; needs python3)
[group('develop')]
guide-pictures: _build
    "${PYTHON:-python3}" scripts/guides_svg.py "{{ tunesmith }}" docs/guides

# makes the quickstart's base model again, from scratch (about ten minutes; needs python3 with tokenizers)
[group('develop')]
quickstart-pretrain *ARGS: _build
    mkdir -p .cache/quickstart
    python3 examples/quickstart/make_corpus.py --out .cache/quickstart/corpus.jsonl
    python3 examples/quickstart/make_tokenizer.py --corpus .cache/quickstart/corpus.jsonl --out .cache/quickstart/blank
    "{{ tunesmith }}" train examples/quickstart/pretrain.yaml --overwrite "$@"
    cd runs/quickstart-pretrain/model && cp config.json model.safetensors tokenizer.json tokenizer_config.json "{{ justfile_directory() }}/examples/quickstart/model/"

# builds the same program with files and lines in target/symbols: addr2line -e target/symbols/tunesmith ADDRESS… (for a user's backtrace)
[group('develop')]
debug-info:
    cargo build --profile symbols --locked

# removes what was built and cached; runs/ stays
[group('develop')]
clean:
    cargo clean
    rm -rf .cache

# exactly what continuous integration runs: formatting, lints, tests, docs
[group('develop')]
ci: lint test doc
