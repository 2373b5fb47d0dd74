//! What forward keeps for backward, as it is or in sixteen bits.
use tunesmith_ops::activation::Activation;
use tunesmith_ops::narrow::{Half, Narrow};

/// An activation that waits for the backward pass.
#[derive(Debug)]
pub enum Kept {
    Wide(Activation),
    Narrow(Narrow),
}

impl Kept {
    pub fn new(act: Activation, half: Option<Half>) -> Self {
        match half {
            // In these sixteen bits already.
            Some(half) if act.number() == half.number() => Self::Wide(act),
            Some(half) => Self::Narrow(Narrow::new(&act, half)),
            None => Self::Wide(act),
        }
    }

    pub fn restore(self) -> Activation {
        match self {
            Self::Wide(act) => act,
            Self::Narrow(narrow) => narrow.widen(),
        }
    }
}
