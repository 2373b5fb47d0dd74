//! [`flush_denormal`]: keeps subnormal numbers out of an optimizer's state, because they are slow.
//!
//! A moment shrinks while its gradient is 0, as for the embedding of a token that no longer comes. It stops at a few
//! times the smallest float, where rounding undoes each further decay. Some processors multiply such numbers more than
//! twenty times as slowly as others.

/// `value`, or 0 where it is subnormal: below [`f32::MIN_POSITIVE`], about 1.2e-38.
#[inline(always)]
pub const fn flush_denormal(value: f32) -> f32 {
    if value.abs() < f32::MIN_POSITIVE { 0.0 } else { value }
}
