//! The lists of optimizers, schedules, kinds of adapters, model families, file formats and row forms. To add
//! one, write a file with the module's name and add a line here. The module, the word of the configuration, its enum,
//! the documentation and the JSON schema follow from the line.
//!
//! Each list is a macro that passes its lines to another macro, which the layer that uses the list defines.

/// `train.optim`: `Name = module, "word" | "other word", "What it is.";`, in `crates/optim/src/`. `Name` is a type in
/// the module, an `optim::UpdateRule`. `, averages` marks those that average instead of following a schedule.
#[macro_export]
macro_rules! optimizers {
    ($then:path) => {
        $then! {
            AdamW = adamw, "adamw_torch" | "adamw" | "adamw_torch_fused" | "paged_adamw" | "paged_adamw_32bit", "`AdamW`, as PyTorch does it.";
            Sgd = sgd, "sgd", "Gradient descent (`momentum`: 0, `dampening`: 0, `nesterov`: false).";
            Adafactor = adafactor, "adafactor", "Adafactor: second moments by row and column (`clip_threshold`: 1, `decay_rate`: -0.8, `beta1`: none, `scale_parameter`: false).";
            Lion = lion, "lion" | "lion_32bit" | "paged_lion_32bit", "Lion: the sign of a momentum; needs a rate about 3 to 10 times lower than `AdamW`'s, and `adam_beta2: 0.99`.";
            AdamW8bit = adamw_8bit, "adamw_8bit" | "adamw_bnb_8bit" | "paged_adamw_8bit", "`AdamW` with moments of one byte, as bitsandbytes does it.";
            Muon = muon, "muon", "Muon for matrices, `AdamW` for the rest (`momentum`: 0.95, `nesterov`: true, `ns_steps`: 5, `adjust_lr_fn`: original).";
            ScheduleFreeAdamW = schedule_free, "schedule_free_adamw", "`AdamW` that averages instead of following a schedule (`r`: 0, `weight_lr_power`: 2).", averages;
            AdEmaMix = ademamix, "ademamix" | "paged_ademamix_32bit", "`AdEMAMix`: `AdamW` with a second, slow momentum (`beta3`: 0.9999, `alpha`: 5, `t_alpha`: none, `t_beta3`: none).";
        }
    };
}

/// Optimizers of other toolkits that tunesmith does not have; the error about such a word says so.
pub const OTHER_OPTIMIZERS: &[&str] = &[
    "adamw_torch_4bit",
    "adamw_torch_8bit",
    "ademamix_8bit",
    "paged_ademamix_8bit",
    "lion_8bit",
    "paged_lion_8bit",
    "adagrad",
    "rmsprop",
    "rmsprop_bnb",
    "rmsprop_bnb_8bit",
    "rmsprop_bnb_32bit",
    "adamw_anyprecision",
    "galore_adamw",
    "galore_adamw_8bit",
    "galore_adafactor",
    "apollo_adamw",
    "lomo",
    "adalomo",
    "grokadamw",
    "stable_adamw",
    "schedule_free_sgd",
    "schedule_free_radam",
];

/// `train.lr_scheduler_type`: `Name = module, "word", "What it is.";`, in `crates/optim/src/schedule/`. `Name` is a
/// type in the module, a `ScheduleForm`.
#[macro_export]
macro_rules! schedules {
    ($then:path) => {
        $then! {
            Constant = constant, "constant", "The same from the first step to the last.";
            ConstantWithWarmup = constant_with_warmup, "constant_with_warmup", "Rises during warm-up, then stays.";
            Linear = linear, "linear", "Rises during warm-up, then falls on a line to 0.";
            Cosine = cosine, "cosine", "Rises during warm-up, then falls on half a cosine to 0 (`num_cycles`: 0.5).";
            CosineWithRestarts = cosine_with_restarts, "cosine_with_restarts", "Rises during warm-up, then falls on `num_cycles` (1) half cosines, each from the top.";
            Polynomial = polynomial, "polynomial", "Rises during warm-up, then falls as a power (`power`: 1) to `lr_end` (1e-7).";
            InverseSqrt = inverse_sqrt, "inverse_sqrt", "Rises during warm-up, then falls as `1 / sqrt(step)` (`timescale`: the warm-up's steps, or 10000).";
            CosineWithMinLr = cosine_with_min_lr, "cosine_with_min_lr", "As `cosine`, to `min_lr` or to `min_lr_rate` of the highest rate.";
            CosineWarmupWithMinLr = cosine_warmup_with_min_lr, "cosine_warmup_with_min_lr", "As `cosine_with_min_lr`, with a warm-up that begins at `warmup_lr_rate` and not at 0.";
            WarmupStableDecay = warmup_stable_decay, "warmup_stable_decay", "Rises during warm-up, stays, then falls over `num_decay_steps` to `min_lr_ratio` (0) of the highest rate.";
            Rex = rex, "rex", "Rises during warm-up. Then falls slowly at first and steeply at the end, to `min_lr` or to `min_lr_rate` (0) of the highest rate, as in Axolotl.";
        }
    };
}

/// Kinds of adapters, values of `tuning.mode`:
/// `module: Settings = Mode, "word" | "second name" ("Its meaning."), "What it trains.";`, in
/// `crates/model/src/adapters/`, with its `Settings`, `SECTION` and `ABOUT`.
#[macro_export]
macro_rules! adapters {
    ($then:path) => {
        $then! {
            lora: LoraConfig = Lora, "lora" | "qlora" ("`lora` on a base of 4 bits: with `model.quantization: nf4` unless that says otherwise."), "Low-rank adapters on frozen weights.";
            ia3: Ia3Config = Ia3, "ia3", "(IA)³: a factor for each key, value, and inner feature of the MLP, on frozen weights.";
            oft: OftConfig = Oft, "oft", "OFT: an orthogonal matrix for each block of a layer's inputs, on frozen weights.";
        }
    };
}

/// The families of models: `module,`, in `crates/config/src/families/`, with its `FAMILY` and `read`.
#[macro_export]
macro_rules! families {
    ($then:path) => {
        $then! {
            llama,
            qwen2,
            qwen3,
            gemma,
            gemma2,
            gemma3,
            gemma3n,
            mistral,
            phi3,
            smollm3,
            olmo2,
            olmo3,
            granite,
            granitemoehybrid,
            mixtral,
            qwen2_moe,
            qwen3_moe,
            qwen3_5,
            lfm2,
            ministral3,
            seed_oss,
            hunyuan_v1_dense,
            gpt_oss,
            qwen3_5_moe,
            qwen3_next,
            lfm2_moe,
            glm4_moe,
            glm4,
            afmoe,
            minimax_m2,
            gemma4,
            gemma4_unified,
            olmo_hybrid,
            nemotron_h,
            deepseek_v3,
            deepseek_v2,
            glm4_moe_lite,
            mistral4,
            lfm3,
            muse_glimmer,
            gpt2,
        }
    };
}

/// Formats of files that hold rows, in order of preference: `module = "extension" | "other";`, in
/// `crates/data/src/source/`, with its `READ`.
#[macro_export]
macro_rules! formats {
    ($then:path) => {
        $then! {
            parquet = "parquet";
            arrow = "arrow" | "feather" | "ipc";
            jsonl = "jsonl" | "ndjson";
            json = "json";
            csv = "csv";
            tsv = "tsv";
            tar = "tar";
            zip = "zip";
        }
    };
}

macro_rules! extensions {
    ($($module:ident = $($extension:literal)|+;)+) => {
        /// The extensions of each format, the usual one first.
        pub const EXTENSIONS: &[&[&str]] = &[$( &[$($extension),+] ),+];
    };
}
formats!(extensions);

/// Extensions of compressed files, which follow those of [`EXTENSIONS`]: `rows.jsonl.gz`.
pub const COMPRESSED: &[&str] = &["gz", "zst", "zstd"];

/// Forms of rows in the order in which `auto` tries them, the words of `data.format`:
/// `Name = module, "word", "What it is.";`, in `crates/data/src/row/`, with its `SHAPE`.
#[macro_export]
macro_rules! row_forms {
    ($then:path) => {
        $then! {
            Tokenized = tokenized, "tokenized", "`{input_ids, labels}`: taken as they are.";
            Messages = messages, "messages", "`{messages: [{role, content}, …]}`.";
            ShareGpt = sharegpt, "sharegpt", "`{conversations: [{from, value}, …]}`.";
            AlpacaHistory = alpaca_history, "alpaca_history", "`{history, instruction, input, output}`: `alpaca` after earlier turns, a list of pairs.";
            Alpaca = alpaca, "alpaca", "`{instruction, input, output}`.";
            PromptCompletion = prompt_completion, "prompt_completion", "`{prompt, completion}`: plain text, no template.";
            ChatTriple = chat_triple, "chat_triple", "`{system, user, assistant}`.";
            Instruction = instruction, "instruction", "A question field and an answer field (`user`, `question`, … and `assistant`, `answer`, …), or several people's `answers`.";
            Statement = statement, "statement", "`{image, caption, label}` with `relation` or `image_link`: whether a statement about an image is true (VSR).";
            Captions = captions, "captions", "`{image, caption}`: an image, or its web address in `image_url` or `url`, and its caption, or a list of captions.";
            Text = text, "text", "`{text}`: every token is trained on.";
        }
    };
}

pub use adapters;
pub use families;
pub use formats;
pub use optimizers;
pub use row_forms;
pub use schedules;
