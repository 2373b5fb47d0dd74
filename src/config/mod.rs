//! Layer 1: the typed YAML schema, how a value is found (defaults, files, environment, words, flags), and what
//! combinations are refused. Each setting is defined once, in [`schema`].
mod choice;
mod option;
pub mod schema;
mod value;

pub use choice::{BuiltinTemplate, TargetModules, Truncation};
pub use choice::{EvalStrategy, Format, Init, InitLora, LossOn, LrScheduler, Mode, Resume, SaveStrategy};
pub use option::{Fixed, OptionDef, Range, Scalar, Section, env_name, nearest};
pub use schema::{
    Config, DataConfig, GenerationConfig, LoggingConfig, LoraConfig, ModelConfig, TrainConfig, TuningConfig,
};
pub use value::{ConfigValue, Node, Patterns, Refusal};
