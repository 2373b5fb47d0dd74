//! An activation that waits for backward: as it is or in 16 bits, on the device or on the host.
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
    /// Keeps `act`, rounded to `half` if given.
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

    /// Starts to copy its numbers to the host. Its memory on the device is free when the result is dropped. `None` on a
    /// device from which nothing is offloaded.
    pub fn leave(&mut self) -> Option<Leaving> {
        let (leaving, elsewhere) = self.memory().leave()?;
        self.elsewhere = Some(elsewhere);
        Some(leaving)
    }

    /// Starts to copy its numbers back, if they are on the host.
    pub fn fetched(mut self) -> Self {
        if let Some(elsewhere) = self.elsewhere.take() {
            self.elsewhere = Some(self.memory().fetch(elsewhere));
        }
        self
    }

    /// The activation again: waits until it is back from the host, and widens 16 bits.
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
