//! The state of a run besides its tensors (`state.json`): with it, resume continues exactly where the run stopped.
use serde::{Deserialize, Serialize};

/// Counters and positions of a run between two optimizer steps.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TrainState {
    /// Optimizer steps done, skipped ones included; names the checkpoint.
    pub step: u64,
    /// Finished epochs, with the fraction of the current one.
    #[serde(with = "exact")]
    pub epoch: f64,
    /// The position in the data, as the sampler stores it.
    pub sampler: serde_json::Value,
    /// How many updates the optimizer has made. Its bias correction depends on this number.
    pub optimizer_step: u64,
    /// How many of them were of rows with images, if something of image encoder or connector is trained. `None`: all of them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub optimizer_image_step: Option<u64>,
    /// The optimizer's state that belongs to no tensor.
    #[serde(with = "exact_list")]
    pub optimizer_scalars: Vec<f64>,
    /// The best value of the evaluation metric so far.
    #[serde(with = "exact_option", alias = "best_loss")]
    pub best_metric: Option<f64>,
    /// The name of that metric; `None` if it is the loss.
    #[serde(default)]
    pub best_metric_name: Option<String>,
    /// The step of that evaluation.
    pub best_step: Option<u64>,
    /// The step of the last evaluation.
    pub evaluated_step: u64,
    /// Evaluations in a row without improvement.
    pub evaluations_without_improvement: u64,
    /// Steps in a row that were skipped because of NaN or infinity.
    pub nonfinite_in_a_row: u64,
    /// All steps that were skipped because of NaN or infinity.
    pub nonfinite_total: u64,
    /// Tokens of the batches trained on so far.
    pub tokens: u64,
    /// Label tokens seen in training.
    pub label_tokens: u64,
    /// Seed of initialisation and dropout.
    pub seed: u64,
    /// Seed of the data's order.
    pub data_seed: u64,
    /// The most tokens of a pass, if the memory required fewer than the configuration allows.
    #[serde(default)]
    pub max_tokens_per_pass: Option<usize>,
    /// The chosen gradient checkpointing, if the configuration left the choice to a measurement.
    #[serde(default)]
    pub gradient_checkpointing: Option<serde_json::Value>,
    /// The planned number of steps, on which the learning rate schedule depends.
    #[serde(default)]
    pub total_steps: Option<u64>,
}

/// Stores an f64 as text. JSON readers may round its last digit, and resume must be bit-exact.
mod exact {
    use serde::{Deserialize, Deserializer, Serializer, de::Error};

    #[allow(clippy::trivially_copy_pass_by_ref)] // serde's signature
    pub fn serialize<S: Serializer>(value: &f64, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(&format_args!("{value:?}"))
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<f64, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(D::Error::custom)
    }
}

/// As [`exact`], for an optional number.
mod exact_option {
    use serde::{Deserialize, Deserializer, Serializer, de::Error};

    #[allow(clippy::ref_option)] // serde's signature
    pub fn serialize<S: Serializer>(value: &Option<f64>, serializer: S) -> Result<S::Ok, S::Error> {
        match value {
            Some(value) => super::exact::serialize(value, serializer),
            None => serializer.serialize_none(),
        }
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<f64>, D::Error> {
        let text = Option::<String>::deserialize(deserializer)?;
        text.map(|text| text.parse().map_err(D::Error::custom)).transpose()
    }
}

/// As [`exact`], for a list.
mod exact_list {
    use serde::{Deserialize, Deserializer, Serializer, de::Error};

    pub fn serialize<S: Serializer>(values: &[f64], serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(values.iter().map(|value| format!("{value:?}")))
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<f64>, D::Error> {
        let texts = Vec::<String>::deserialize(deserializer)?;
        texts.iter().map(|text| text.parse().map_err(D::Error::custom)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::TrainState;

    #[test]
    fn every_number_comes_back_to_the_bit() {
        let awkward = [0.1 + 0.2, 1.0 / 3.0, f64::MIN_POSITIVE / 3.0, 1e300 / 7.0, f64::MAX, -0.0];
        for value in awkward {
            let state = TrainState {
                epoch: value,
                best_metric: Some(value),
                optimizer_scalars: vec![value, 1.0],
                step: u64::MAX,
                sampler: serde_json::json!({"seed": u64::MAX, "step": 3}),
                ..TrainState::default()
            };
            let text = serde_json::to_string(&state).unwrap();
            let back: TrainState = serde_json::from_str(&text).unwrap();
            assert_eq!(back, state);
            assert_eq!(back.epoch.to_bits(), value.to_bits());
            assert_eq!(back.optimizer_scalars[0].to_bits(), value.to_bits());
        }
    }
}
