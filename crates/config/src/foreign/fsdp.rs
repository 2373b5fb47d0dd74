//! FSDP's keys: Transformers' `fsdp` and `fsdp_config`, and the section `fsdp_config` of Accelerate's file.
use super::Action::{Always, NotNeeded, Only, Unsupported, With};
use super::Format;
use super::outcomes::Foreign;
use super::reader::{Reader, Rules};
use super::rules::Translation as _;
use super::value::Value;
use crate::foreign_values::FsdpWords;
use crate::option::Scalar::{Bool, Str};
use crate::rules;
use crate::source::Source;
use crate::suggest::nearest;
use crate::value::Node;
use tunesmith_base::error::{Error, Result};

/// Our key for how weights are shared.
const SHARDING: &str = "train.fsdp_sharding_strategy";
const SEGMENTS: &str = "weights are gathered block by block";
const OBJECT: &str = "it is a Python object, which a file cannot contain";
const XLA: &str = "there is no XLA";

/// Every key; Accelerate writes `fsdp_` before each.
pub(super) const RULES: Rules = rules! {
    "version" => Always(&[Str("1"), Str("2")], "there is one FSDP, which covers both versions"),
    "sharding_strategy" => With(sharding); "train.fsdp_sharding_strategy; _HYBRID_SHARD_ZERO2 is refused",
    "reshard_after_forward" => With(reshard); "train.fsdp_sharding_strategy: true becomes full_shard, false shard_grad_op",
    "offload_params" | "cpu_offload" => With(offload); "true becomes train.offload_param: true and train.offload_optimizer: true",
    "auto_wrap_policy" => Always(&[Str("TRANSFORMER_BASED_WRAP"), Str("NO_WRAP"), Str("SIZE_BASED_WRAP")], SEGMENTS),
    "transformer_layer_cls_to_wrap" | "min_num_params" => NotNeeded(SEGMENTS),
    "backward_prefetch" => Always(&[Str("BACKWARD_PRE")], "the next block is gathered while the current one computes"),
    // As Accelerate wrote it up to 0.20.
    "backward_prefetch_policy" => Always(&[Str("BACKWARD_PRE")], "the next block is gathered while the current one computes"),
    "forward_prefetch" => Always(&[Bool(true)], "the next block is gathered while the current one computes"),
    "state_dict_type" => Always(&[Str("FULL_STATE_DICT"), Str("SHARDED_STATE_DICT")], "every checkpoint loads with any number of ranks"),
    "use_orig_params" => Always(&[Bool(true)], "parameters keep their names and shapes"),
    "sync_module_states" => Always(&[Bool(true)], "the ranks compare their initial weights before step 1"),
    "cpu_ram_efficient_loading" => NotNeeded("each rank reads the weights segment by segment and keeps its part"),
    "limit_all_gathers" => Always(&[Bool(true)], "at most two blocks are gathered at a time"),
    "activation_checkpointing" => With(checkpointing); "train.gradient_checkpointing",
    "activation_checkpointing_offload" => Unsupported("activations stay where the model is computed; train.gradient_checkpointing keeps fewer"),
    "mixed_precision_policy.*" => Only(&[Str("fp32")], "set train.bf16 or train.fp16"),
    "ignored_modules" => Unsupported("every module is sharded"),
    "param_init_fn" | "state_dict_config" | "optim_state_dict_config" => Unsupported(OBJECT),
    "xla" | "xla_fsdp_v2" | "xla_fsdp_grad_ckpt" | "xla_fsdp_settings.*" => Unsupported(XLA),
};

/// PyTorch's strategies by name or number.
fn sharding(reader: &mut Reader, value: &Value) -> Result<()> {
    let ours = match value.word()?.as_str() {
        "full_shard" | "1" => "full_shard",
        "shard_grad_op" | "2" => "shard_grad_op",
        "no_shard" | "3" => "no_shard",
        "hybrid_shard" | "4" => "hybrid_shard",
        "_hybrid_shard_zero2" | "hybrid_shard_zero2" | "5" => {
            return Err(value.refused("set hybrid_shard, which shards weights too, or shard_grad_op"));
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

fn offload(reader: &mut Reader, value: &Value) -> Result<()> {
    if value.flag()? { put_offload(reader, value) } else { reader.same(value, "already so") }
}

/// What PyTorch keeps on the CPU.
fn put_offload(reader: &mut Reader, value: &Value) -> Result<()> {
    reader.put(value, "train.offload_param", Node::Bool(true), "trained weights stay on the GPU")?;
    reader.put(value, "train.offload_optimizer", Node::Bool(true), "")
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
    words: &Node,
    source: &Source,
    config: Option<&(&'static str, Node, Source)>,
    all: &mut Foreign,
) -> Result<()> {
    let mut reader = match config {
        Some((key, node, source)) => Reader::open(Format::Fsdp, key, node, source)?,
        None => Reader::empty(Format::Fsdp, "train.fsdp", source),
    };
    let at = Value { key: "train.fsdp".to_owned(), node: words.clone(), source: source.clone() };
    reader.put(&at, "train.strategy", Node::Str("fsdp".to_owned()), "")?;
    for word in FsdpWords::words(words).unwrap_or_default() {
        let value = Value { node: Node::Str(word.clone()), ..at.clone() };
        match word.as_str() {
            "auto_wrap" => reader.same(&value, SEGMENTS)?,
            "offload" => put_offload(&mut reader, &value)?,
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
    reader.run(|_| Ok(()), all)
}
