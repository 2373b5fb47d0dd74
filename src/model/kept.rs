//! What forward keeps for backward, as it is or in bfloat16.
use crate::ops::narrow::Narrow;
use crate::ops::panel::Act;

/// An activation that waits for the backward pass.
#[derive(Debug)]
pub enum Kept {
    /// In f32.
    Wide(Act),
    /// In bfloat16.
    Narrow(Narrow),
}

impl Kept {
    /// Keeps `act`.
    pub fn new(act: Act, narrow: bool) -> Self {
        if narrow { Self::Narrow(Narrow::new(&act)) } else { Self::Wide(act) }
    }

    /// What was kept.
    pub fn restore(self) -> Act {
        match self {
            Self::Wide(act) => act,
            Self::Narrow(narrow) => narrow.widen(),
        }
    }
}
