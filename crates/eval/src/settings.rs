//! How answers are generated: their length, what ends them, and how the next token is chosen.
use super::beam::{BeamEarlyStopping, Beams};
use super::processors::Processors;
use super::prompt_lookup::PromptLookup;
use super::sample::Sampling;
use tunesmith_config::{BeamStop, Config, GenerationConfig};
use tunesmith_device::Device;

/// The default of [`Settings::pass_tokens`].
const PASS_TOKENS: usize = 4096;

/// Texts side by side on the CPU: a panel of the matrix products has 16 tokens, which cost little more than one.
const ON_CPU: usize = 16;

/// Texts side by side on a GPU, where more texts than on the CPU share one reading of the weights. Not measured on a GPU yet.
const ON_GPU: usize = 128;

/// How the next token is chosen.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Strategy {
    /// Take the most probable token.
    Greedy,
    /// Draw from the distribution of the next token.
    Sample(Sampling),
    /// Keep the most probable continuations side by side.
    Beams(Beams),
}

/// Settings of a generation, as in Transformers' `GenerationConfig`.
#[derive(Debug, Clone, PartialEq)]
pub struct Settings {
    /// The longest answer in tokens.
    pub max_new_tokens: usize,
    /// The longest text, prompt and answer together: the model's context.
    pub context: usize,
    /// Tokens that end an answer; they are not part of it.
    pub stop_ids: Vec<u32>,
    /// Repetition penalty on tokens of the prompt and the answer; 1 does nothing.
    pub repetition_penalty: f64,
    /// No sequence of so many tokens occurs twice in prompt and answer; 0 for no such rule.
    pub no_repeat_ngram_size: usize,
    /// No stop id ends an answer before it has so many tokens.
    pub min_new_tokens: usize,
    /// How the next token is chosen.
    pub strategy: Strategy,
    /// Prompt lookup decoding: how next tokens are guessed and checked in one pass. `None` generates one token at a time.
    pub lookup: Option<PromptLookup>,
    /// The number of the first text; with the seed it determines what is sampled.
    pub first_text: u64,
    /// The most tokens of several prompts in one forward pass. One prompt alone may be longer.
    pub pass_tokens: usize,
    /// Texts, or beams, that are answered side by side; `None` for the number that suits the device.
    pub batch_size: Option<usize>,
}

impl Settings {
    /// Greedy decoding, without processors of scores.
    pub const fn greedy(max_new_tokens: usize, context: usize, stop_ids: Vec<u32>) -> Self {
        Self {
            max_new_tokens,
            context,
            stop_ids,
            repetition_penalty: 1.0,
            no_repeat_ngram_size: 0,
            min_new_tokens: 0,
            strategy: Strategy::Greedy,
            lookup: None,
            first_text: 0,
            pass_tokens: PASS_TOKENS,
            batch_size: None,
        }
    }

    /// How many texts, or beams, `device` answers side by side.
    pub fn texts_at_once(&self, device: Device) -> usize {
        self.batch_size.unwrap_or(if matches!(device, Device::Cuda(_)) { ON_GPU } else { ON_CPU })
    }

    /// The rules that change scores before a token is chosen.
    pub fn processors(&self) -> Processors<'_> {
        Processors {
            repetition_penalty: self.repetition_penalty as f32,
            no_repeat_ngram_size: self.no_repeat_ngram_size,
            min_new_tokens: self.min_new_tokens,
            stop_ids: &self.stop_ids,
        }
    }

    /// The settings of a configuration's section `gen`.
    pub fn new(config: &Config, context: usize, stop_ids: Vec<u32>) -> Self {
        let generation: &GenerationConfig = &config.generation;
        let (draws, beams) = (generation.do_sample, generation.num_beams);
        let strategy = match beams {
            1 if draws => Strategy::Sample(Sampling {
                temperature: generation.temperature,
                top_k: generation.top_k,
                top_p: generation.top_p,
                min_p: generation.min_p,
                seed: generation.seed.unwrap_or(config.train.seed),
            }),
            1 => Strategy::Greedy,
            count => Strategy::Beams(Beams {
                count,
                length_penalty: generation.length_penalty,
                early_stopping: match generation.early_stopping {
                    BeamStop::False => BeamEarlyStopping::Heuristic,
                    BeamStop::True => BeamEarlyStopping::Full,
                    BeamStop::Never => BeamEarlyStopping::Never,
                },
            }),
        };
        Self {
            max_new_tokens: generation.max_new_tokens,
            repetition_penalty: generation.repetition_penalty,
            no_repeat_ngram_size: generation.no_repeat_ngram_size,
            min_new_tokens: generation.min_new_tokens,
            strategy,
            lookup: (generation.prompt_lookup_num_tokens > 0).then_some(PromptLookup {
                num_tokens: generation.prompt_lookup_num_tokens,
                max_ngram: generation.max_matching_ngram_size,
            }),
            pass_tokens: config.train.max_tokens_per_pass.unwrap_or(PASS_TOKENS),
            batch_size: generation.batch_size,
            ..Self::greedy(0, context, stop_ids)
        }
    }
}
