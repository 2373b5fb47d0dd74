//! Accelerate's keys (`accelerate config` writes them), one line each, and what becomes of them; as Accelerate 1.15 has them.
//! The section `fsdp_config` has a table of its own.
use super::Action::{Always, NotNeeded, Only, To, Together, Unsupported, With};
use super::deepspeed::{offload_optimizer, offload_param};
use super::reader::{Reader, Rules};
use super::rules::Translation as _;
use super::value::Value;
use crate::option::Scalar::{Bool, Str};
use crate::rules;
use crate::value::Node;
use tunesmith_base::error::Result;

const TPU: &str = "there are no TPUs";
const POD: &str =
    "torchrun, srun, Kubernetes or `tunesmith launch` on each machine start the ranks (docs/distributed.md)";
const DISK: &str = "this version does not offload to disk";

/// Every key, but those of `fsdp_config`.
pub(super) const RULES: Rules = rules! {
    "compute_environment" => Only(&[Str("LOCAL_MACHINE")], "machines are your own; other services start their own jobs"),
    "distributed_type" => Together; "train.strategy: NO becomes single, MULTI_GPU and MULTI_CPU ddp, FSDP fsdp, DEEPSPEED what its file says; others are refused",
    "mixed_precision" => With(precision); "train.bf16 or train.fp16; fp8 is refused",
    "fp16" => To("train.fp16"),
    "num_processes" => With(processes); "checked against the number of ranks; `tunesmith launch` starts this many",
    "num_machines" => With(machines); "checked against the number of ranks; `tunesmith launch` waits for this many machines",
    "machine_rank" => With(machine_rank); "used by `tunesmith launch`, where --node-rank is not given; other launchers number machines themselves",
    "main_process_ip" => With(address); "used by `tunesmith launch`, where --master-addr is not given",
    "main_process_port" => With(port); "used by `tunesmith launch`, where --master-port is not given",
    "gpu_ids" => With(gpu_ids); "used by `tunesmith launch`, where --gpu-ids is not given; `all` has no effect",
    "use_cpu" => With(super::trainer::on_cpu); "true becomes model.device: cpu; false leaves it to model.device",
    "debug" => NotNeeded("operations between ranks always check sizes, timeouts and lost ranks"),
    "rdzv_backend" => NotNeeded("the launcher decides how ranks find each other (docs/distributed.md)"),
    "same_network" => NotNeeded("machines reach the first one by its address, on any network"),
    "main_training_function" => Always(&[Str("main")], "there is only one entry point"),
    "enable_cpu_affinity" => NotNeeded("threads are not bound to cores; use `numactl` or `taskset` to bind a rank"),
    "downcast_bf16" => Only(&[Str("no")], TPU),
    "tpu_name" | "tpu_zone" | "tpu_use_cluster" | "tpu_use_sudo" | "tpu_vm" | "tpu_env" => Unsupported(TPU),
    "command_file" | "commands" => Unsupported(POD),
    "dynamo_config.*" | "dynamo_backend" => NotNeeded("there is nothing to compile"),
    "fp8_config.*" => Unsupported("fp8 is not part of this version; train.bf16 or train.fp16"),
    "megatron_lm_config.*" => Unsupported("models are not split within a layer; set fsdp_config or deepspeed_config"),
    "parallelism_config.*" => Unsupported("train.strategy says how ranks share a model; set fsdp_config"),
    "mpirun_config.*" => Unsupported("start with mpirun itself: `mpirun -n 2 -x TUNESMITH_TOKEN tunesmith train CONFIG`"),
    "deepspeed_config.deepspeed_config_file" => With(file); "the file is read like train.deepspeed",
    "deepspeed_config.zero_stage" => Together; "train.strategy: 0 becomes ddp, 1 zero1, 2 zero2, 3 zero3",
    "deepspeed_config.gradient_accumulation_steps" => To("train.grad_accum"),
    "deepspeed_config.gradient_clipping" => With(clipping); "train.max_grad_norm",
    "deepspeed_config.offload_optimizer_device" => With(offload_optimizer); "cpu becomes train.offload_optimizer: true; nvme is refused",
    "deepspeed_config.offload_param_device" => With(offload_param); "cpu becomes train.offload_param: true; nvme is refused",
    "deepspeed_config.offload_optimizer_nvme_path" | "deepspeed_config.offload_param_nvme_path" => NotNeeded(DISK),
    "deepspeed_config.zero3_init_flag" => Always(&[Bool(true), Bool(false)], "each rank reads the weights segment by segment and keeps its part"),
    "deepspeed_config.zero3_save_16bit_model" => Always(&[Bool(true)], "saved weights are whole"),
    "deepspeed_config.deepspeed_moe_layer_cls_names" => NotNeeded("experts are a part of their block"),
    "deepspeed_config.deepspeed_multinode_launcher" | "deepspeed_config.deepspeed_hostfile"
    | "deepspeed_config.deepspeed_exclusion_filter" | "deepspeed_config.deepspeed_inclusion_filter" => NotNeeded(POD),
};

fn precision(reader: &mut Reader, value: &Value) -> Result<()> {
    match value.word()?.as_str() {
        "no" => reader.same(value, "train.bf16 and train.fp16 decide it"),
        "bf16" => reader.put(value, "train.bf16", Node::Bool(true), ""),
        "fp16" => reader.put(value, "train.fp16", Node::Bool(true), ""),
        "fp8" => Err(value.refused("fp8 is not part of this version; bf16 or fp16")),
        _ => Err(value.expected("no, fp16, bf16 or fp8")),
    }
}

fn processes(reader: &mut Reader, value: &Value) -> Result<()> {
    // What `accelerate config` writes where Slurm shall say it.
    if value.node == Node::Int(-1) {
        return reader.same(value, "the launcher decides it");
    }
    reader.claims.processes = Some((value.count(1)? as usize, value.source.clone()));
    reader.checked(value, "checked against the number of ranks; `tunesmith launch` starts this many");
    Ok(())
}

fn machines(reader: &mut Reader, value: &Value) -> Result<()> {
    let count = value.count(1)? as usize;
    if count > 1 {
        reader.claims.machines = Some((count, value.source.clone()));
    }
    reader.checked(value, "checked against the number of ranks; `tunesmith launch` waits for this many machines");
    Ok(())
}

fn machine_rank(reader: &mut Reader, value: &Value) -> Result<()> {
    reader.claims.machine_rank = Some((value.count(0)? as usize, value.source.clone()));
    reader.checked(value, "used by `tunesmith launch`");
    Ok(())
}

fn address(reader: &mut Reader, value: &Value) -> Result<()> {
    let Node::Str(address) = &value.node else { return Err(value.expected("a name or an address")) };
    reader.claims.main_address = Some((address.clone(), value.source.clone()));
    reader.checked(value, "used by `tunesmith launch`");
    Ok(())
}

fn port(reader: &mut Reader, value: &Value) -> Result<()> {
    let port = u16::try_from(value.count(0)?).map_err(|_| value.expected("a port up to 65535"))?;
    reader.claims.main_port = Some((port, value.source.clone()));
    reader.checked(value, "used by `tunesmith launch`");
    Ok(())
}

/// `all`, `0,1`, or a single number.
fn gpu_ids(reader: &mut Reader, value: &Value) -> Result<()> {
    let text = value.word()?;
    if text == "all" {
        return reader.same(value, "already so");
    }
    let ids: Result<Vec<usize>, _> = text.split(',').map(|id| id.trim().parse()).collect();
    let ids = ids.map_err(|_| value.expected("`all`, or numbers such as 0,1"))?;
    reader.claims.gpu_ids = Some((ids, value.source.clone()));
    reader.checked(value, "used by `tunesmith launch`");
    Ok(())
}

fn file(reader: &mut Reader, value: &Value) -> Result<()> {
    let Node::Str(path) = &value.node else { return Err(value.expected("a path")) };
    reader.deepspeed_file = Some((path.clone(), value.source.clone()));
    reader.checked(value, "read as train.deepspeed");
    Ok(())
}

/// `accelerate config` writes numbers in quotes.
fn clipping(reader: &mut Reader, value: &Value) -> Result<()> {
    if value.is_auto() {
        return reader.auto(value, "train.max_grad_norm");
    }
    reader.put(value, "train.max_grad_norm", value.node.clone(), "")
}

/// The kind of run, from what says it together.
pub(super) fn finish(reader: &mut Reader) -> Result<()> {
    let strategy = |text: &str| Node::Str(text.to_owned());
    let stage = reader.get("deepspeed_config.zero_stage");
    let Some(value) = reader.get("distributed_type") else {
        return stage
            .map_or(Ok(()), |stage| reader.not_needed(&stage, "it counts only with distributed_type: DEEPSPEED"));
    };
    let kind = value.word()?;
    if let Some(stage) = stage.clone().filter(|_| kind != "deepspeed") {
        reader.not_needed(&stage, "distributed_type is not DEEPSPEED")?;
    }
    match kind.as_str() {
        "no" => reader.put(&value, "train.strategy", strategy("single"), ""),
        "multi_gpu" | "multi_cpu" => reader.put(&value, "train.strategy", strategy("ddp"), ""),
        "fsdp" => reader.put(&value, "train.strategy", strategy("fsdp"), ""),
        "deepspeed" => match stage {
            Some(stage) => {
                let ours = match stage.count(0)? {
                    0 => "ddp",
                    1 => "zero1",
                    2 => "zero2",
                    3 => "zero3",
                    _ => return Err(stage.expected("0, 1, 2 or 3")),
                };
                reader.same(&value, "deepspeed_config says which stage")?;
                reader.put(&stage, "train.strategy", strategy(ours), "")
            }
            None if reader.deepspeed_file.is_some() => reader.same(&value, "its file says which stage"),
            None => reader.put(&value, "train.strategy", strategy("zero2"), "Accelerate's default stage"),
        },
        "megatron_lm" | "tpu" | "xla" | "multi_npu" | "multi_mlu" | "multi_sdaa" | "multi_musa" | "multi_xpu"
        | "multi_hpu" | "multi_neuron" => Err(value.refused(
            "supported: MULTI_GPU, MULTI_CPU, FSDP and DEEPSPEED, on the CPU or NVIDIA GPUs as model.device says",
        )),
        _ => Err(value.expected("one of NO, MULTI_CPU, MULTI_GPU, FSDP, DEEPSPEED")),
    }
}
