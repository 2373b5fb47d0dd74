# tunesmith's recipes. `just` alone lists them. Without just installed, use `scripts/just`.
#
# There are three ways to set a value:
#   just train CONFIG=configs/run_lora.yaml TRAIN_BATCH_SIZE=1
#   just CONFIG=configs/run_lora.yaml train
#   TRAIN_BATCH_SIZE=1 just train CONFIG=configs/run_lora.yaml
#
# After Ctrl-C, a run saves, prints the command that continues, and exits with 75; `just` then exits with 130.

set positional-arguments

# the configuration that the recipes use
export CONFIG := env("CONFIG", "")

# the port of TensorBoard
export TB_PORT := env("TB_PORT", "6006")

# the folder of runs that TensorBoard shows
export TB_LOGDIR := env("TB_LOGDIR", "runs")

# the output file of `process`, `style`, `render` and `dapt-docx`; each has its own default in data/
export OUT := env("OUT", "")

# the text that `style` puts at the start of every system message
export STYLE := env("STYLE", "")

# the merged model that `merge-test` loads, and its prompt
export MERGED := env("MERGED", "")
export PROMPT := env("PROMPT", "")

# the number of ranks that `train-distributed` starts
export NPROC := env("NPROC", "")

# the repository that `download-model` downloads
export MODEL := env("MODEL", "")

# the folder of builds: cargo's own variables for it hold here too
target := env("CARGO_TARGET_DIR", env("CARGO_BUILD_TARGET_DIR", justfile_directory() / "target"))
tunesmith := target / "release/tunesmith"

# list the recipes
@_default:
    "{{ just_executable() }}" --justfile "{{ justfile() }}" --list --unsorted

# builds the program if its sources have changed
@_build:
    if [ -x "{{ tunesmith }}" ]; then quiet=--quiet; else quiet= && echo "first build: some 240 crates are compiled, which takes 6 to 15 minutes on two cores" >&2; fi; \
    cargo build --release --locked --target-dir "{{ target }}" $quiet

# build tunesmith, and show what this machine has and lacks
[group('start here')]
install *ARGS:
    @[ -x "{{ tunesmith }}" ] || echo "first build: some 240 crates are compiled, which takes 6 to 15 minutes on two cores" >&2
    cargo build --release --locked --target-dir "{{ target }}"
    @"{{ tunesmith }}" doctor "$@"

# show what this machine has and lacks
[group('start here')]
[no-exit-message]
@doctor *ARGS: _build
    "{{ tunesmith }}" doctor "$@"

# fine-tune the small embedded model: generations before and after, an adapter, a report (about two minutes)
[group('start here')]
[no-exit-message]
@quickstart *ARGS: _build
    start=--overwrite; for word; do case $word in --resume* | --overwrite | *resume_from_checkpoint=*) start= ;; esac; done; \
    "{{ tunesmith }}" train examples/quickstart/quickstart.yaml $start "$@"

# run a small example, two minutes at most: just example chat | instruction | tools | dapt | classification | freeze | continue | caption
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

# fine-tune a model: just train CONFIG=configs/run_lora.yaml
[group('train')]
[no-exit-message]
@train *ARGS: _build
    "{{ tunesmith }}" train "$@"

# fine-tune with QLoRA, as SFT-Play's recipe: uses configs/run_bnb.yaml unless CONFIG=… is given
[group('train')]
[no-exit-message]
@train-bnb *ARGS: _build
    CONFIG=${CONFIG:-configs/run_bnb.yaml} "{{ tunesmith }}" train tuning.mode=qlora tuning.backend=bnb "$@"

# fine-tune with QLoRA on long rows, as SFT-Play's recipe: uses configs/run_unsloth.yaml unless CONFIG=… is given
[group('train')]
[no-exit-message]
@train-unsloth *ARGS: _build
    CONFIG=${CONFIG:-configs/run_unsloth.yaml} "{{ tunesmith }}" train tuning.mode=qlora tuning.backend=unsloth "$@"

# continue pretraining on raw text: uses configs/dapt.yaml unless CONFIG=… is given
[group('train')]
[no-exit-message]
@dapt-train *ARGS: _build
    CONFIG=${CONFIG:-configs/dapt.yaml} "{{ tunesmith }}" train "$@"

# fine-tune with several ranks on this machine: just train-distributed CONFIG=… [NPROC=2 | NUM_GPUS=2 | ACCELERATE_CONFIG_FILE=…]
[group('train')]
[no-exit-message]
@train-distributed *ARGS: _build
    scripts/distributed "{{ tunesmith }}" "$@"

# like train-distributed, with TensorBoard on TB_PORT while it runs
[group('train')]
[no-exit-message]
@train-distributed-tb *ARGS: _build
    scripts/tensorboard with scripts/distributed "{{ tunesmith }}" "$@"

# fine-tune with several ranks and the settings of a DeepSpeed file: just train-deepspeed CONFIG=… DEEPSPEED_CONFIG=deepspeed/zero2.json NPROC=2
[group('train')]
[no-exit-message]
@train-deepspeed *ARGS: _build
    DEEPSPEED_CONFIG=${DEEPSPEED_CONFIG:-deepspeed/zero2.json} scripts/distributed "{{ tunesmith }}" "$@"

# like train-deepspeed, with TensorBoard on TB_PORT while it runs
[group('train')]
[no-exit-message]
@train-deepspeed-tb *ARGS: _build
    DEEPSPEED_CONFIG=${DEEPSPEED_CONFIG:-deepspeed/zero2.json} scripts/tensorboard with scripts/distributed "{{ tunesmith }}" "$@"

# write configs/accelerate/default.yaml for this machine; asks questions only in a terminal, and none with --yes
[group('train')]
[no-exit-message]
@setup-accelerate *ARGS: _build
    "{{ tunesmith }}" setup-accelerate "$@"

# like train, with TensorBoard on TB_PORT while it runs
[group('train')]
[no-exit-message]
@train-with-tb *ARGS: _build
    scripts/tensorboard with "{{ tunesmith }}" train "$@"

# like train, with TensorBoard on TB_PORT until you run tb-stop
[group('train')]
[no-exit-message]
@train-and-watch *ARGS: _build
    scripts/tensorboard watch "{{ tunesmith }}" train "$@"

# show the runs in TB_LOGDIR with TensorBoard on TB_PORT, until Ctrl-C: just tensorboard [FOLDER | --help]
[group('train')]
[no-exit-message]
@tensorboard *ARGS:
    scripts/tensorboard show "$@"

# delete TensorBoard's event files below TB_LOGDIR
[group('train')]
@tb-clean *ARGS:
    scripts/tensorboard clean "$@"

# print TensorBoard's folder and, if it runs, its address
[group('train')]
@tb-open *ARGS:
    scripts/tensorboard open "$@"

# stop the TensorBoard that train-and-watch started, or that train-with-tb left running
[group('train')]
@tb-stop *ARGS:
    scripts/tensorboard stop "$@"

# show counts, lengths, label shares and rendered rows of the data
[group('data')]
[no-exit-message]
@data *ARGS: _build
    "{{ tunesmith }}" data "$@"

# create the folders that recipes write into: data/{raw,processed,processed_with_style,rendered}, models, runs
[group('data')]
@setup-dirs:
    mkdir -p data/raw data/processed data/processed_with_style data/rendered models runs

# check configuration, model and rows before training, and show a row and the memory needed: just check CONFIG=…
[group('data')]
[no-exit-message]
@check *ARGS: _build
    "{{ tunesmith }}" data --rows 1 "$@" && echo && "{{ tunesmith }}" plan "$@" && \
    echo "the configuration and its rows are sound; next: just train CONFIG=…" >&2

# write the training rows to a file, in one form, with a report: just process CONFIG=… [OUT=data/processed/train.jsonl]
[group('data')]
[no-exit-message]
@process *ARGS: _build
    scripts/rows process "{{ tunesmith }}" "$@"

# like process, with STYLE at the start of every system message: just style CONFIG=… STYLE="Answer in one line."
[group('data')]
[no-exit-message]
@style *ARGS: _build
    scripts/rows style "{{ tunesmith }}" "$@"

# like process, with each row as text, token ids and labels: just render CONFIG=…
[group('data')]
[no-exit-message]
@render *ARGS: _build
    scripts/rows render "{{ tunesmith }}" "$@"

# run process, style and render, into data/: just full-pipeline CONFIG=… [STYLE=…]
[group('data')]
[no-exit-message]
@full-pipeline *ARGS: _build setup-dirs
    scripts/rows pipeline "{{ tunesmith }}" "$@"

# turn documents (DOCX, HTML, Markdown, text) into rows: just dapt-docx papers/ OUT=data/papers.jsonl [model.name=…]
[group('data')]
[no-exit-message]
@dapt-docx *ARGS: _build
    scripts/rows ingest "{{ tunesmith }}" "$@"

# list the model families, or describe a folder: just models examples/quickstart/model
[group('data')]
[no-exit-message]
@models *ARGS: _build
    "{{ tunesmith }}" models "$@"

# run a frozen image encoder ahead of training: just encode CONFIG=examples/caption/caption.yaml
[group('data')]
[no-exit-message]
@encode *ARGS: _build
    "{{ tunesmith }}" encode "$@"

# download a model from the hub: just download-model MODEL=owner/name [--revision R] [--dir DIR]; --dataset for data sets
[group('data')]
[no-exit-message]
@download-model *ARGS: _build
    "{{ tunesmith }}" download "$@"

# show every effective setting and its source
[group('data')]
[no-exit-message]
@config *ARGS: _build
    "{{ tunesmith }}" config "$@"

# predict memory per rank, what fits, and the time: just plan CONFIG=… [--gpus 2 --vram 24GiB]
[group('data')]
[no-exit-message]
@plan *ARGS: _build
    "{{ tunesmith }}" plan "$@"

# show memory in use per device; with CONFIG=… also measure its largest step
[group('train')]
[no-exit-message]
@memory-check *ARGS: _build
    "{{ tunesmith }}" memory-check "$@"

# show GPUs, driver, CUDA, NCCL and links, and the processor's cores, memory and measured rates
[group('train')]
[no-exit-message]
@gpu-info *ARGS: _build
    "{{ tunesmith }}" gpu-info "$@"

# convert a configuration of Axolotl, LLaMA-Factory, ms-swift, SFT-Play or TRL: just import their.yaml --out ours.yaml
[group('data')]
[no-exit-message]
@import *ARGS: _build
    "{{ tunesmith }}" import "$@"

# generate for a prompt: just infer CONFIG=configs/run_lora.yaml --prompt "…"
[group('ask')]
[no-exit-message]
@infer *ARGS: _build
    "{{ tunesmith }}" infer "$@"

# generate for a file of prompts: just infer-batch CONFIG=… --in questions.jsonl --out answers.jsonl
[group('ask')]
[no-exit-message]
@infer-batch *ARGS: _build
    "{{ tunesmith }}" infer "$@"

# chat with a model in the terminal: just chat CONFIG=configs/run_lora.yaml
[group('ask')]
[no-exit-message]
@chat *ARGS: _build
    "{{ tunesmith }}" chat "$@"

# compare the result with its base on held-out rows: just eval CONFIG=configs/run_lora.yaml [--rows N] [--checkpoint DIR] [--compare A B]
[group('evaluate')]
[no-exit-message]
@eval *ARGS: _build
    "{{ tunesmith }}" eval "$@"

# like eval, on the validation rows
[group('evaluate')]
[no-exit-message]
@eval-val *ARGS: _build
    "{{ tunesmith }}" eval --split val "$@"

# like eval, on the test rows
[group('evaluate')]
[no-exit-message]
@eval-test *ARGS: _build
    "{{ tunesmith }}" eval --split test "$@"

# like eval, on the first 200 rows
[group('evaluate')]
[no-exit-message]
@eval-quick *ARGS: _build
    "{{ tunesmith }}" eval --rows 200 "$@"

# like eval, on all held-out rows
[group('evaluate')]
[no-exit-message]
@eval-full *ARGS: _build
    "{{ tunesmith }}" eval "$@"

# merge a run's adapter into its base: just merge CONFIG=…; or --base DIR --adapter DIR --output DIR
[group('serve elsewhere')]
[no-exit-message]
@merge *ARGS: _build
    "{{ tunesmith }}" merge "$@"

# like merge, in bfloat16
[group('serve elsewhere')]
[no-exit-message]
@merge-bf16 *ARGS: _build
    "{{ tunesmith }}" merge --dtype bfloat16 "$@"

# load the merged model and generate for a prompt: just merge-test CONFIG=… (or MERGED=DIR) [PROMPT=…]
[group('serve elsewhere')]
[no-exit-message]
@merge-test *ARGS: _build
    scripts/merge-test "{{ tunesmith }}" "$@"

# write a model for llama.cpp, Transformers or PEFT: just export CONFIG=… --gguf q8_0 | --hf | --peft
[group('serve elsewhere')]
[no-exit-message]
@export *ARGS: _build
    "{{ tunesmith }}" export "$@"

# build the Gloo adapter, as the first run with several processes does (needs g++ and libgloo-dev)
[group('develop')]
@gloo:
    shim/gloo/build

# test ranks: kills, hangs, network cuts, torchrun, Accelerate, Slurm's script, large messages (five minutes; needs root, torchrun and accelerate)
[group('develop')]
rank-test:
    shim/gloo/build
    cargo test --locked --test it -- --include-ignored --nocapture a_rank_killed a_stopped_rank two_machines sixteen_mi torchrun accelerate_launch the_script_for_slurm

# compare every strategy's loss curve over fifty steps with one process (a few minutes)
[group('develop')]
rank-curves:
    shim/gloo/build
    cargo test --locked --test it -- --ignored --nocapture over_fifty_steps

# every key of every golden family's config.json changed, all variants, against Transformers (minutes)
[group('develop')]
config-variants:
    TUNESMITH_ALL_VARIANTS=1 cargo test --locked --test it -- --nocapture config::variants

# format every source, also modules declared by macros, which cargo fmt does not see
[group('develop')]
format:
    find src crates tests fuzz -name '*.rs' -exec rustfmt --edition 2024 {} +

# check formatting and lints
[group('develop')]
lint:
    find src crates tests fuzz -name '*.rs' -exec rustfmt --check --edition 2024 {} +
    cargo clippy --all-targets --locked -- -D warnings

# One thread more than processors: some tests wait for programs that they start, or for each other.

# run the tests: just test [FILTER…]
[group('develop')]
test *ARGS: _cxx
    RUST_TEST_THREADS="${RUST_TEST_THREADS:-$(({{ num_cpus() }} + 1))}" cargo test --locked "$@"

# the tests compile a stand-in for GPUs
_cxx:
    @command -v "${CXX:-g++}" >/dev/null || { [ "$(id -u)" = 0 ] && apt-get install -y g++; } || { echo "the tests need g++: apt-get install g++"; exit 1; }

# compare the classification example with PyTorch, Transformers and PEFT (needs scripts/golden/requirements.txt)
[group('develop')]
classify-check *ARGS: _build
    "${PYTHON:-python3}" scripts/classify_check.py --tunesmith "{{ tunesmith }}" "$@"

# kill runs at every file operation and 200 times at random; full and failing disks, quotas, simulated power loss (about an hour)
[group('develop')]
crash-test *ARGS:
    cargo test --locked --test it -- run::crash:: run::power:: --ignored --nocapture --test-threads 1 "$@"

# check the GPU's kernels without a GPU: NVIDIA's compiler, threads in other orders, AddressSanitizer, ThreadSanitizer (some minutes; needs g++ and python3)
[group('develop')]
[no-exit-message]
@kernel-check:
    scripts/kernel-check

# test operations, golden models, and NCCL on this machine's GPUs
[group('develop')]
gpu-test:
    TUNESMITH_TEST_GPU=1 cargo test --locked -p tunesmith-ops --lib
    TUNESMITH_TEST_GPU=1 cargo test --locked --test it cuda:: -- --include-ignored
    TUNESMITH_TEST_ENGINE=nccl cargo test --locked --test it -- --ignored --nocapture nccl_alone

# on a stand-in for a GPU: refuse every allocation, let every call fail, compare every family's memory with its plan (about an hour; needs g++)
[group('develop')]
gpu-faults *ARGS: _cxx
    cargo test --locked --test it -- gpu_faults:: gpu_memory:: --ignored --nocapture --test-threads 1 "$@"

# on a stand-in for a GPU: mean losses over 200 steps in float32, bfloat16 and FP8 (minutes; needs g++)
[group('develop')]
gpu-precision: _cxx
    cargo test --locked --test it -- on_a_gpu_over_200_steps --ignored --nocapture

# compare the quickstart's loss curve over 200 steps in float32 and with train.bf16, on the CPU (a minute)
[group('develop')]
precision: _cxx
    cargo test --locked --test it -- on_the_cpu_over_200_steps --ignored --nocapture

# test operations as a program for ARM, under emulation (half an hour; needs qemu-user, g++-aarch64-linux-gnu, and Rust's library for that target)
[group('develop')]
[no-exit-message]
@arm-check *ARGS:
    scripts/arm-check "$@"

# test and measure this machine's GPU, part by part, into target/gpu-report: just gpu-report [libraries tests goldens precision kernels lora …]
[group('develop')]
[no-exit-message]
@gpu-report *ARGS:
    scripts/gpu-report "$@"

# fuzz the readers of outside input with libFuzzer, 1,000,000 executions each: just fuzz [TARGET… | --list] (hours; needs a C++ compiler)
[group('develop')]
[no-exit-message]
@fuzz *ARGS:
    scripts/fuzz "$@"

# compare GGUF exports of all families with llama.cpp (a few minutes; needs PYTHON with llama-cpp-python, torch, transformers, peft)
[group('develop')]
[no-exit-message]
@gguf-check *ARGS: _build
    "${PYTHON:-python3}" scripts/gguf_check.py --tunesmith "{{ tunesmith }}" "$@"

# compare exported image encoders with llama.cpp and Transformers (a minute; needs PYTHON with llama-cpp-python, torch, transformers, peft; --libmtmd)
[group('develop')]
[no-exit-message]
@mmproj-check *ARGS: _build
    "${PYTHON:-python3}" scripts/mmproj_check.py --tunesmith "{{ tunesmith }}" "$@"

# compare exported folders and adapters of all families with Transformers and PEFT (a few minutes; needs PYTHON with both)
[group('develop')]
[no-exit-message]
@export-check *ARGS: _build
    "${PYTHON:-python3}" scripts/export_check.py --binary "{{ tunesmith }}" "$@"

# compare adapters of multimodal models, loaded by PEFT and shown images by the checkpoint's processor (some minutes; needs PYTHON with torch, torchvision, transformers, peft, num2words)
[group('develop')]
[no-exit-message]
@vision-peft-check *ARGS: _build
    "${PYTHON:-python3}" scripts/vision_peft_check.py --binary "{{ tunesmith }}" "$@"

# compare models with image encoders, loaded by scripts/load_vision.py, with tunesmith (some minutes; needs PYTHON with torch, transformers, peft, diffusers)
[group('develop')]
[no-exit-message]
@load-check *ARGS: _build
    "${PYTHON:-python3}" scripts/load_check.py --binary "{{ tunesmith }}" "$@"

# compare 1, 2 and 4 ranks on this machine with the prediction of docs/scaling.md (on an idle machine)
[group('develop')]
[no-exit-message]
@scaling-check *ARGS: _build
    "{{ tunesmith }}" bench --shape small --mode full --seq 256 --batch 2 --steps 10 --ranks 1,2,4 "$@"
    "{{ tunesmith }}" bench --shape small --mode lora --seq 256 --batch 2 --steps 10 --ranks 1,2,4 "$@"

# measure training speed, memory, and the time of each phase: just bench --shape smollm2-135m
[group('develop')]
[no-exit-message]
@bench *ARGS: _build
    "{{ tunesmith }}" bench "$@"

# build the API documentation, with warnings denied
[group('develop')]
doc *ARGS:
    RUSTDOCFLAGS="-D warnings" cargo doc --no-deps --locked "$@"

# redraw the figures in docs/guides from runs of the examples (a minute; needs python3)
[group('develop')]
guide-pictures: _build
    "${PYTHON:-python3}" scripts/guides_svg.py "{{ tunesmith }}" docs/guides

# train the quickstart's base model again from scratch (about ten minutes; needs python3 with tokenizers)
[group('develop')]
quickstart-pretrain *ARGS: _build
    mkdir -p .cache/quickstart
    python3 examples/quickstart/make_corpus.py --out .cache/quickstart/corpus.jsonl
    python3 examples/quickstart/make_tokenizer.py --corpus .cache/quickstart/corpus.jsonl --out .cache/quickstart/blank
    "{{ tunesmith }}" train examples/quickstart/pretrain.yaml --overwrite "$@"
    cd runs/quickstart-pretrain/model && cp config.json model.safetensors tokenizer.json tokenizer_config.json "{{ justfile_directory() }}/examples/quickstart/model/"

# make the caption example's image encoder again: draw 12,000 images, and train a random encoder on them (half an hour)
[group('develop')]
caption-pretrain *ARGS: _build
    python3 examples/caption/make_pictures.py .cache/caption --train 12000 --held-out 100 --plain
    python3 examples/caption/make_encoder.py blank .cache/caption/blank
    "{{ tunesmith }}" train examples/caption/pretrain.yaml --overwrite "$@"
    python3 examples/caption/make_encoder.py take runs/caption-pretrain/adapter examples/caption/encoder

# build with line numbers, to read a user's backtrace: addr2line -e target/symbols/tunesmith ADDRESS…
[group('develop')]
debug-info:
    cargo build --profile symbols --locked

# remove builds and caches; runs/ stays
[group('develop')]
clean:
    cargo clean
    rm -rf .cache

# run exactly what continuous integration runs: formatting, lints, tests, docs
[group('develop')]
ci: lint test doc
