//! TRL's configurations of `trl sft --config their.yaml`, as of version 1.16: the fields of `ScriptArguments`, `ModelConfig`, `SFTConfig`,
//! and `DatasetMixtureConfig`. Keys of Transformers' `TrainingArguments` that are no exceptions are found in our own section `train`.
use super::data_set::{DataSet, files, is_file, one_or_list};
use super::import::{Import, Rules, is_off_or_zero};
use super::names::{NO_LOADER, UPLOAD};
use super::nodes::{entries, joined, texts};
use super::source_file::beside;
use super::{names, ranks};
use std::path::Path;
use tunesmith_base::error::{Error, Result};
use tunesmith_config::foreign::rules::Action::{NotNeeded, Only, To, Together, Unsupported, With};
use tunesmith_config::{Node, Scalar, is_hub_name, rules};

const ATTENTION: &str = "there is one attention, and kernels are chosen for the processor";
const ONE_WAY: &str = "there is only one way to recompute a block";
const PADDING: &str = "there is no padding; attention never crosses from row to row";
const STREAMED: &str = "every set is streamed from disk";

/// Keys of TRL's other commands, each with a command that has it. Their rows are not examples to learn.
const OTHER_COMMANDS: &[(&str, &str)] = &[
    ("beta", "trl dpo, kto, grpo or rloo"),
    ("precompute_ref_log_probs", "trl dpo or kto"),
    ("sync_ref_model", "trl dpo, kto, grpo or rloo"),
    ("f_divergence_type", "trl dpo"),
    ("loss_weights", "trl dpo"),
    ("desirable_weight", "trl kto"),
    ("undesirable_weight", "trl kto"),
    ("center_rewards_coefficient", "trl reward"),
    ("reward_model_name_or_path", "trl grpo or rloo"),
    ("reward_funcs", "trl grpo or rloo"),
    ("num_generations", "trl grpo or rloo"),
    ("num_iterations", "trl grpo or rloo"),
    ("max_completion_length", "trl grpo or rloo"),
    ("teacher_model_name_or_path", "trl distillation"),
];

/// Every key that this import knows beside those that are found in our section `train`.
pub(super) const RULES: Rules = rules! {
    "model_name_or_path" => To("model.name"),
    "model_revision" => To("model.revision"),
    "dtype" | "torch_dtype" => With(dtype),
    "model_init_kwargs" => With(init),
    "trust_remote_code" => With(names::trust_remote_code),
    "attn_implementation" | "use_liger_kernel" => NotNeeded(ATTENTION),
    "router_aux_loss_coef" => Unsupported("the model's config.json says how much of it there is"),
    "use_peft" | "load_in_4bit" | "load_in_8bit" | "bnb_4bit_quant_type" | "use_bnb_nested_quant" => Together,
    "bnb_4bit_quant_storage" => NotNeeded("codes are kept in bytes"),
    "lora_r" => To("tuning.lora.r"),
    "lora_alpha" => To("tuning.lora.lora_alpha"),
    "lora_dropout" => To("tuning.lora.lora_dropout"),
    "lora_target_modules" => With(|import, key, node| import.put(key, "tuning.lora.target_modules", one_word(node), "")),
    "lora_target_parameters" => With(|import, key, node| import.put(key, "tuning.lora.target_parameters", joined(node), "")),
    "lora_modules_to_save" => With(|import, key, node| import.put(key, "tuning.lora.modules_to_save", joined(node), "")),
    "lora_task_type" => Only(&[Scalar::Str("CAUSAL_LM")], "the task is causal_lm; for classes, set task: classification"),
    "use_rslora" => To("tuning.lora.use_rslora"),
    "use_dora" => To("tuning.lora.use_dora"),
    "dataset_name" | "dataset_config" | "dataset_train_split" | "dataset_test_split" | "datasets" | "test_split_size" => Together,
    "dataset_streaming" | "streaming" => NotNeeded(STREAMED),
    "ignore_bias_buffers" => NotNeeded("models have no buffers that training changes"),
    "dataset_text_field" => Only(&[Scalar::Str("text")], "a row of raw text has the field `text`; rename the field"),
    "dataset_kwargs" => Unsupported("rows are always rendered by the chat template and tokenized; see data.format"),
    "dataset_num_proc" => To("data.num_proc"),
    "chat_template_path" => With(template),
    "eos_token" => Unsupported("the tokenizer's files and the chat template name the token that ends a turn"),
    "max_length" | "max_seq_length" => With(|import, key, node| import.put(key, "model.max_seq_len", node.clone(), "")),
    "truncation_mode" => With(truncation),
    "shuffle_dataset" => NotNeeded("the order of the rows is drawn anew in each epoch"),
    "packing" => To("data.packing"),
    "packing_strategy" => With(packing_strategy),
    "eval_packing" => NotNeeded("validation rows are not packed; the loss is the same"),
    "padding_free" | "pad_to_multiple_of" | "pad_token" => NotNeeded(PADDING),
    "completion_only_loss" | "assistant_only_loss" => Together,
    "loss_type" => Only(&[Scalar::Str("nll"), Scalar::Str("chunked_nll")], "the loss is the cross entropy of the labels (`nll`)"),
    "activation_offloading" => To("train.activation_offloading"),
    "output_dir" => To("train.output_dir"),
    "run_name" => To("logging.run_name"),
    "report_to" => With(names::report_to),
    "per_device_train_batch_size" => To("train.batch_size"),
    "per_device_eval_batch_size" => To("train.eval_batch_size"),
    "gradient_accumulation_steps" => To("train.grad_accum"),
    "gradient_checkpointing" | "activation_checkpointing" => To("train.gradient_checkpointing"),
    "gradient_checkpointing_kwargs" | "activation_checkpointing_kwargs" => NotNeeded(ONE_WAY),
    "learning_rate" => To("train.learning_rate"),
    "num_train_epochs" => To("train.num_train_epochs"),
    "max_steps" => To("train.max_steps"),
    "optim" => With(names::optimizer),
    "optim_args" => With(|import, key, node| match entries(node) {
        Some(entries) => import.put(key, "train.optim_args", Node::Map(entries), ""),
        None => import.unsupported(key, "set train.optim_args to a mapping"),
    }),
    "lr_scheduler_type" | "warmup_ratio" | "warmup_steps" => Together,
    "lr_scheduler_kwargs" => With(names::scheduler_arguments),
    "bf16" | "fp16" => Together,
    "use_cpu" => With(|import, key, node| match node {
        Node::Bool(true) => import.put(key, "model.device", Node::Str("cpu".into()), ""),
        _ => import.not_needed(key, "off"),
    }),
    "train_sampling_strategy" => With(sampling),
    "eval_strategy" | "evaluation_strategy" | "eval_steps" | "save_strategy" | "save_steps" | "load_best_model_at_end" => Together,
    "save_only_model" => With(names::save_only_model),
    "overwrite_output_dir" => With(names::overwrite),
    "accelerator_config" => NotNeeded(NO_LOADER),
    "deepspeed" => With(ranks::deepspeed),
    "fsdp" | "fsdp_config" => Together,
    "accelerate_config" => With(accelerate),
    "num_processes" | "num_machines" | "machine_rank" | "main_process_ip" | "main_process_port" => Unsupported(ranks::LAUNCHED),
    "push_to_hub" => Unsupported(UPLOAD),
    "env" => Unsupported("set environment variables where the program is started"),
};

pub(super) fn read(import: &mut Import) -> Result<()> {
    for (key, command) in OTHER_COMMANDS {
        if import.get(&[key]).is_some() {
            let message =
                format!("{}: {key} is a key of {command}: this is no supervised fine-tuning", import.path.display());
            return Err(Error::config(message).hint("only configurations of `trl sft` can be imported"));
        }
    }
    if import.get(&["model_name_or_path"]).is_none() {
        let message = format!("{}: model_name_or_path is not set: this trains nothing", import.path.display());
        return Err(Error::config(message).hint("is it a configuration of `trl sft`?"));
    }
    import.apply_rules()?;
    mode(import);
    precision(import);
    let splits = rows(import);
    learned(import);
    names::schedule(import, "linear");
    names::moments(import, "no", "steps", splits);
    ranks::fsdp(import, false);
    defaults(import);
    Ok(())
}

/// The training mode, and the precision of the base: full training, unless `use_peft`.
fn mode(import: &mut Import) {
    let (adapts, four, eight) = (import.is_on("use_peft"), import.is_on("load_in_4bit"), import.is_on("load_in_8bit"));
    let ours = match (adapts, four) {
        (true, true) => "qlora",
        (true, false) => "lora",
        (false, _) => "full",
    };
    match import.get(&["use_peft"]) {
        Some((key, _)) => import.put(
            &key,
            "tuning.mode",
            Node::Str(ours.into()),
            if four && adapts { "with load_in_4bit" } else { "" },
        ),
        None => import.default("tuning.mode", Node::Str(ours.into()), "without use_peft, every weight is trained"),
    }
    for (key, on) in [("load_in_4bit", four), ("load_in_8bit", eight)] {
        match import.get(&[key]) {
            Some(_) if on && !adapts => {
                import.unsupported(key, "weights that are trained themselves are not quantized");
            }
            Some(_) if four && eight && key == "load_in_8bit" => {
                import.unsupported(key, "load_in_4bit is on too: keep one of them");
            }
            Some(_) if on && key == "load_in_4bit" => import.not_needed(key, "mode: qlora implies it"),
            Some(_) if on => import.put(key, "model.quantization", Node::Str("int8".into()), ""),
            Some(_) => import.not_needed(key, "off"),
            None => {}
        }
    }
    let kinds = [("bnb_4bit_quant_type", "model.quantization"), ("use_bnb_nested_quant", "model.double_quant")];
    for (key, to) in kinds {
        match import.get(&[key]) {
            Some((_, node)) if ours == "qlora" => import.put(key, to, node, ""),
            Some(_) => import.not_needed(key, "it belongs to load_in_4bit"),
            None if ours == "qlora" && key == "use_bnb_nested_quant" => {
                import.default(to, Node::Bool(false), "its default");
            }
            None => {}
        }
    }
    let few = ["q_proj", "v_proj"].map(|name| Node::Str(name.into())).to_vec();
    let its = [
        ("r", Node::Int(16), "its default"),
        ("lora_alpha", Node::Int(32), "its default"),
        ("lora_dropout", Node::Float(0.05), "its default"),
        ("target_modules", Node::List(few), "PEFT's default for most families"),
    ];
    for (name, value, why) in its {
        let key = format!("tuning.lora.{name}");
        if adapts && import.written(&key).is_none() {
            import.default(&key, value, why);
        }
    }
}

/// bfloat16, unless the file says otherwise or has `fp16`.
fn precision(import: &mut Import) {
    let given = |import: &Import, key: &str| import.get(&[key]).map(|(_, node)| !is_off_or_zero(&node));
    let half = given(import, "fp16") == Some(true);
    for (key, ours) in [("bf16", "train.bf16"), ("fp16", "train.fp16")] {
        if let Some((_, node)) = import.get(&[key]) {
            import.put(key, ours, node, "");
        }
    }
    if given(import, "bf16").is_none() && !half {
        import.default("train.bf16", Node::Bool(true), "its default");
    }
}

/// Imports which tokens carry the loss. TRL's default is whole conversations.
fn learned(import: &mut Import) {
    let (assistant, completion) = (import.is_on("assistant_only_loss"), import.is_on("completion_only_loss"));
    let word = |word: &str| Node::Str(word.into());
    let mut written = false;
    for (key, on, ours) in [
        ("assistant_only_loss", assistant, "assistant"),
        ("completion_only_loss", completion && !assistant, "completion"),
    ] {
        match import.get(&[key]) {
            Some(_) if on => import.put(key, "data.loss_on", word(ours), ""),
            Some(_) if assistant || completion => import.not_needed(key, "the other key says which tokens are learned"),
            Some(_) => import.put(key, "data.loss_on", word("all"), ""),
            None => continue,
        }
        written = true;
    }
    if !written {
        let why = "whole conversations and texts; for rows with prompt and completion, it is completion";
        import.default("data.loss_on", word("all"), why);
    }
}

/// Training and validation rows. Returns whether there are some to validate.
fn rows(import: &mut Import) -> bool {
    let mixture = import.get(&["datasets"]).filter(|(_, node)| !is_off_or_zero(node));
    let single = ["dataset_name", "dataset_config", "dataset_train_split", "dataset_test_split"];
    if let Some((key, node)) = mixture {
        for name in single.into_iter().filter(|name| import.get(&[name]).is_some()).collect::<Vec<_>>() {
            import.not_needed(name, "datasets takes precedence");
        }
        mix(import, &key, node);
        return names::validation(import, "test_split_size");
    }
    if import.get(&["test_split_size"]).is_some() {
        import.not_needed("test_split_size", "it belongs to datasets");
    }
    let Some((key, node)) = import.get(&["dataset_name"]) else { return false };
    let Node::Str(name) = &node else {
        import.unsupported(&key, "expected a name or a path");
        return false;
    };
    let set = source(import, name);
    let hub = set.on_hub;
    let mut entry = set.place.clone();
    for (theirs, ours) in [("dataset_config", "config"), ("dataset_train_split", "split")] {
        let Some((from, node)) = import.get(&[theirs]) else { continue };
        if hub {
            import.changed(&from, &format!("data.datasets: {ours}"), "part of its entry");
            entry.push((ours.to_owned(), node));
        } else {
            import.not_needed(&from, "a file has all of its rows");
        }
    }
    if hub {
        import.put(&key, "data.datasets", Node::List(vec![Node::Map(entry)]), "");
    } else {
        import.put(&key, "data.train_path", one_or_list(files(vec![set])), "");
    }
    let validates = import.word("eval_strategy").is_some_and(|word| word != "no");
    if let Some((from, _)) = import.get(&["dataset_test_split"]) {
        let why = "set data.val_path to the rows of this split, or data.split to a share of the training rows";
        if validates { import.unsupported(&from, why) } else { import.not_needed(&from, "nothing is validated") }
    }
    false
}

/// The entries of `datasets`.
fn mix(import: &mut Import, key: &str, node: Node) {
    let Node::List(items) = node else { return import.unsupported(key, "expected a list of data sets") };
    let mut sets = Vec::new();
    for (number, item) in items.into_iter().enumerate() {
        let at = format!("{key}[{number}]");
        let Node::Map(fields) = item else { return import.unsupported(key, "expected mappings, each with a path") };
        let get = |name: &str| fields.iter().find(|(field, node)| field == name && *node != Node::Null);
        let Some((_, Node::Str(path))) = get("path") else { return import.unsupported(key, "a data set has no path") };
        let set = source(import, path);
        let hub = set.on_hub;
        let mut entry = set.place;
        for (name, node) in fields.iter().filter(|(_, node)| *node != Node::Null) {
            let from = format!("{at}.{name}");
            match name.as_str() {
                "path" => {}
                "data_files" if !hub => entry = vec![("path".to_owned(), node.clone())],
                "name" if hub => entry.push(("config".to_owned(), node.clone())),
                "split" if hub => entry.push(("split".to_owned(), node.clone())),
                "name" | "split" => import.not_needed(&from, "a file has all of its rows"),
                "columns" => import.not_needed(&from, "fields that are not part of the row format are ignored"),
                "fraction" => {
                    import.unsupported(&from, "a share of the mix without repeated rows; data.datasets has weights");
                }
                _ => import.unsupported(&from, "name the files: data.train_path, or hf://datasets/owner/name/file"),
            }
        }
        sets.push(Node::Map(entry));
    }
    import.put(key, "data.datasets", Node::List(sets), "");
}

/// A data set by its name on the hub, or by its path.
fn source(import: &Import, name: &str) -> DataSet {
    let on_hub = is_hub_name(name) && !is_file(name) && beside(&import.path, name).is_none();
    let key = if on_hub { "name" } else { "path" };
    DataSet { place: vec![(key.to_owned(), Node::Str(name.to_owned()))], on_hub, format: "auto" }
}

/// The value of `lora_target_modules`: `all-linear` by itself, even in a list of one, as TRL passes it on. Anything else is a
/// list of names.
fn one_word(node: &Node) -> Node {
    match &texts(node)[..] {
        [word] if word == "all-linear" => Node::Str(word.clone()),
        _ => joined(node),
    }
}

/// Imports the dtype of the frozen weights. With bfloat16 compute, the checkpoint's own dtype gives the same numbers as
/// float32.
fn dtype(import: &mut Import, key: &str, node: &Node) {
    match node {
        Node::Str(word) if word == "float16" => {
            import.changed(key, "", "frozen weights are kept as their files have them");
        }
        node => import.put(key, "model.dtype", node.clone(), ""),
    }
}

/// Imports `model_init_kwargs`, further arguments of `from_pretrained`.
fn init(import: &mut Import, key: &str, node: &Node) {
    let Some(entries) = entries(node) else { return import.unsupported(key, "expected a mapping") };
    let mut all = true;
    for (name, node) in entries {
        let from = format!("{key}.{name}");
        match name.as_str() {
            "dtype" | "torch_dtype" => dtype(import, &from, &node),
            "revision" => import.put(&from, "model.revision", node, ""),
            "device_map" => names::device(import, &from, &node),
            "attn_implementation" | "use_cache" | "use_kernels" | "low_cpu_mem_usage" | "trust_remote_code" => {
                import.not_needed(&from, ATTENTION);
            }
            _ => {
                all = false;
                import.unsupported(&from, "the section model has what there is");
            }
        }
    }
    if all {
        import.changed(key, "", "each of its keys by itself");
    } else {
        import.unsupported(key, "some of its keys have no counterpart");
    }
}

/// Imports `chat_template_path` if it is a Jinja file. A folder would mean the template of another tokenizer, which is not
/// supported.
fn template(import: &mut Import, key: &str, node: &Node) {
    match node {
        Node::Str(path) if Path::new(path).extension().is_some_and(|end| end == "jinja" || end == "jinja2") => {
            import.put(key, "data.template_path", node.clone(), "");
        }
        _ => import.unsupported(key, "set data.template_path to the tokenizer's chat_template.jinja"),
    }
}

fn truncation(import: &mut Import, key: &str, node: &Node) {
    match node {
        Node::Str(word) if word == "keep_start" => import.put(key, "data.truncation", Node::Str("right".into()), ""),
        Node::Str(word) if word == "keep_end" => import.put(key, "data.truncation", Node::Str("left".into()), ""),
        _ => import.unsupported(key, "expected keep_start or keep_end"),
    }
}

fn packing_strategy(import: &mut Import, key: &str, node: &Node) {
    match node {
        _ if !import.is_on("packing") => import.not_needed(key, "packing is off"),
        Node::Str(word) if word == "bfd" => import.not_needed(key, "whole rows are packed"),
        Node::Str(word) if word == "bfd_split" || word == "wrapped" => {
            let why = "long texts are cut into rows, and whole rows are packed";
            import.put(key, "data.truncation", Node::Str("split".into()), why);
        }
        _ => import.unsupported(key, "expected bfd, bfd_split or wrapped"),
    }
}

fn sampling(import: &mut Import, key: &str, node: &Node) {
    match node {
        Node::Str(word) if word == "random" => import.not_needed(key, "the order is drawn anew in each epoch"),
        Node::Str(word) if word == "sequential" => import.put(key, "data.shuffle", Node::Bool(false), ""),
        Node::Str(word) if word == "group_by_length" => import.put(key, "train.group_by_length", Node::Bool(true), ""),
        _ => import.unsupported(key, "expected random, sequential or group_by_length"),
    }
}

/// Imports `accelerate_config`: the name of a configuration that TRL ships, or the path of a file.
fn accelerate(import: &mut Import, key: &str, node: &Node) {
    let strategy = |import: &mut Import, word: &str| import.put(key, "train.strategy", Node::Str(word.into()), "");
    match node {
        Node::Str(word) => match word.as_str() {
            "single_gpu" | "multi_gpu" => import.not_needed(key, ranks::DDP),
            "zero1" | "zero2" | "zero3" => strategy(import, word),
            "fsdp1" | "fsdp2" => strategy(import, "fsdp"),
            path if beside(&import.path, path).is_some() => import.put(key, "train.accelerate", node.clone(), ""),
            _ => import.unsupported(key, "the file is missing; train.accelerate reads it unchanged"),
        },
        _ => import.unsupported(key, "expected a name or a file"),
    }
}

/// Defaults of TRL that differ from ours.
fn defaults(import: &mut Import) {
    let its = [
        ("model.max_seq_len", Node::Int(1024)),
        ("train.learning_rate", Node::Float(2e-5)),
        ("train.gradient_checkpointing", Node::Bool(true)),
        ("train.logging_steps", Node::Int(10)),
    ];
    for (key, value) in its {
        if import.written(key).is_none() {
            import.default(key, value, "its default");
        }
    }
    if import.get(&["save_total_limit"]).is_none() {
        import.default("train.save_total_limit", Node::Null, "every checkpoint is kept");
    }
}
