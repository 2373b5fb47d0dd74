//! [`Logits`] of some rows, in whichever layout the product left them.
use crate::activation::{Activation, LANES};
use crate::argmax::{argmax, argmax_of_tokens};

/// The logits of some rows, `[rows, outputs]`.
#[derive(Debug)]
pub struct Logits {
    numbers: Activation,
    /// Whether the memory has the layout `[outputs, rows]`.
    transposed: bool,
}

impl Logits {
    pub(super) const fn new(numbers: Activation, transposed: bool) -> Self {
        Self { numbers, transposed }
    }

    /// The number of rows.
    pub const fn rows(&self) -> usize {
        if self.transposed { self.numbers.features() } else { self.numbers.tokens() }
    }

    /// The logits of one row, `[outputs]`, on the host.
    pub fn row(&self, row: usize) -> Vec<f32> {
        if !self.transposed {
            return self.numbers.row(row);
        }
        let lanes = |panel| self.numbers.panel(panel)[row * LANES..][..LANES].iter().copied();
        (0..self.numbers.panels()).flat_map(lanes).take(self.numbers.tokens()).collect()
    }

    /// The logits of all rows, row-major `[rows, outputs]`, on the host.
    pub fn to_rows(&self) -> Vec<f32> {
        if self.transposed { (0..self.rows()).flat_map(|row| self.row(row)).collect() } else { self.numbers.to_rows() }
    }

    /// The number of each row's largest logit, the first of equal ones. `None` if one of the row's logits is NaN or the
    /// largest is infinite.
    pub fn best(&self) -> Vec<Option<u32>> {
        if self.transposed { argmax_of_tokens(&self.numbers) } else { argmax(&self.numbers) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gemm::Store;
    use crate::loss::linear::Projection;
    use crate::testing::{each_engine, numbers};

    #[test]
    fn each_row_has_its_own() {
        let (outputs, hidden) = (37, 40);
        let weight = numbers(1, outputs * hidden);
        each_engine(|engine| {
            let pool = engine.pool();
            for (rows, softcap) in [(1, None), (2, Some(3.0)), (5, None), (16, Some(2.0)), (17, None), (40, Some(1.0))]
            {
                let weight = engine.array(&weight);
                let head = Projection { weight: Store::from(&weight), outputs, softcap, pool: &pool };
                let h = Activation::from_rows(&pool, &numbers(2, rows * hidden), hidden);
                let parts = head.logits(&h);
                let expected = head.project(&h).to_rows();
                let all: Vec<f32> = parts.iter().flat_map(Logits::to_rows).collect();
                assert_eq!(all, expected, "{rows} rows");
                let each = parts.iter().flat_map(|part| (0..part.rows()).flat_map(|row| part.row(row)));
                assert_eq!(each.collect::<Vec<f32>>(), expected, "{rows} rows");
                let best: Vec<_> = parts.iter().flat_map(Logits::best).collect();
                assert_eq!(best, argmax(&head.project(&h)), "{rows} rows");
            }
        });
    }
}
