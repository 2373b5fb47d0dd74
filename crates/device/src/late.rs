//! Values that a device delivers later.
use std::fmt;

/// The source of a value that has not arrived yet.
pub trait Delivery<T>: Send {
    /// Whether the value has arrived, so that [`Delivery::wait`] returns at once.
    fn is_ready(&self) -> bool;

    /// Waits for the value.
    fn wait(self: Box<Self>) -> T;
}

/// A value that a device may deliver later, such as the loss of a step, so that the next computation need not wait for
/// it. On the CPU it is ready at once.
pub struct Late<T>(Box<dyn Delivery<T>>);

impl<T> Late<T> {
    /// A value that comes from a device.
    pub fn new(delivery: impl Delivery<T> + 'static) -> Self {
        Self(Box::new(delivery))
    }

    /// Whether the value has arrived.
    pub fn is_ready(&self) -> bool {
        self.0.is_ready()
    }

    /// Waits for the value and returns it.
    pub fn wait(self) -> T {
        self.0.wait()
    }
}

impl<T: Send + 'static> Late<T> {
    /// A value that is ready.
    pub fn ready(value: T) -> Self {
        Self::new(Ready(value))
    }
}

impl<T> fmt::Debug for Late<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Late").field("is_ready", &self.is_ready()).finish_non_exhaustive()
    }
}

struct Ready<T>(T);

impl<T: Send> Delivery<T> for Ready<T> {
    fn is_ready(&self) -> bool {
        true
    }

    fn wait(self: Box<Self>) -> T {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::{Receiver, channel};

    struct Sent(Receiver<u32>);

    impl Delivery<u32> for Sent {
        fn is_ready(&self) -> bool {
            false
        }

        fn wait(self: Box<Self>) -> u32 {
            self.0.recv().unwrap()
        }
    }

    #[test]
    fn a_value_of_the_host_is_there_and_another_is_waited_for() {
        let now = Late::ready(7);
        assert!(now.is_ready());
        assert_eq!(now.wait(), 7);
        let (sender, receiver) = channel();
        let late = Late::new(Sent(receiver));
        assert!(!late.is_ready());
        std::thread::scope(|scope| {
            scope.spawn(move || sender.send(8).unwrap());
            assert_eq!(late.wait(), 8);
        });
    }
}
