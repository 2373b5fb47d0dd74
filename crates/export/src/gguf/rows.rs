//! Steps that change a tensor's values on the way into a file, such as another order of rows or columns.

/// A step on the values of a matrix. A vector counts as a matrix whose rows are single values.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Step {
    /// Takes the rows with these indices, in this order.
    Rows(Vec<usize>),
    /// Takes the columns with these indices, in this order.
    Columns(Vec<usize>),
    /// Transposes each of this many matrices, which lie one below the other.
    Transposed(usize),
    /// Adds this number to every value.
    Added(f32),
    /// Replaces each value x by `-e^x`.
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

/// The order of rows in which the two rows of a rotary pair are neighbours (as llama.cpp pairs them), for a matrix that pairs
/// a row of the first half with one of the second. Each of `heads` heads has `size` rows, of which `turned` rows from `first`
/// on have rotary embeddings.
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

/// The order of rows that puts the first value head of each group first, then the second of each, and so on. A group is the
/// value heads that share a head of keys. Each head has `size` rows; the `first` rows before all heads stay.
pub(super) fn tiled(first: usize, groups: usize, heads: usize, size: usize) -> Vec<usize> {
    let each = heads / groups;
    let order = (0..each).flat_map(|place| (0..groups).map(move |group| group * each + place));
    (0..first).chain(order.flat_map(|head| (first + head * size)..(first + (head + 1) * size))).collect()
}

/// Takes `count` rows of each head, from row `first` of the head on. Each of `heads` heads has `size` rows.
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
