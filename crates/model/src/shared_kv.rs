//! Keys and values that several attentions of one walk use: later blocks reuse those of an earlier one (Gemma 4).
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use tunesmith_ops::activation::Activation;
use tunesmith_ops::elementwise;

/// The shared keys and values of a walk, turned by their positions. Each pair is found by the number of the attention
/// that computed it.
#[derive(Debug, Default)]
pub struct SharedKeyValues {
    found: Mutex<BTreeMap<usize, Arc<[Activation; 2]>>>,
    /// Their gradients, summed over the attentions that took them.
    gradients: Mutex<BTreeMap<usize, [Activation; 2]>>,
}

impl SharedKeyValues {
    /// Stores the keys and values of the attention `layer`, in place of those of an earlier walk.
    pub fn put(&self, layer: usize, keys: Activation, values: Activation) -> Arc<[Activation; 2]> {
        let found = Arc::new([keys, values]);
        self.found.lock().unwrap_or_else(PoisonError::into_inner).insert(layer, Arc::clone(&found));
        found
    }

    /// The keys and values of the attention `layer`.
    ///
    /// # Panics
    /// If the walk did not come by it.
    pub fn get(&self, layer: usize) -> Arc<[Activation; 2]> {
        let found = self.found.lock().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(found.get(&layer).expect("the walk came by the attention that computes them"))
    }

    /// As [`SharedKeyValues::get`], and removes them.
    ///
    /// # Panics
    /// If the walk did not come by it.
    pub fn take(&self, layer: usize) -> Arc<[Activation; 2]> {
        let found = self.found.lock().unwrap_or_else(PoisonError::into_inner).remove(&layer);
        found.expect("the walk came by the attention that computes them")
    }

    /// Adds the gradients of the keys and values of `layer` that one more attention has found.
    pub fn add_gradients(&self, layer: usize, found: [Activation; 2]) {
        let mut gradients = self.gradients.lock().unwrap_or_else(PoisonError::into_inner);
        match gradients.get_mut(&layer) {
            Some(sums) => sums.iter_mut().zip(&found).for_each(|(sum, one)| elementwise::add(sum, one)),
            None => drop(gradients.insert(layer, found)),
        }
    }

    /// Takes out the gradients of the keys and values of `layer` that other attentions have added; `None` if there are
    /// none.
    pub fn take_gradients(&self, layer: usize) -> Option<[Activation; 2]> {
        self.gradients.lock().unwrap_or_else(PoisonError::into_inner).remove(&layer)
    }
}
