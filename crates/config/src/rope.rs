//! Rotary frequencies: the plain rule and the long-context rules of Transformers. Each step has the precision and the order of
//! Transformers, since the last bit of a frequency changes an angle at position 100,000.

/// How rotary frequencies are stretched for long contexts.
#[derive(Debug, Clone, PartialEq)]
pub enum RopeScaling {
    /// `rope_type: default`: the plain frequencies.
    None,
    /// `rope_type: linear`: every frequency divided by the factor. Chen et al., "Position Interpolation", 2023.
    Linear {
        /// What every frequency is divided by.
        factor: f64,
    },
    /// `rope_type: dynamic`: the base grows with a sequence that is longer than the model's context (NTK-aware).
    Dynamic {
        /// How fast the base grows with the length.
        factor: f64,
        /// The model's context in tokens.
        max_position_embeddings: usize,
    },
    /// `rope_type: yarn`: high frequencies stay, low ones are divided, a ramp between. Peng et al., "`YaRN`", 2023.
    Yarn {
        /// The divisor of the low frequencies.
        factor: f64,
        /// Rotations within the original context above which a frequency stays.
        beta_fast: f64,
        /// Rotations within the original context below which a frequency is divided.
        beta_slow: f64,
        /// Whether the ramp starts and ends at whole features.
        truncate: bool,
        /// Factor on cosines and sines.
        attention_factor: f64,
        /// Context length of the pretraining.
        original_max_position_embeddings: usize,
    },
    /// `rope_type: longrope`: a divisor for each frequency, one set for short sequences and one for long ones. Ding et
    /// al., "`LongRoPE`", 2024.
    LongRope {
        /// Divisors of a sequence within the original context, one for each pair of features.
        short_factor: Vec<f64>,
        /// Divisors of a longer sequence.
        long_factor: Vec<f64>,
        /// Factor on cosines and sines.
        attention_factor: f64,
        /// Context length of the pretraining.
        original_max_position_embeddings: usize,
    },
    /// `rope_type: proportional`: only the first pairs of a head turn, by the frequencies that they would have if all did (Gemma 4).
    /// The others have the frequency 0.
    Proportional {
        /// How many pairs of a head's features turn, from the first on.
        pairs: usize,
        /// What every frequency is divided by.
        factor: f64,
    },
    /// `rope_type: llama3`: low frequencies divided by `factor`, a smooth ramp between the two wavelengths.
    Llama3 {
        /// Divisor of the low frequencies.
        factor: f64,
        /// `original_max_position_embeddings / low_freq_factor` is the wavelength above which all is divided.
        low_freq_factor: f64,
        /// `original_max_position_embeddings / high_freq_factor` is the wavelength below which nothing changes.
        high_freq_factor: f64,
        /// Context length of the pretraining.
        original_max_position_embeddings: usize,
    },
}

impl RopeScaling {
    /// The longest context in tokens, for this `max_position_embeddings`: `linear`, `dynamic` and `yarn` extend it.
    pub fn reach(&self, max_position_embeddings: usize) -> usize {
        let stretched = match self {
            Self::Linear { factor } | Self::Dynamic { factor, .. } => factor * max_position_embeddings as f64,
            Self::Yarn { factor, original_max_position_embeddings, .. } => {
                factor * *original_max_position_embeddings as f64
            }
            Self::None | Self::LongRope { .. } | Self::Llama3 { .. } | Self::Proportional { .. } => 0.0,
        };
        max_position_embeddings.max(stretched as usize)
    }
}

impl std::fmt::Display for RopeScaling {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::None => write!(out, "not stretched"),
            Self::Linear { factor } => write!(out, "linear by {factor}"),
            Self::Dynamic { factor, .. } => write!(out, "dynamic by {factor}"),
            Self::Yarn { factor, .. } => write!(out, "yarn by {factor}"),
            Self::LongRope { original_max_position_embeddings: original, .. } => {
                write!(out, "longrope beyond {original} tokens")
            }
            Self::Llama3 { factor, .. } => write!(out, "llama3 by {factor}"),
            Self::Proportional { pairs, .. } => write!(out, "proportional, {pairs} pairs"),
        }
    }
}

/// A rotary position embedding: its base, its width and its scaling.
#[derive(Debug, Clone, PartialEq)]
pub struct Rope {
    /// Base of the frequencies: `rope_theta`, often 10000.
    pub theta: f64,
    /// Number of features of a head that are rotated, from the first on; even.
    pub rotary_dim: usize,
    /// Whether pairs are neighbouring features, as `DeepSeek` has them, and not one of each half.
    pub interleaved: bool,
    /// How frequencies are scaled for long contexts.
    pub scaling: RopeScaling,
}

/// A factor on queries that grows with the position: `1 + beta ln(1 + floor(position / original_max_position_embeddings))`.
/// Llama 4 has it, and Ministral 3.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct QueryScaling {
    /// How fast the factor grows with the logarithm of the position.
    pub beta: f64,
    /// Context length of the pretraining: below it the factor is 1.
    pub original_max_position_embeddings: usize,
}

impl QueryScaling {
    /// The factor at a position.
    pub fn factor(&self, position: usize) -> f32 {
        1.0 + self.beta as f32 * (1.0 + (position / self.original_max_position_embeddings) as f32).ln()
    }
}

/// The rotation of one sequence.
#[derive(Debug, Clone, PartialEq)]
pub struct Frequencies {
    /// `[rotary_dim / 2]`: the angle at position 1 in radians, for each pair of features.
    pub inv_freq: Vec<f32>,
    /// Factor on cosines and sines.
    pub attention_factor: f32,
}

impl Rope {
    /// The frequencies for a sequence of `tokens`, on which only `dynamic` and `longrope` depend. The length is that of the sequence
    /// itself, so that packing does not change the result.
    pub fn frequencies(&self, tokens: usize) -> Frequencies {
        let (inv_freq, attention_factor) = match &self.scaling {
            RopeScaling::None => (self.each(|power, _| 1.0 / power), 1.0),
            &RopeScaling::Linear { factor } => (self.each(|power, _| 1.0 / power / factor as f32), 1.0),
            &RopeScaling::Dynamic { factor, max_position_embeddings } => {
                let (dim, context) = (self.rotary_dim as f64, max_position_embeddings as f64);
                let reach = (factor * (tokens as f64).max(context) / context - (factor - 1.0)) as f32;
                let grown = self.theta as f32 * f64::from(reach).powf(dim / (dim - 2.0)) as f32;
                (Self { theta: f64::from(grown), ..self.clone() }.each(|power, _| 1.0 / power), 1.0)
            }
            &RopeScaling::Proportional { pairs, factor } => {
                let rule = |power, pair| if pair < pairs { 1.0 / power / factor as f32 } else { 0.0 };
                (self.each(rule), 1.0)
            }
            RopeScaling::Yarn { attention_factor, .. } => (self.yarn(), *attention_factor),
            RopeScaling::LongRope { short_factor, long_factor, attention_factor, original_max_position_embeddings } => {
                let long = tokens > *original_max_position_embeddings;
                let factors = if long { long_factor } else { short_factor };
                (self.each(|power, pair| 1.0 / (factors[pair] as f32 * power)), *attention_factor)
            }
            &RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_position_embeddings } => {
                let original = original_max_position_embeddings as f64;
                let rule = |power: f32, _| {
                    let inv_freq = 1.0 / power;
                    // PyTorch computes `scalar / tensor` as `tensor.reciprocal() * scalar`; so do we.
                    let wavelength = (1.0 / inv_freq) * (2.0 * std::f64::consts::PI) as f32;
                    if wavelength > (original / low_freq_factor) as f32 {
                        inv_freq / factor as f32
                    } else if wavelength < (original / high_freq_factor) as f32 {
                        inv_freq
                    } else {
                        let above = (1.0 / wavelength) * original as f32 - low_freq_factor as f32;
                        let smooth = above / (high_freq_factor - low_freq_factor) as f32;
                        (1.0 - smooth) * inv_freq / factor as f32 + smooth * inv_freq
                    }
                };
                (self.each(rule), 1.0)
            }
        };
        Frequencies { inv_freq, attention_factor: attention_factor as f32 }
    }

    /// Whether [`Rope::frequencies`] depends on the sequence length.
    pub const fn depends_on_length(&self) -> bool {
        matches!(self.scaling, RopeScaling::Dynamic { .. } | RopeScaling::LongRope { .. })
    }

    /// `rule(theta^(2 pair / rotary_dim), pair)` for each pair of features.
    fn each(&self, rule: impl Fn(f32, usize) -> f32) -> Vec<f32> {
        let power = |pair: usize| {
            let exponent = (2 * pair) as f32 / self.rotary_dim as f32;
            f64::from(self.theta as f32).powf(f64::from(exponent)) as f32
        };
        (0..self.rotary_dim / 2).map(|pair| rule(power(pair), pair)).collect()
    }

    fn yarn(&self) -> Vec<f32> {
        let RopeScaling::Yarn { factor, beta_fast, beta_slow, truncate, original_max_position_embeddings, .. } =
            self.scaling
        else {
            return Vec::new();
        };
        let (dim, context) = (self.rotary_dim as f64, original_max_position_embeddings as f64);
        // The (fractional) pair of features that rotates this many times within the original context.
        let feature =
            |rotations: f64| dim * (context / (rotations * 2.0 * std::f64::consts::PI)).ln() / (2.0 * self.theta.ln());
        let (mut low, mut high) = (feature(beta_fast), feature(beta_slow));
        if truncate {
            (low, high) = (low.floor(), high.ceil());
        }
        (low, high) = (low.max(0.0), high.min(dim - 1.0));
        if low == high {
            high += 0.001;
        }
        self.each(|power, pair| {
            let ramp = ((pair as f32 - low as f32) / (high - low) as f32).clamp(0.0, 1.0);
            let keep = 1.0 - ramp;
            1.0 / (factor as f32 * power) * (1.0 - keep) + 1.0 / power * keep
        })
    }
}

#[cfg(test)]
mod tests {
    use super::RopeScaling;

    #[test]
    fn rules_that_stretch_positions_let_rows_be_longer() {
        let yarn = |original_max_position_embeddings| RopeScaling::Yarn {
            factor: 4.0,
            beta_fast: 32.0,
            beta_slow: 1.0,
            truncate: true,
            attention_factor: 1.0,
            original_max_position_embeddings,
        };
        assert_eq!(RopeScaling::None.reach(64), 64);
        assert_eq!(RopeScaling::Linear { factor: 2.5 }.reach(64), 160);
        assert_eq!(RopeScaling::Dynamic { factor: 2.0, max_position_embeddings: 64 }.reach(64), 128);
        assert_eq!((yarn(32).reach(128), yarn(32).reach(32)), (128, 128));
        assert_eq!(RopeScaling::Linear { factor: f64::MAX }.reach(64), usize::MAX);
    }
}
