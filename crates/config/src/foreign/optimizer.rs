//! The sections `optimizer` and `scheduler` of DeepSpeed's files.
use super::reader::Reader;
use super::rules::Translation as _;
use super::value::Value;
use crate::value::Node;
use tunesmith_base::error::Result;

/// Why cyclic schedules and learning-rate range tests are refused.
pub(super) const CYCLES: &str =
    "OneCycle and LRRangeTest are not part of this version; train.lr_scheduler_type has the schedules that are";

pub(super) fn betas(reader: &mut Reader, value: &Value) -> Result<()> {
    if value.is_auto() {
        reader.auto(value, "train.adam_beta1")?;
        return reader.auto(value, "train.adam_beta2");
    }
    let Node::List(items) = &value.node else { return Err(value.expected("two numbers")) };
    let [first, second] = &items[..] else { return Err(value.expected("two numbers")) };
    reader.put(value, "train.adam_beta1", first.clone(), "")?;
    reader.put(value, "train.adam_beta2", second.clone(), "")
}

/// An argument that only SGD has. [`optimizer`] sets all of them together.
pub(super) fn argument(reader: &mut Reader, value: &Value) -> Result<()> {
    if value.is_auto() {
        return reader.auto(value, "train.optim_args");
    }
    Ok(())
}

/// Sets `train.optim` from the type, and `train.optim_args` from SGD's arguments.
pub(super) fn optimizer(reader: &mut Reader) -> Result<()> {
    let arguments = ["momentum", "dampening", "nesterov"].map(|name| (name, format!("optimizer.params.{name}")));
    let given = |reader: &Reader, key: &str| reader.get(key).filter(|value| !value.is_auto());
    let kind = match reader.get("optimizer.type") {
        None => None,
        Some(value) if value.is_auto() => {
            reader.auto(&value, "train.optim")?;
            None
        }
        Some(value) => {
            let ours = match value.word()?.as_str() {
                "adam" | "adamw" => "adamw_torch",
                "lion" => "lion",
                "sgd" => "sgd",
                _ => {
                    let why = "train.optim has the optimizers of this version, and docs/optimization.md says what they do; of \
                               DeepSpeed's there are Adam, AdamW, Lion and SGD";
                    return Err(value.refused(why));
                }
            };
            reader.put(&value, "train.optim", Node::Str(ours.to_owned()), "")?;
            Some(ours)
        }
    };
    let mut entries = Vec::new();
    let mut first = None;
    for (name, key) in &arguments {
        let Some(value) = given(reader, key) else { continue };
        if kind.is_some_and(|kind| kind != "sgd") {
            return Err(value.refused("only SGD has it; remove the key"));
        }
        let node = if *name == "nesterov" { Node::Bool(value.flag()?) } else { Node::Float(value.number()?) };
        entries.push(((*name).to_owned(), node));
        first.get_or_insert(value);
    }
    match first {
        Some(value) => reader.put(&value, "train.optim_args", Node::Map(entries), ""),
        None => Ok(()),
    }
}

/// `total_num_steps` becomes `train.max_steps`: here a schedule always spans the run.
pub(super) fn total_steps(reader: &mut Reader, value: &Value) -> Result<()> {
    if value.is_auto() {
        return reader.auto(value, "train.max_steps");
    }
    let steps = value.count(1)?;
    reader.put(value, "train.max_steps", Node::Int(i128::from(steps)), "a schedule is as long as its run")
}

/// Sets the schedule from the type, with DeepSpeed's defaults for the arguments that are absent.
pub(super) fn scheduler(reader: &mut Reader) -> Result<()> {
    let floor = reader.get("scheduler.params.cos_min_ratio");
    let Some(value) = reader.get("scheduler.type") else { return Ok(()) };
    if value.is_auto() {
        return reader.auto(&value, "train.lr_scheduler_type");
    }
    let ours = match value.word()?.as_str() {
        "warmuplr" => "constant_with_warmup",
        "warmupdecaylr" => "linear",
        "warmupcosinelr" => "cosine_with_min_lr",
        "onecycle" | "lrrangetest" => return Err(value.refused(CYCLES)),
        _ => return Err(value.expected("one of WarmupLR, WarmupDecayLR, WarmupCosineLR")),
    };
    let why = if ours == "cosine_with_min_lr" { "DeepSpeed's cosine is one step ahead" } else { "" };
    reader.put(&value, "train.lr_scheduler_type", Node::Str(ours.to_owned()), why)?;
    if ours == "cosine_with_min_lr" {
        let at = floor.clone().unwrap_or_else(|| value.clone());
        let rate = floor.map_or(Ok(1e-4), |floor| floor.number())?;
        let kwargs = Node::Map(vec![("min_lr_rate".to_owned(), Node::Float(rate))]);
        reader.put(&at, "train.lr_scheduler_kwargs", kwargs, "")?;
    } else if let Some(floor) = floor {
        reader.not_needed(&floor, "only WarmupCosineLR has it")?;
    }
    if reader.get("scheduler.params.warmup_num_steps").is_none() {
        reader.put_if_unset(&value, "train.warmup_steps", Node::Int(1000), "DeepSpeed's default")?;
    }
    if reader.get("scheduler.params.warmup_type").is_none() {
        reader.changed(
            &value,
            "the warm-up is linear, as with warmup_type: linear; DeepSpeed's default is logarithmic",
        )?;
    }
    Ok(())
}
