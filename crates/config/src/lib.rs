//! What a user may configure, and what a model folder's `config.json` says.
//!
//! Each setting is defined once, in [`schema`]. [`load`] finds its value: defaults, files, environment, `KEY=VALUE` overrides, flags.
//! [`arch`] describes the decoder.
pub mod adapters;
mod apply_foreign;
pub mod arch;
mod arch_json;
mod arch_parts;
mod arch_tensors;
pub mod arguments;
mod auto_values;
pub mod bitsandbytes;
mod classification_head;
mod datasets;
mod decoder_json;
pub mod docs;
mod encoder_decoder;
mod enum_macro;
mod enums;
mod experts;
mod families;
mod family;
pub mod foreign;
mod foreign_values;
mod gguf_input;
mod grow_vocabulary;
mod hf_json;
mod interval;
mod json_comments;
mod key_types;
mod labels;
mod latent_json;
mod lookup;
mod mixed_values;
mod mixers;
mod mixers_json;
mod model_choice;
mod module_key;
mod module_names;
mod modules_to_save;
mod option;
mod pattern;
mod quantile;
mod resolve;
mod resolved;
mod resolver;
mod rope;
mod rope_json;
pub mod schema;
mod shapes;
mod source;
pub mod stored_format;
mod suggest;
pub mod task;
mod template_kwargs;
mod tensor_specs;
mod tied;
mod unsupported_keys;
mod unused_keys;
mod validate;
mod value;
mod variables;
pub mod vision;
mod vision_settings;
mod vocabulary;
mod wrapped;
mod wrapped_json;
mod yaml;

pub use arguments::Arguments;
pub use auto_values::{Auto, Bytes, Checkpointing, Policy};
pub use datasets::DatasetSpec;
pub use enums::{
    Backend, BadImages, Bias, BuiltinTemplate, ConnectorChoice, Contamination, Dedupe, Dtype, EvalMetric, EvalStrategy,
    Format, GradDtype, ImageBackend, Init, LossOn, LrScaling, LrScheduler, MixStrategy, Mode, Normalization, Optim,
    ProjectionArchitecture, Quantization, RankBackend, SaveStrategy, Sharding, Strategy, Task, Truncation,
    WorldProjection,
};
pub use families::FAMILIES;
pub use gguf_input::{INSTEAD_OF_GGUF, is_gguf, refuse_gguf};
pub use interval::Interval;
pub use labels::{ClassWeights, Labels};
pub use lookup::unquoted;
pub use mixed_values::{BeamStop, DeviceChoice, InitLora, Resume, TargetModules};
pub use model_choice::is_hub_name;
pub use module_key::ModuleKey;
pub use option::{Range, Scalar, env_name, variable};
pub use pattern::Pattern;
pub use resolve::{Flag, load, load_optional, load_partial, load_text, try_setting};
pub use resolved::Resolved;
pub use schema::{
    Config, DataConfig, EvalConfig, FreezeConfig, GenerationConfig, LoggingConfig, ModelConfig, OptionDef, Section,
    TopConfig, TrainConfig, TuningConfig, VisionConfig, WorldConfig,
};
pub use shapes::shape;
pub use source::{Setting, Source};
pub use suggest::nearest;
pub use template_kwargs::{RESERVED_KWARGS, TemplateKwargs};
pub use unused_keys::unused_keys;
pub use validate::greater_is_better;
pub use value::{ConfigValue, Node, Patterns, Refusal};
pub use yaml::{parse_yaml, read_mapping};
