//! A segment of the model whose frozen weights are shared among ranks: each rank keeps a part of its numbers, and views
//! of its weights exist only while the segment is gathered.
use super::values::{Values, write_rows};
use half::bf16;
use std::ops::Range;
use std::sync::{Arc, PoisonError, RwLock};
use tunesmith_device::{Array, Arrival, Device, FloatBuffer, Floats, Mark};
use tunesmith_ops::gemm::Store;
use tunesmith_ops::quant::{Form, Quantized};

/// The values of a segment, or one rank's part of them: all values of one type lie end to end.
#[derive(Debug, Default)]
pub struct Flat {
    /// The end of the copies from the host's memory. It is dropped, and so waited for, before the buffers are.
    pub copied: Arrival,
    /// Weights in single precision.
    pub floats: FloatBuffer,
    /// Weights in bfloat16.
    pub halves: Array<bf16>,
    /// Codes of quantized weights.
    pub codes: Array<u8>,
    /// Scales of quantized weights.
    pub scales: FloatBuffer,
    /// Trained values, in contiguous stretches of the flat buffer.
    pub trained: Vec<Stretch>,
    /// When ranks fill in their parts while others compute: all parts are there after this mark.
    pub arrived: Mark,
}

/// A stretch of the flat buffer of trained values.
#[derive(Debug, Default)]
pub struct Stretch {
    /// The values of all ranks.
    pub values: FloatBuffer,
    /// Every rank's part, as a range that counts from the stretch's start.
    pub parts: Vec<Range<usize>>,
}

/// How many floats, halves, codes and scales there are.
pub(super) type Lengths = [usize; 4];

impl Flat {
    pub(super) fn new([floats, halves, codes, scales]: Lengths, trained: &[Trained], device: Device) -> Self {
        let stretch = |it: &Trained| Stretch { values: FloatBuffer::zeros(device, it.len()), parts: it.parts.clone() };
        Self {
            copied: Arrival::default(),
            floats: FloatBuffer::zeros(device, floats),
            halves: Array::zeros(device, halves),
            codes: Array::zeros(device, codes),
            scales: FloatBuffer::zeros(device, scales),
            trained: trained.iter().map(stretch).collect(),
            arrived: Mark::default(),
        }
    }

    /// As [`Flat::new`] without trained values, in pinned memory of the host, from which the GPU `device` copies.
    pub(super) fn pinned([floats, halves, codes, scales]: Lengths, device: Device) -> Self {
        Self {
            floats: FloatBuffer::pinned(device, floats),
            halves: Array::pinned(device, halves),
            codes: Array::pinned(device, codes),
            scales: FloatBuffer::pinned(device, scales),
            ..Self::default()
        }
    }

    /// Whether the buffers have exactly these lengths.
    pub(super) fn fits(&self, lengths: Lengths, trained: &[Trained]) -> bool {
        let alike = |(mine, its): (&Stretch, &Trained)| mine.parts == its.parts;
        self.lengths() == lengths && self.trained.len() == trained.len() && self.trained.iter().zip(trained).all(alike)
    }

    const fn lengths(&self) -> Lengths {
        [self.floats.len(), self.halves.len(), self.codes.len(), self.scales.len()]
    }
}

const fn bytes([floats, halves, codes, scales]: Lengths) -> usize {
    4 * floats + 2 * halves + codes + 4 * scales
}

/// Where the values of a weight are among those of its segment.
#[derive(Debug)]
pub(super) enum Place {
    Floats(Range<usize>),
    Halves(Range<usize>),
    /// The form of the matrix, and where its codes and its scales start.
    Quantized(Form, usize, usize),
}

/// The values of all ranks, while a segment is gathered.
#[derive(Debug)]
struct Whole {
    floats: FloatBuffer,
    halves: Array<bf16>,
    codes: Arc<Array<u8>>,
    scales: Arc<FloatBuffer>,
    quantized: Vec<Option<Quantized>>,
    /// The trained values, each with its start in the flat buffer.
    trained: Vec<(usize, Stretch)>,
}

/// The trained values of a gathered segment.
#[derive(Debug)]
pub struct Held(Arc<Whole>);

impl Held {
    /// The values, by their places in the flat buffer.
    pub fn values(&self) -> Values<'_> {
        Values::of(self.0.trained.iter().map(|(start, stretch)| (*start, stretch.values.view())))
    }
}

/// The place of a stretch of trained values in the flat buffer, and of this rank's part of it.
#[derive(Debug)]
pub(super) struct Trained {
    /// Where it starts in the flat buffer.
    pub(super) start: usize,
    /// Every rank's part, counted from `start`.
    pub(super) parts: Vec<Range<usize>>,
    /// This rank's part, counted from `start`.
    pub(super) own: Range<usize>,
    /// Where this part starts among the values that this rank keeps.
    pub(super) packed: usize,
}

impl Trained {
    /// The values of all ranks.
    pub(super) fn len(&self) -> usize {
        self.parts.last().map_or(0, |last| last.end)
    }
}

/// The weights of a segment, which are gathered together.
#[derive(Debug)]
pub struct Segment {
    lengths: Lengths,
    places: Vec<Place>,
    /// Tables with some trained rows: where each starts among the floats, its trained rows, and their place in the flat
    /// buffer.
    tables: Vec<(usize, Arc<[u32]>, Range<usize>)>,
    /// The numbers that this rank keeps.
    own: Flat,
    parts: [Range<usize>; 4],
    whole: RwLock<Option<Arc<Whole>>>,
}

/// A weight of a [`Segment`].
#[derive(Debug, Clone)]
pub struct Shared {
    pub(super) segment: Arc<Segment>,
    /// The weight's number in the segment.
    pub(super) index: usize,
}

/// The values of a [`Shared`] weight. The segment's numbers stay in memory as long as the view.
pub struct SharedView<'a> {
    whole: Arc<Whole>,
    place: &'a Place,
    index: usize,
}

impl Shared {
    /// The weight's values.
    ///
    /// # Panics
    /// If the segment is not gathered.
    pub(super) fn view(&self) -> SharedView<'_> {
        let whole = self.segment.whole.read().unwrap_or_else(PoisonError::into_inner);
        let whole = whole.as_ref().map(Arc::clone).expect("a walk has come to the segment");
        SharedView { whole, place: &self.segment.places[self.index], index: self.index }
    }
}

impl SharedView<'_> {
    pub(super) fn store(&self) -> Store<'_> {
        match self.place {
            Place::Floats(range) => Store::F32(self.whole.floats.slice(range.clone())),
            Place::Halves(range) => Store::Bf16(self.whole.halves.slice(range.clone())),
            Place::Quantized(..) => match &self.whole.quantized[self.index] {
                Some(matrix) => Store::Quantized(matrix),
                None => Store::F32(Floats::default()), // there is one for each such place
            },
        }
    }
}

impl Segment {
    /// A segment of which this rank keeps `own`, the `parts` of the floats, halves, codes and scales.
    pub(super) fn new(
        lengths: Lengths,
        places: Vec<Place>,
        tables: Vec<(usize, Arc<[u32]>, Range<usize>)>,
        own: Flat,
        parts: [Range<usize>; 4],
    ) -> Self {
        Self { lengths, places, tables, own, parts, whole: RwLock::default() }
    }

    /// Empty buffers of the size of this segment on `device`.
    pub(super) fn blank(&self, trained: &[Trained], device: Device) -> Flat {
        Flat::new(self.lengths, trained, device)
    }

    /// Whether `numbers` are buffers of the size of this segment.
    pub(super) fn fits(&self, numbers: &Flat, trained: &[Trained]) -> bool {
        numbers.fits(self.lengths, trained)
    }

    /// Bytes of this rank's share.
    pub(super) fn own_bytes(&self) -> usize {
        bytes(self.own.lengths())
    }

    /// The trained values, while the segment is gathered.
    pub(super) fn held(&self) -> Option<Held> {
        let whole = self.whole.read().unwrap_or_else(PoisonError::into_inner);
        whole.as_ref().map(|whole| Held(Arc::clone(whole)))
    }

    pub(super) fn is_empty(&self) -> bool {
        self.lengths == Lengths::default()
    }

    pub(super) const fn bytes(&self) -> usize {
        bytes(self.lengths)
    }

    pub(super) fn is_whole(&self) -> bool {
        self.whole.read().unwrap_or_else(PoisonError::into_inner).is_some()
    }

    /// Copies this rank's part into `numbers`, from where the other ranks get it. `values` are the trained values that
    /// this rank keeps.
    pub(super) fn give(&self, mut numbers: Flat, trained: &[Trained], values: Floats<'_>) -> Flat {
        for (stretch, Trained { own, packed, .. }) in numbers.trained.iter_mut().zip(trained) {
            stretch.values.slice_mut(own.clone()).copy_from(values.slice(*packed..*packed + own.len()));
        }
        let [floats, halves, codes, scales] = self.parts.clone();
        let Flat { floats: own_floats, halves: own_halves, codes: own_codes, scales: own_scales, .. } = &self.own;
        let arrivals = [
            own_floats.send(numbers.floats.slice_mut(floats)),
            own_halves.send(numbers.halves.slice_mut(halves)),
            own_codes.send(numbers.codes.slice_mut(codes)),
            own_scales.send(numbers.scales.slice_mut(scales)),
        ];
        numbers.copied = arrivals.into_iter().fold(Arrival::default(), Arrival::then);
        numbers
    }

    /// Makes the values of all ranks readable by the segment's weights: from here on the segment is gathered. `values`
    /// are all trained values, for the case that ranks do not share these.
    pub(super) fn assemble(
        &self,
        Flat { copied, mut floats, halves, codes, scales, trained, arrived }: Flat,
        places: &[Trained],
        values: Floats<'_>,
    ) {
        copied.wait();
        arrived.wait();
        for (start, ids, range) in &self.tables {
            let values = match places {
                [] => values.into(),
                _ => Values::of(places.iter().zip(&trained).map(|(place, it)| (place.start, it.values.view()))),
            };
            let table = *start..floats.len();
            write_rows(floats.slice_mut(table), ids, range, values);
        }
        let (codes, scales) = (Arc::new(codes), Arc::new(scales));
        let matrix = |place: &Place| match place {
            Place::Quantized(form, code, scale) => Some(form.matrix(&codes, *code, &scales, *scale)),
            Place::Floats(_) | Place::Halves(_) => None,
        };
        let quantized = self.places.iter().map(matrix).collect();
        let trained = places.iter().map(|place| place.start).zip(trained).collect();
        let whole = Arc::new(Whole { floats, halves, codes, scales, quantized, trained });
        *self.whole.write().unwrap_or_else(PoisonError::into_inner) = Some(whole);
    }

    /// Frees the values of the other ranks. Returns the buffers, for another segment to use, unless a view still needs
    /// them.
    pub(super) fn dissolve(&self) -> Option<Flat> {
        let whole = self.whole.write().unwrap_or_else(PoisonError::into_inner).take()?;
        let Whole { floats, halves, codes, scales, quantized, trained } = Arc::into_inner(whole)?;
        drop(quantized);
        Some(Flat {
            copied: Arrival::default(),
            floats,
            halves,
            codes: Arc::into_inner(codes)?,
            scales: Arc::into_inner(scales)?,
            trained: trained.into_iter().map(|(_, stretch)| stretch).collect(),
            arrived: Mark::default(),
        })
    }
}
