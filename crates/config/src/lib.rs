//! The typed YAML schema, how a value is found (defaults, files, environment, words, flags), and what
//! combinations are refused. Each setting is defined once, in [`schema`].
pub mod adapters;
pub mod arch;
pub mod arguments;
mod choice;
mod choices;
mod datasets;
pub mod docs;
mod families;
pub mod foreign;
mod hf_json;
mod labels;
mod later;
pub(crate) mod option;
mod pattern;
pub mod resolve;
mod rope;
mod rope_json;
pub mod schema;
mod score;
mod shapes;
mod sizes;
pub mod task;
mod tied;
mod unread;
mod validate;
mod value;
mod variables;
mod vocabulary;
mod wrapped;
mod yaml;

pub use arguments::Arguments;
pub use choice::{
    Backend, BeamStop, Bias, BuiltinTemplate, Contamination, Dedupe, MixStrategy, Sharding, TargetModules, Truncation,
};
pub use choice::{
    Dtype, EvalStrategy, Format, GradDtype, Init, InitLora, LossOn, LrScheduler, Mode, Optim, Quantization, Resume,
};
pub use choice::{EvalMetric, LrScaling, Normalization, RankBackend, SaveStrategy, Strategy, Task};
pub use datasets::DatasetSpec;
pub use labels::{ClassWeights, Labels};
pub use option::{OptionDef, Range, Scalar, Section, env_name, nearest, variable};
pub use pattern::Pattern;
pub use resolve::{Flag, Resolved, Setting, Source};
pub use resolve::{load, load_optional, load_partial, load_text, try_setting, unquoted};
pub use schema::{
    Config, DataConfig, EvalConfig, FreezeConfig, GenerationConfig, LoggingConfig, ModelConfig, TopConfig, TrainConfig,
    TuningConfig,
};
pub use shapes::shape;
pub use sizes::{Auto, Bytes, Checkpointing, Policy};
pub use unread::unread;
pub use validate::{greater_is_better, is_hub_name};
pub use value::{ConfigValue, Node, Patterns, Refusal};
pub use yaml::{parse_yaml, read_mapping};
