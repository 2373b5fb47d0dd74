//! FSDP's keys: Transformers' `fsdp` and `fsdp_config`, and the section `fsdp_config` of Accelerate's file.
use super::Act::{Always, Unless, Warned, With};
use super::key_outcomes::Foreign;
use super::walk::{Reader, Value};
use super::{Format, Row, row, section};
use crate::foreign_values::Switch;
use crate::option::Scalar::{Bool, Str};
use crate::source::Source;
use crate::suggest::nearest;
use crate::value::Node;
use tunesmith_base::error::{Error, Result};

/// Our key for how weights are shared.
const SHARDING: &str = "train.fsdp_sharding_strategy";
const SEGMENTS: &str = "weights are gathered block by block";
const OBJECT: &str = "it is an object of Python's, which no file holds";
const XLA: &str = "there is no XLA";

/// Every key; Accelerate writes `fsdp_` before each.
pub(super) const ROWS: &[Row] = &[
    row("version", Always(&[Str("1"), Str("2")], "there is one FSDP, which does what both do")),
    row("sharding_strategy", With(sharding, "train.fsdp_sharding_strategy; _HYBRID_SHARD_ZERO2 is refused")),
    row(
        "reshard_after_forward",
        With(reshard, "train.fsdp_sharding_strategy: true becomes full_shard, false shard_grad_op"),
    ),
    row("offload_params", Always(&[Bool(true), Bool(false)], "on the CPU weights lie in main memory")),
    row("cpu_offload", Always(&[Bool(true), Bool(false)], "on the CPU weights lie in main memory")),
    row("auto_wrap_policy", Always(&[Str("TRANSFORMER_BASED_WRAP"), Str("NO_WRAP"), Str("SIZE_BASED_WRAP")], SEGMENTS)),
    row("transformer_layer_cls_to_wrap", Warned(SEGMENTS)),
    row("min_num_params", Warned(SEGMENTS)),
    row("backward_prefetch", Always(&[Str("BACKWARD_PRE")], "the next block is fetched while the last is at work")),
    // As Accelerate wrote it up to 0.20.
    row(
        "backward_prefetch_policy",
        Always(&[Str("BACKWARD_PRE")], "the next block is fetched while the last is at work"),
    ),
    row("forward_prefetch", Always(&[Bool(true)], "the next block is fetched while the last is at work")),
    row(
        "state_dict_type",
        Always(
            &[Str("FULL_STATE_DICT"), Str("SHARDED_STATE_DICT")],
            "a checkpoint is one, and loads with any number of ranks",
        ),
    ),
    row("use_orig_params", Always(&[Bool(true)], "values keep their names and shapes")),
    row("sync_module_states", Always(&[Bool(true)], "before step 1 the ranks compare what they start from")),
    row("cpu_ram_efficient_loading", Warned("each rank reads the weights segment by segment and keeps its part")),
    row("limit_all_gathers", Always(&[Bool(true)], "two blocks at most are gathered at a time")),
    row("activation_checkpointing", With(checkpointing, "train.gradient_checkpointing")),
    row("activation_checkpointing_offload", Unless(&[], "on the CPU there is no other memory to move activations to")),
    section("mixed_precision_policy", Unless(&[Str("fp32")], "set train.bf16 or train.fp16")),
    row("ignored_modules", Unless(&[], "no module is left out of the sharing")),
    row("param_init_fn", Unless(&[], OBJECT)),
    row("state_dict_config", Unless(&[], OBJECT)),
    row("optim_state_dict_config", Unless(&[], OBJECT)),
    row("xla", Unless(&[], XLA)),
    row("xla_fsdp_v2", Unless(&[], XLA)),
    row("xla_fsdp_grad_ckpt", Unless(&[], XLA)),
    section("xla_fsdp_settings", Unless(&[], XLA)),
];

/// PyTorch's strategies by name or number.
fn sharding(reader: &mut Reader, value: &Value) -> Result<()> {
    let ours = match value.word()?.as_str() {
        "full_shard" | "1" => "full_shard",
        "shard_grad_op" | "2" => "shard_grad_op",
        "no_shard" | "3" => "no_shard",
        "hybrid_shard" | "4" => "hybrid_shard",
        "_hybrid_shard_zero2" | "hybrid_shard_zero2" | "5" => {
            return Err(value.refused("hybrid_shard shares weights too; set that, or shard_grad_op"));
        }
        _ => return Err(value.expected("one of FULL_SHARD, SHARD_GRAD_OP, NO_SHARD, HYBRID_SHARD")),
    };
    put_sharding(reader, value, ours)
}

fn put_sharding(reader: &mut Reader, value: &Value, ours: &str) -> Result<()> {
    reader.put(value, SHARDING, Node::Str(ours.to_owned()), "")
}

/// FSDP 2's flag, or FSDP 1's word.
fn reshard(reader: &mut Reader, value: &Value) -> Result<()> {
    match value.flag() {
        Ok(again) => put_sharding(reader, value, if again { "full_shard" } else { "shard_grad_op" }),
        Err(_) => sharding(reader, value),
    }
}

fn checkpointing(reader: &mut Reader, value: &Value) -> Result<()> {
    if value.flag()? {
        reader.put(value, "train.gradient_checkpointing", Node::Bool(true), "")
    } else {
        reader.same(value, "already so")
    }
}

/// Transformers' two keys.
///
/// # Errors
/// A word that is none of its, or as [`super::read`].
pub(super) fn read(
    (words, source): (&Node, &Source),
    config: Option<&(&'static str, Node, Source)>,
    taken: &mut Foreign,
) -> Result<()> {
    let mut reader = match config {
        Some((key, node, source)) => Reader::open(Format::Fsdp, key, node, source)?,
        None => Reader::empty(Format::Fsdp, "train.fsdp", source)?,
    };
    let at = Value { key: "train.fsdp".to_owned(), node: words.clone(), source: source.clone() };
    reader.put(&at, "train.strategy", Node::Str("fsdp".to_owned()), "")?;
    for word in Switch::words(words).unwrap_or_default() {
        let value = Value { node: Node::Str(word.clone()), ..at.clone() };
        match word.as_str() {
            "auto_wrap" => reader.same(&value, SEGMENTS)?,
            "offload" => reader.same(&value, "on the CPU weights lie in main memory")?,
            "full_shard" | "shard_grad_op" | "no_shard" | "hybrid_shard" | "hybrid_shard_zero2" => {
                sharding(&mut reader, &value)?;
            }
            _ => {
                let known = ["full_shard", "shard_grad_op", "no_shard", "hybrid_shard", "offload", "auto_wrap"];
                let error = Error::config(format!("{}: train.fsdp: unknown word {word:?}", source.place()));
                return Err(match nearest(&word, known) {
                    Some(near) => error.hint(format!("did you mean {near}?")),
                    None => error.hint(format!("it takes {}", known.join(", "))),
                });
            }
        }
    }
    reader.run(|_| Ok(()), taken)
}
