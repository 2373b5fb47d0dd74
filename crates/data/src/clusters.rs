//! Groups similar rows by locality-sensitive hashing. It takes linear time, and 20 bytes of memory per row.
use rayon::prelude::*;
use tunesmith_base::error::Result;

/// How to find groups of rows that are alike, directly or over a chain of similar rows.
pub struct Clustering<Read, Key, Alike> {
    /// Number of bands. Two rows with the same key in any band are compared.
    pub bands: usize,
    /// With how many earlier rows of the same bucket a row is compared. The bound keeps a large bucket from taking
    /// quadratic time.
    pub compared: usize,
    /// Reads what is compared of a row.
    pub read: Read,
    /// The hash of a row's content in a band.
    pub key: Key,
    /// Whether the contents of two rows are alike.
    pub alike: Alike,
}

impl<Row, Read, Key, Alike> Clustering<Read, Key, Alike>
where
    Read: Fn(u32) -> Result<Row> + Sync,
    Key: Fn(&Row, usize) -> u64 + Sync,
    Alike: Fn(&Row, &Row) -> bool,
{
    /// Returns the first row of the cluster of each of the `rows` rows. A row that is not in `usable`, or has no
    /// similar row, is its own cluster. `found` receives each pair that joins two clusters, the earlier row first.
    ///
    /// # Errors
    /// The errors of reading a row.
    pub fn roots(&self, rows: usize, usable: &[u32], found: &mut impl FnMut(u32, u32)) -> Result<Vec<u32>> {
        let mut roots: Vec<u32> = (0..rows as u32).collect();
        for band in 0..self.bands {
            let Self { read, key, .. } = self;
            let key = |&row: &u32| Ok((key(&read(row)?, band), row));
            let mut keys: Vec<(u64, u32)> = usable.par_iter().map(key).collect::<Result<_>>()?;
            keys.par_sort_unstable();
            for bucket in keys.chunk_by(|one, other| one.0 == other.0).filter(|bucket| bucket.len() > 1) {
                let mut earlier: Vec<(u32, u32, Row)> = Vec::new();
                for &(_, row) in bucket {
                    let own = root(&mut roots, row);
                    if earlier.iter().any(|(other, ..)| *other == own) {
                        continue;
                    }
                    let content = (self.read)(row)?;
                    let alike = earlier.iter().find(|(.., other)| (self.alike)(&content, other));
                    if let Some(&(other, first, _)) = alike {
                        let other = root(&mut roots, other);
                        if other != own {
                            found(first, row);
                        }
                        roots[own.max(other) as usize] = own.min(other);
                    } else if earlier.len() < self.compared {
                        earlier.push((own, row, content));
                    }
                }
            }
        }
        let all = 0..roots.len() as u32;
        Ok(all.map(|row| root(&mut roots, row)).collect())
    }
}

fn root(roots: &mut [u32], mut row: u32) -> u32 {
    while roots[row as usize] != row {
        // Path halving: each visited row now points to its grandparent, so that later searches are short.
        roots[row as usize] = roots[roots[row as usize] as usize];
        row = roots[row as usize];
    }
    row
}
