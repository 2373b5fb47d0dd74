//! Packing: several short examples in one row of at most `capacity` tokens. Each example stays a separate sequence,
//! so packing never changes what a token attends to.

/// How many rows are open at once. A small number keeps neighbors in the order near each other.
const WINDOW: usize = 64;

/// Packs the examples, in `order`, by best fit: each goes into the open row where the least room remains. If none has
/// room, a new row is opened; if more than 64 are open, the fullest is closed. An example longer than `capacity` gets
/// a row of its own.
pub fn pack(lengths: &[usize], order: &[usize], capacity: usize) -> Vec<Vec<usize>> {
    let mut rows: Vec<Vec<usize>> = Vec::new();
    // (room left, row) of the open rows.
    let mut open: Vec<(usize, usize)> = Vec::with_capacity(WINDOW + 1);
    for &example in order {
        let length = lengths[example];
        let best = open.iter_mut().filter(|(room, _)| *room >= length).min_by_key(|(room, row)| (*room, *row));
        if let Some((room, row)) = best {
            *room -= length;
            rows[*row].push(example);
            continue;
        }
        open.push((capacity.saturating_sub(length), rows.len()));
        rows.push(vec![example]);
        if open.len() > WINDOW {
            let fullest = (0..open.len()).min_by_key(|&index| open[index]).unwrap_or(0);
            open.remove(fullest);
        }
    }
    rows
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn best_fit_leaves_little_room() {
        let lengths = [6, 5, 4, 3, 2, 10, 12];
        let rows = pack(&lengths, &[0, 1, 2, 3, 4, 5, 6], 10);
        // 4 fills the row of 6; 3 then 2 fill the row of 5; 10 and the overlong 12 stand alone.
        assert_eq!(rows, [vec![0, 2], vec![1, 3, 4], vec![5], vec![6]]);
    }
}
