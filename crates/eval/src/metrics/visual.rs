//! The usual metrics for answers about images, by name.

/// A metric of captions, or of answers to questions about images. It reads only texts, so any row may have it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum VisualMetric {
    /// `CIDEr` of captions, 0 to 10, over several references ([`super::cider`]).
    Cider,
    /// The accuracy of VQA v2, 0 to 1, by several people's answers ([`super::vqa`]).
    VqaAccuracy,
    /// Whether the answer chooses the reference's letter ([`super::choice::letter`]).
    Choice,
    /// Accuracy, precision, recall and F1 of yes ([`super::choice::yes_no`]).
    YesNo,
}

impl VisualMetric {
    /// Every metric of this type.
    pub const ALL: [Self; 4] = [Self::Cider, Self::VqaAccuracy, Self::Choice, Self::YesNo];

    /// The metric with this name, such as `vqa_accuracy`.
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|metric| metric.name() == name)
    }

    /// The name in settings and results.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Cider => "cider",
            Self::VqaAccuracy => "vqa_accuracy",
            Self::Choice => "choice",
            Self::YesNo => "yes_no",
        }
    }
}
