//! What happens to a tensor's values on the way into a file: rows and columns in another order, and sums.

/// A step on the values of a matrix, or of a vector, whose rows are single values.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Step {
    /// The rows of these numbers, in this order.
    Rows(Vec<usize>),
    /// The columns of these numbers, in this order.
    Columns(Vec<usize>),
    /// Of so many matrices one below the other, each transposed.
    Transposed(usize),
    /// This number added to every value.
    Added(f32),
    /// `-e^x`.
    NegativeExp,
}

impl Step {
    /// The values after the step, and the length of their rows. `width` is the length before it.
    pub(super) fn apply(&self, values: Vec<f32>, width: usize) -> (Vec<f32>, usize) {
        match self {
            Self::Rows(rows) => {
                (rows.iter().flat_map(|&row| &values[row * width..][..width]).copied().collect(), width)
            }
            Self::Columns(columns) => {
                let rows = values.chunks_exact(width);
                (rows.flat_map(|row| columns.iter().map(|&column| row[column])).collect(), columns.len())
            }
            Self::Transposed(count) => {
                let rows = values.len() / width / count;
                let one = |matrix: &[f32]| {
                    (0..width)
                        .flat_map(|column| (0..rows).map(move |row| (row, column)))
                        .map(|(row, column)| matrix[row * width + column])
                        .collect::<Vec<_>>()
                };
                (values.chunks_exact(rows * width).flat_map(one).collect(), rows)
            }
            Self::Added(number) => (values.into_iter().map(|value| value + number).collect(), width),
            Self::NegativeExp => (values.into_iter().map(|value| -value.exp()).collect(), width),
        }
    }
}

/// The rows of heads with rotary pairs as neighbours, where they were one of each half. Of each head of `size` rows, `turned` rows
/// from `first` on turn.
pub(super) fn paired(heads: usize, size: usize, first: usize, turned: usize) -> Vec<usize> {
    let half = turned / 2;
    let mut rows = Vec::with_capacity(heads * size);
    for head in 0..heads {
        let start = head * size;
        rows.extend(start..start + first);
        rows.extend((0..half).flat_map(|pair| [start + first + pair, start + first + half + pair]));
        rows.extend(start + first + turned..start + size);
    }
    rows
}

/// The rows of heads of values, which are in groups of one head of keys: first the first head of each group, then the second.
/// `first` rows before them stay.
pub(super) fn tiled(first: usize, groups: usize, heads: usize, size: usize) -> Vec<usize> {
    let each = heads / groups;
    let order = (0..each).flat_map(|place| (0..groups).map(move |group| group * each + place));
    (0..first).chain(order.flat_map(|head| (first + head * size)..(first + (head + 1) * size))).collect()
}

/// Of heads of `size` rows each, the rows from `first` on, so many of each head.
pub(super) fn of_each(heads: usize, size: usize, first: usize, count: usize) -> Vec<usize> {
    (0..heads).flat_map(|head| head * size + first..head * size + first + count).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_and_columns_are_those_that_were_written_down_by_hand() {
        // A head of two rows that stay, four that turn, one that stays; and another.
        assert_eq!(paired(2, 7, 2, 4), [0, 1, 2, 4, 3, 5, 6, 7, 8, 9, 11, 10, 12, 13]);
        // Two heads of keys with three heads of values each, of two rows; behind one row of another kind.
        assert_eq!(tiled(1, 2, 6, 2), [0, 1, 2, 7, 8, 3, 4, 9, 10, 5, 6, 11, 12]);
        assert_eq!(of_each(2, 5, 1, 2), [1, 2, 6, 7]);
        let matrix = || vec![1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0];
        assert_eq!(Step::Rows(vec![3, 0]).apply(matrix(), 2), (vec![7.0, 8.0, 1.0, 2.0], 2));
        assert_eq!(Step::Columns(vec![1]).apply(matrix(), 2), (vec![2.0, 4.0, 6.0, 8.0], 1));
        assert_eq!(Step::Transposed(1).apply(matrix(), 4), (vec![1.0, 5.0, 2.0, 6.0, 3.0, 7.0, 4.0, 8.0], 2));
        assert_eq!(Step::Transposed(2).apply(matrix(), 2), (vec![1.0, 3.0, 2.0, 4.0, 5.0, 7.0, 6.0, 8.0], 2));
        assert_eq!(Step::Added(1.0).apply(vec![-1.0, 2.0], 1).0, [0.0, 3.0]);
        assert_eq!(Step::NegativeExp.apply(vec![0.0, 2.0f32.ln()], 1).0, [-1.0, -2.0]);
    }
}
