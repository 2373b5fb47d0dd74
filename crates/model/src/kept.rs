//! What forward keeps for backward, as it is or in sixteen bits, on the device or on the host.
use tunesmith_ops::activation::{Activation, Elsewhere, Leaving};
use tunesmith_ops::narrow::{Half, Narrow};

/// An activation that waits for the backward pass.
#[derive(Debug)]
pub struct Kept {
    form: Form,
    /// Where its numbers are, if not on the device.
    elsewhere: Option<Elsewhere>,
}

#[derive(Debug)]
enum Form {
    Wide(Activation),
    Narrow(Narrow),
}

impl Kept {
    pub fn new(act: Activation, half: Option<Half>) -> Self {
        let form = match half {
            // In these sixteen bits already.
            Some(half) if act.number() == half.number() => Form::Wide(act),
            Some(half) => Form::Narrow(Narrow::new(&act, half)),
            None => Form::Wide(act),
        };
        Self { form, elsewhere: None }
    }

    const fn memory(&mut self) -> &mut Activation {
        match &mut self.form {
            Form::Wide(act) => act,
            Form::Narrow(narrow) => narrow.memory(),
        }
    }

    /// Begins to move its numbers to the host; its memory is free when what this returns is dropped.
    pub fn leave(&mut self) -> Option<Leaving> {
        let (leaving, elsewhere) = self.memory().leave()?;
        self.elsewhere = Some(elsewhere);
        Some(leaving)
    }

    /// Begins to move its numbers back, if they are on the host.
    pub fn fetched(mut self) -> Self {
        if let Some(elsewhere) = self.elsewhere.take() {
            self.elsewhere = Some(self.memory().fetch(elsewhere));
        }
        self
    }

    pub fn restore(mut self) -> Activation {
        if let Some(elsewhere) = self.elsewhere.take() {
            self.memory().arrive(elsewhere);
        }
        match self.form {
            Form::Wide(act) => act,
            Form::Narrow(narrow) => narrow.widen(),
        }
    }
}
