//! The resolved settings of a run, for `config.resolved.yaml`.
use tunesmith_config::{Config, ConfigValue as _, Resolved, Setting, Source};
use tunesmith_model::adapters::KINDS;

/// The settings with which another run is the same run. Measured sizes replace `auto`, the model's limit replaces a longer row
/// length, and a commit replaces a branch.
///
/// `train.resume_from_checkpoint` is left out. If the run starts from an adapter, which has its own settings, the defaults of
/// its section are left out, too.
pub fn settings(resolved: &Resolved, config: &Config) -> Vec<Setting> {
    let mut settings = resolved.settings.clone();
    // The targets of measured sizes are left out, because the sizes are now numbers.
    let train = &resolved.config.train;
    let measured = train.batch_size.given().is_none() || train.grad_accum.given().is_none();
    let aims = ["train.effective_batch", "train.target_tokens_per_device_step"];
    settings.retain(|setting| !(measured && aims.contains(&setting.key.as_str())));
    settings.retain(|setting| {
        let section = setting.key.rsplit_once('.').map_or("", |(section, _)| section);
        let shapes = KINDS.iter().any(|about| about.section.name == section);
        let of_adapter = config.tuning.adapter.is_some() && shapes;
        setting.key != "train.resume_from_checkpoint" && !(of_adapter && setting.source == Source::Default)
    });
    for setting in &mut settings {
        match setting.key.as_str() {
            "model.max_seq_len" => setting.value = config.model.max_seq_len.into(),
            "data.labels" => setting.value = config.data.labels.to_json(),
            "train.batch_size" => setting.value = config.train.batch_size.to_json(),
            "train.grad_accum" => setting.value = config.train.grad_accum.to_json(),
            "train.gradient_checkpointing" => setting.value = config.train.gradient_checkpointing.to_json(),
            "train.max_tokens_per_pass" => setting.value = config.train.max_tokens_per_pass.to_json(),
            // A branch may change, a commit does not.
            "model.revision" => setting.value = config.model.revision.clone().into(),
            _ => {}
        }
    }
    settings
}
