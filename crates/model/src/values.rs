//! The trained values that a pass can read, found by their places in the flat buffer: all of them, or those of the
//! segments that are gathered.
use std::ops::Range;
use tunesmith_device::{Array, Device, Element, Floats, FloatsMut};

/// Up to two stretches of the flat buffer of trained values.
#[derive(Debug, Clone, Copy, Default)]
pub struct Values<'a> {
    windows: [Window<'a>; 2],
}

/// A stretch, and where it starts.
pub type Window<'a> = (usize, Floats<'a>);

impl<'a> Values<'a> {
    /// The first two of some stretches.
    pub fn of(windows: impl IntoIterator<Item = Window<'a>>) -> Self {
        let mut windows = windows.into_iter();
        let mut next = || windows.next().unwrap_or_default();
        Self { windows: [next(), next()] }
    }

    /// The values at a place.
    ///
    /// # Panics
    /// If no stretch holds them.
    #[inline]
    pub fn at(self, place: &Range<usize>) -> Floats<'a> {
        let covers = |&(start, values): &Window<'_>| start <= place.start && place.end <= start + values.len();
        let (start, values) = self.windows.into_iter().find(covers).expect("the values of a segment at hand");
        values.slice(place.start - start..place.end - start)
    }
}

impl<'a> From<Floats<'a>> for Values<'a> {
    fn from(all: Floats<'a>) -> Self {
        Self::of([(0, all)])
    }
}

impl<'a> From<&'a [f32]> for Values<'a> {
    fn from(all: &'a [f32]) -> Self {
        Self::from(Floats::from(all))
    }
}

impl<'a> From<&'a Vec<f32>> for Values<'a> {
    fn from(all: &'a Vec<f32>) -> Self {
        Self::from(&all[..])
    }
}

/// Copies the trained rows `ids` of a table, which lie at `range` of the flat buffer, into the table.
pub(super) fn write_rows(mut table: FloatsMut<'_>, ids: &[u32], range: &Range<usize>, values: Values<'_>) {
    let (width, rows) = (range.len() / ids.len(), values.at(range));
    for (row, &id) in ids.iter().enumerate() {
        let place = id as usize * width;
        table.reborrow().slice(place..place + width).copy_from(rows.slice(row * width..(row + 1) * width));
    }
}

/// Moves values from the host to `device`. On the CPU they stay in the memory that they are in.
pub(super) fn placed<T: Element>(values: Vec<T>, device: Device) -> Array<T> {
    let values = Array::from(values);
    if device == Device::Cpu { values } else { values.to(device) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_found_by_their_place_in_whichever_stretch_has_them() {
        let (first, last) = ([1.0, 2.0, 3.0], [7.0, 8.0]);
        let values = Values::of([(10, first[..].into()), (40, last[..].into())]);
        assert_eq!(values.at(&(11..13)).read(), [2.0, 3.0]);
        assert_eq!(values.at(&(40..42)).read(), [7.0, 8.0]);
        assert_eq!(Values::from(&first[..]).at(&(0..3)).read(), first);
        assert!(std::panic::catch_unwind(|| values.at(&(12..14)).len()).is_err(), "a value more than is at hand");
    }
}
