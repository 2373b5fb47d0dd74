//! Replaces rows of the embedding's output by rows of images, and does the reverse for gradients.
use std::ops::Range;
use tunesmith_data::batch::ImageRows;
use tunesmith_ops::activation::Activation;
use tunesmith_ops::elementwise;

/// Which rows of a flat stream belong to images.
#[derive(Debug, Default)]
pub(crate) struct Splice {
    /// The rows of images, rising.
    pub(crate) images: Vec<usize>,
    /// The rows of all other tokens, rising.
    pub(crate) texts: Vec<usize>,
}

impl Splice {
    /// The splice of a stream of `rows` rows with these images.
    pub(crate) fn new(images: &[ImageRows], rows: usize) -> Self {
        Self::of(images.iter().flat_map(|image| &image.runs).cloned(), rows)
    }

    /// As [`Splice::new`], from the runs of image rows, which rise.
    pub(crate) fn of(runs: impl Iterator<Item = Range<usize>>, rows: usize) -> Self {
        let images: Vec<usize> = runs.flatten().collect();
        let mut next = images.iter().copied().peekable();
        let texts = (0..rows).filter(|row| next.next_if_eq(row).is_none()).collect();
        Self { images, texts }
    }

    /// `x [rows, hidden]` with `features [images, hidden]` in place of the rows of images.
    pub(crate) fn put(&self, x: &Activation, features: &Activation) -> Activation {
        let features = features.gather_to(x.pool(), &(0..features.tokens()).collect::<Vec<_>>());
        let mut out = features.scatter(&self.images, x.tokens());
        if !self.texts.is_empty() {
            elementwise::add(&mut out, &x.gather(&self.texts).scatter(&self.texts, x.tokens()));
        }
        out
    }
}

/// For each sequence, the runs of image rows that see each other, as positions in the sequence. Rows of a second
/// encoder are not among them.
pub(crate) fn by_sequence(images: &[ImageRows], cu_seqlens: &[usize]) -> Vec<Vec<Range<usize>>> {
    let own = images.iter().filter(|image| !image.pixels.world);
    let runs: Vec<&Range<usize>> = own.flat_map(|image| &image.runs).collect();
    let of = |ends: &[usize]| {
        let within = runs.iter().filter(|run| ends[0] <= run.start && run.end <= ends[1]);
        within.map(|run| run.start - ends[0]..run.end - ends[0]).collect()
    };
    cu_seqlens.windows(2).map(of).collect()
}

#[cfg(test)]
#[allow(clippy::single_range_in_vec_init, reason = "runs of rows, of which an image may have one")]
mod tests {
    use super::*;
    use std::sync::Arc;
    use tunesmith_ops::activation::Pool;
    use tunesmith_vision::Pixels;

    #[test]
    fn rows_of_pictures_take_the_place_of_the_embedding_s() {
        let pixels = Arc::new(Pixels::default());
        let images =
            [ImageRows { runs: vec![1..3, 4..5], pixels: Arc::clone(&pixels) }, ImageRows { runs: vec![6..8], pixels }];
        let splice = Splice::new(&images, 9);
        assert_eq!(splice.images, [1, 2, 4, 6, 7]);
        assert_eq!(splice.texts, [0, 3, 5, 8]);
        let (pool, other) = (Pool::new(), Pool::new());
        let x = Activation::from_rows(&pool, &(0..9).map(|row| row as f32).collect::<Vec<_>>(), 1);
        let features = Activation::from_rows(&other, &[-1.0, -2.0, -3.0, -4.0, -5.0], 1);
        assert_eq!(splice.put(&x, &features).to_rows(), [0.0, -1.0, -2.0, 3.0, -3.0, 5.0, -4.0, -5.0, 8.0]);
        assert_eq!(by_sequence(&images, &[0, 6, 9]), [vec![1..3, 4..5], vec![0..2]]);
    }
}
