//! What forward keeps for backward, as it is or in sixteen bits.
use tunesmith_ops::activation::Act;
use tunesmith_ops::narrow::{Half, Narrow};

/// An activation that waits for the backward pass.
#[derive(Debug)]
pub enum Kept {
    Wide(Act),
    Narrow(Narrow),
}

impl Kept {
    pub fn new(act: Act, half: Option<Half>) -> Self {
        match half {
            Some(half) => Self::Narrow(Narrow::new(&act, half)),
            None => Self::Wide(act),
        }
    }

    pub fn restore(self) -> Act {
        match self {
            Self::Wide(act) => act,
            Self::Narrow(narrow) => narrow.widen(),
        }
    }
}
