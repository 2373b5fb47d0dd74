//! The lines before step 1: what the run will do, from its plan and its data.
use super::data_summary;
use super::prepared::Prepared;
use super::run_plan::RunPlan;
use tunesmith_base::words;
use tunesmith_config::{Backend, Mode, Quantization};
use tunesmith_model::weights::WeightFiles;
use tunesmith_plan::batches::Batches;
use tunesmith_plan::rates::{Rate, rates};
use tunesmith_plan::{grouped, human_bytes};
use tunesmith_telemetry::progress::{Event, Observer};

/// Why a run shows no answers to held-out rows.
const NO_SAMPLES: &str = "note: no samples before and after training, since no rows are held out: set data.split, such as data.split=0.05, or data.val_path";

impl Prepared {
    /// Reports the plan of the run, then [`Self::report_notes`].
    pub fn announce(&self, observer: &dyn Observer) {
        let plan = &self.plan;
        let mut facts = vec![
            ("model".to_owned(), plan.model.summary.clone()),
            ("output".to_owned(), plan.output_dir.display().to_string()),
            ("platform".to_owned(), plan.ranks.platform.clone()),
            ("kernels".to_owned(), format!("{}, {}", plan.engine.kernels, plan.engine.simd)),
        ];
        if let Some(vision) = &self.source.arch.vision {
            facts.push(("image encoder".to_owned(), vision.described()));
            facts.extend(vision.world.iter().map(|world| ("second encoder".to_owned(), world.described())));
        }
        if let Some(device) = &plan.engine.device_name {
            facts.push(("device".to_owned(), device.clone()));
        }
        if plan.ranks.count > 1 {
            facts.push(("ranks".to_owned(), plan.ranks.summary.clone()));
        }
        let state = human_bytes(plan.memory.optimizer_state);
        let average = if plan.optimizer.ema_decay.is_some() { " and a moving average" } else { "" };
        let shared = plan.parallel.shards_optimizer();
        let among = if shared { format!(", shared among {} ranks", plan.ranks.count) } else { String::new() };
        let host = if plan.optimizer_on_host { " · computed by the processor, tensor by tensor" } else { "" };
        facts.push((
            "optimizer".to_owned(),
            format!("{}{average} · {state} of state{among}{host}", plan.optimizer_name),
        ));
        if plan.saving.copy_bytes > 0 && !shared {
            let text =
                format!("{} for saving in the background (train.save_async)", human_bytes(plan.saving.copy_bytes));
            facts.push(("checkpoint copy".to_owned(), text));
        }
        facts.extend(trained(self));
        facts.extend(data_summary::labels(&self.dataset));
        if let Some(budget) = plan.memory.budget {
            let origin = if plan.memory.configured.is_some() { "" } else { ": 90 % of what is free" };
            facts.push(("memory budget".to_owned(), format!("{}{origin}", human_bytes(budget))));
        }
        if let Some(validation) = &self.dataset.validation {
            facts.push(("validation rows".to_owned(), grouped(validation.len() as u64)));
        }
        if let Some(text) = predicted(plan) {
            facts.push(("memory".to_owned(), text));
        }
        if let Some(resume) = &self.resume {
            facts.push(("resumes from".to_owned(), resume.dir.display().to_string()));
        }
        let resumed_at = self.resume.as_ref().map_or(0, |resume| resume.state.step);
        let (rates, scaled) = (&rate_table(plan), plan.lr_scaling.as_deref());
        observer.event(&Event::Plan { facts: &facts, batches: &plan.steps, rates, scaled, resumed_at });
        self.report_notes(observer);
    }

    /// Reports notes on the plan: what `tuning.backend` means here if it names another toolkit, and why there will be no
    /// samples.
    pub fn report_notes(&self, observer: &dyn Observer) {
        if let Some(remark) = backend_note(&self.plan) {
            observer.event(&Event::Notice(&remark));
        }
        let dataset = &self.dataset;
        let held_out = dataset.validation.is_some() || dataset.test.is_some();
        if self.plan.samples.rows > 0 && !held_out {
            observer.event(&Event::Notice(NO_SAMPLES));
        }
    }
}

/// A note that explains a `tuning.backend` that is the name of another toolkit.
fn backend_note(plan: &RunPlan) -> Option<String> {
    let backend = plan.engine.backend;
    if !matches!(backend, Backend::Unsloth | Backend::Bnb) {
        return None;
    }
    let held = match plan.engine.quantized {
        None => format!("dense base weights ({}): nothing is quantized", plan.engine.base_dtype),
        Some(Quantization::Auto) => "base weights as the checkpoint's maker has quantized them".to_owned(),
        Some(format) => format!("base weights in {format}"),
    };
    Some(format!("tuning.backend = {backend} means fused kernels and the base that tuning.mode needs, here {held}"))
}

/// The predicted peak memory of the process, in words.
fn predicted(plan: &RunPlan) -> Option<String> {
    let peak = plan.memory.predicted?;
    let rank = peak.rank;
    let each = match peak.ranks_in_process {
        1 => String::new(),
        ranks => format!("{ranks} ranks in one process, {} each: ", human_bytes(rank.total())),
    };
    Some(format!(
        "{} at most, predicted: {each}{} of weights, {} of activations (`tunesmith plan` shows the parts)",
        human_bytes(peak.process()),
        human_bytes(rank.weights),
        human_bytes(rank.kept + rank.work)
    ))
}

/// The learning rate at the start, after the warm-up, at each quarter of the run, and at the end.
pub fn rate_table(plan: &RunPlan) -> Vec<Rate> {
    let Batches { total_steps, warmup_steps, .. } = plan.steps;
    rates(total_steps, warmup_steps, |step| plan.schedule.lr(step))
}

/// Facts about what is trained: the number of parameters, their share of all (as PEFT counts them), and with `tuning.freeze` the tensor names.
fn trained(prepared: &Prepared) -> Vec<(String, String)> {
    let Prepared { plan, source, .. } = prepared;
    let (trained, all) = (plan.model.trained_parameters, plan.model.all_parameters);
    let share = 100.0 * trained as f64 / all.max(1) as f64;
    let counted = format!("{} parameters, {share:.3} % of all {}", grouped(trained), grouped(all));
    let mut facts = vec![("trained".to_owned(), counted)];
    if plan.model.mode == Mode::Freeze {
        let names = &plan.model.trained_in_full;
        facts.push((format!("its {}", words::count(names.len(), "tensor")), by_block(names)));
    }
    if let Ok(Some(how)) = source.quantization() {
        let matrices = words::count(source.quantized_matrices(), "matrix");
        let stored = source.arch.stored.as_ref();
        let mut text = match stored.filter(|_| how.format.is_makers()) {
            Some(format) => format!("{}: {matrices}, as the checkpoint has them", format.describe()),
            None => format!("{}: {matrices}", how.describe()),
        };
        if source.weights.as_deref().is_some_and(WeightFiles::has_activation_scales) {
            text.push_str("; its scales of activations are ignored, since activations are not quantized");
        }
        facts.push(("base".to_owned(), text));
    }
    if !plan.model.merged_adapters.is_empty() {
        let dirs: Vec<_> = plan.model.merged_adapters.iter().map(|dir| dir.display().to_string()).collect();
        facts.push(("merged adapters".to_owned(), dirs.join(", ")));
    }
    if !source.arch.token_rows.is_empty() {
        facts.push(("trained tokens".to_owned(), format!("ids {:?}", source.arch.token_rows.ids())));
    }
    facts
}

/// Tensor names, grouped over blocks: `model.layers.{2,3}.mlp.up_proj.weight`.
fn by_block(names: &[String]) -> String {
    let mut kinds: Vec<(String, String, Vec<&str>)> = Vec::new();
    for name in names {
        let parts = name.strip_prefix("model.layers.").and_then(|rest| rest.split_once('.'));
        let (before, block, after) =
            parts.map_or((name.as_str(), None, ""), |(block, rest)| ("model.layers", Some(block), rest));
        match kinds.iter_mut().find(|(kind, rest, _)| kind == before && rest == after) {
            Some((_, _, blocks)) => blocks.extend(block),
            None => kinds.push((before.to_owned(), after.to_owned(), block.into_iter().collect())),
        }
    }
    let show = |(before, after, blocks): &(String, String, Vec<&str>)| match blocks.as_slice() {
        [] => before.clone(),
        [one] => format!("{before}.{one}.{after}"),
        many => format!("{before}.{{{}}}.{after}", many.join(",")),
    };
    kinds.iter().map(show).collect::<Vec<_>>().join(" ")
}
