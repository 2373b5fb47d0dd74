//! The form in which a run holds the matrices of its base: the quantization format, and how stamps and messages name
//! it.
use tunesmith_config::Quantization;
use tunesmith_config::stored_format::Layout;
use tunesmith_ops::quant::Format;

/// How a base's matrices are quantized: the format, and whether the scales are quantized too.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct How {
    /// NF4, FP4, int8 or FP8; or a maker's format, which only the maker's files have.
    pub format: Format,
    /// Double quantization: the scales are quantized too.
    pub double: bool,
}

impl How {
    /// The value of `model.quantization` for this format.
    pub const fn setting(self) -> Quantization {
        match self.format {
            Format::Nf4 => Quantization::Nf4,
            Format::Fp4 => Quantization::Fp4,
            Format::Int8 => Quantization::Int8,
            Format::Fp8 => Quantization::Fp8,
            Format::Mxfp4 => Quantization::Mxfp4,
            Format::Fp8Tiles(_) | Format::Int4Groups | Format::Int8Groups | Format::Nvfp4 => Quantization::Auto,
        }
    }

    /// In words, such as `nf4 with double quantization`.
    pub fn describe(self) -> String {
        let nested = self.double && matches!(self.format, Format::Nf4 | Format::Fp4);
        let double = if nested { " with double quantization" } else { "" };
        format!("{}{double}", self.format.words())
    }
}

/// The format's name in a stamp, with the size of its tiles.
fn name(format: Format) -> String {
    match format {
        Format::Fp8Tiles([rows, columns]) => format!("{} {rows} x {columns}", format.name()),
        _ => format.name().to_owned(),
    }
}

/// The format of matrices that files store in this layout.
pub const fn format_of(layout: Layout) -> Format {
    const fn small(size: usize) -> u32 {
        if size > u32::MAX as usize { u32::MAX } else { size as u32 }
    }
    match layout {
        Layout::Mxfp4 => Format::Mxfp4,
        Layout::Nvfp4 => Format::Nvfp4,
        Layout::Fp8 { tile: [rows, columns] } => Format::Fp8Tiles([small(rows), small(columns)]),
        Layout::Integers { bits: 4, .. } => Format::Int4Groups,
        Layout::Integers { .. } => Format::Int8Groups,
    }
}

/// The form in which a run holds the matrices of its base, as its stamp records it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Held {
    /// The format of the matrices.
    pub how: How,
    /// The modules that are not quantized: `model.quantization_skip_modules`.
    pub skip: Vec<String>,
}

impl Held {
    /// As a stamp has it: `nf4, double true, but for ["q_proj"]`, or `none`.
    pub fn describe(held: Option<&Self>) -> String {
        let Some(Self { how: How { format, double }, skip }) = held else { return "none".into() };
        match format {
            Format::Nf4 | Format::Fp4 => format!("{}, double {double}, but for {skip:?}", format.name()),
            _ => format!("{}, but for {skip:?}", name(*format)),
        }
    }

    /// In words, such as `nf4 with double quantization, except lm_head`.
    pub fn in_words(&self) -> String {
        let except = if self.skip.is_empty() { String::new() } else { format!(", except {}", self.skip.join(", ")) };
        format!("{}{except}", self.how.describe())
    }

    /// Turns text that [`Held::describe`] has written into the keys of a configuration, such as
    /// `nf4 with double_quant: true`. Other text stays as it is.
    pub fn as_set(text: &str) -> String {
        let Some(Some(held)) = Self::parse(text) else { return text.to_owned() };
        let Self { how: How { format, double }, skip } = &held;
        if held.how.setting() == Quantization::Auto {
            return held.in_words();
        }
        let double = matches!(format, Format::Nf4 | Format::Fp4).then(|| format!("double_quant: {double}"));
        let skip = (!skip.is_empty()).then(|| format!("quantization_skip_modules: [{}]", skip.join(", ")));
        let more: Vec<String> = double.into_iter().chain(skip).collect();
        let with = if more.is_empty() { "" } else { " with " };
        format!("{}{with}{}", format.name(), more.join(" and "))
    }

    /// Reads text that [`Held::describe`] has written; `None` for any other text, and `Some(None)` for `none`.
    pub fn parse(text: &str) -> Option<Option<Self>> {
        if text == "none" {
            return Some(None);
        }
        let (how, skip) = text.split_once(", but for ")?;
        let (name, double) = how.split_once(", double ").unwrap_or((how, "false"));
        let formats = [
            Format::Nf4,
            Format::Fp4,
            Format::Int8,
            Format::Fp8,
            Format::Mxfp4,
            Format::Int4Groups,
            Format::Int8Groups,
            Format::Nvfp4,
        ];
        let tiles = || {
            let (rows, columns) = name.strip_prefix("fp8_tiles ")?.split_once(" x ")?;
            Some(Format::Fp8Tiles([rows.parse().ok()?, columns.parse().ok()?]))
        };
        let format = formats.into_iter().find(|format| format.name() == name).or_else(tiles)?;
        let held = Self { how: How { format, double: double == "true" }, skip: serde_json::from_str(skip).ok()? };
        (Self::describe(Some(&held)) == text).then_some(Some(held))
    }
}

#[cfg(test)]
mod tests {
    use super::{Format, Held, How};

    #[test]
    fn a_stamp_s_words_are_read_back() {
        let skip = vec!["q_proj".to_owned(), "model.layers.0".to_owned()];
        for (format, double) in [
            (Format::Nf4, true),
            (Format::Fp4, false),
            (Format::Int8, false),
            (Format::Fp8, false),
            (Format::Mxfp4, false),
            (Format::Fp8Tiles([128, 64]), false),
            (Format::Int4Groups, false),
            (Format::Int8Groups, false),
            (Format::Nvfp4, false),
        ] {
            let held = Held { how: How { format, double }, skip: skip.clone() };
            assert_eq!(Held::parse(&Held::describe(Some(&held))), Some(Some(held)));
        }
        assert_eq!(Held::parse(&Held::describe(None)), Some(None));
        let set = |text: &str| Held::as_set(text);
        assert_eq!(set("nf4, double true, but for []"), "nf4 with double_quant: true");
        let skips = r#"fp4, double false, but for ["q_proj", "lm_head"]"#;
        assert_eq!(set(skips), "fp4 with double_quant: false and quantization_skip_modules: [q_proj, lm_head]");
        assert_eq!([set("int8, but for []"), set("none"), set("of tomorrow")], ["int8", "none", "of tomorrow"]);
        for text in ["", "nf4", "nf5, double true, but for []", "nf4, but for []", "nf4, double yes, but for []"] {
            assert_eq!(Held::parse(text), None, "{text}");
        }
    }
}
