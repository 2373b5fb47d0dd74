//! Measures what a pass takes without computing it, for the planner: on the meta device the buffers, on a counted GPU
//! the bytes.
use super::Model;
use crate::grads::Grads;
use crate::vision::Vision;
use std::sync::Arc;
use tunesmith_base::error::Result;
use tunesmith_config::Checkpointing;
use tunesmith_data::batch::{Batch, IGNORE, ImageRows};
use tunesmith_device::{FloatBuffer, FloatsMut, memory};
use tunesmith_ops::activation::BufferCount;
use tunesmith_ops::narrow::Half;
use tunesmith_plan::memory::{BufferCounts, Counts, ExpertCounts, GpuWalk, VisionCounts, Walk, Walked as GpuBytes};
use tunesmith_vision::Pixels;

/// The buffers of the walk and of each pool of experts, as they are now.
#[derive(Debug, Default)]
pub(super) struct Buffers {
    main: Vec<BufferCount>,
    experts: Vec<Vec<BufferCount>>,
    /// Bytes of the device that are in use, without idle buffers.
    bytes: u64,
    /// Bytes that are offloaded from a GPU to the host.
    host: u64,
    /// Those of the image encoder and the connector, with room for so many tokens of the encoder.
    vision: Vec<BufferCount>,
}

fn in_use(counts: &[BufferCount]) -> Counts {
    self::counts(counts.iter().map(|it| (it.features, it.in_use)))
}

fn all(counts: &[BufferCount]) -> Counts {
    self::counts(counts.iter().map(|it| (it.features, it.all)))
}

fn counts(counts: impl Iterator<Item = (usize, usize)>) -> Counts {
    counts.filter(|(_, count)| *count > 0).map(|(features, count)| (features as u64, count as u64)).collect()
}

impl Model {
    /// Whether a block computes its output for labelled tokens only: the last block, unless there is a load-balancing
    /// loss.
    fn computes_labelled(&self, block: usize) -> bool {
        self.blocks.picks_rows(block, self.balance().is_some())
    }

    /// The buffers of a pass over `tokens` tokens, `labelled` of them with a label, as they are now.
    pub(super) fn buffers(&self, tokens: usize, labelled: usize) -> Buffers {
        let experts = self.blocks.expert_pools().map(|(index, moe)| {
            let tokens = if self.computes_labelled(index) { labelled } else { tokens };
            moe.pool.counts((tokens * moe.how.per_token).div_ceil(moe.experts.len()).max(1))
        });
        let idle = self.idle_bytes()[0];
        let bytes = memory::live(self.device()).saturating_sub(idle);
        Buffers {
            main: self.pool.counts(tokens),
            experts: experts.collect(),
            bytes,
            host: memory::on_host(self.device()),
            vision: self.vision.as_ref().map(|vision| vision.pool.counts(0)).unwrap_or_default(),
        }
    }

    /// The batch with `times` images. Each has the pixels `shown`, of which there are two where the model has two
    /// encoders.
    fn showing_images(&self, batch: Batch, shown: &[Arc<Pixels>], times: usize) -> Batch {
        let Some(vision) = &self.vision else { return batch };
        let across = self.arch.reads_images_across();
        // Where texts read pictures beside them, each has one: all but the last are one token.
        let times = if across { times.clamp(1, batch.tokens.len().max(1)) } else { times };
        let cu_seqlens = if across { (0..times).chain([batch.tokens.len()]).collect() } else { batch.cu_seqlens };
        let (mut images, mut end) = (Vec::new(), 0);
        for pixels in (0..times).flat_map(|_| shown) {
            let run = end..end + vision.rows(pixels);
            end = run.end;
            images.push(ImageRows { runs: std::iter::once(run).collect(), pixels: Arc::clone(pixels) });
        }
        Batch { images, cu_seqlens, ..batch }
    }

    /// The buffers of a pass's images.
    fn vision_counts(&self, then: &Buffers, now: &Buffers) -> VisionCounts {
        let world = self.vision.as_ref().map_or(0, Vision::world_bytes);
        VisionCounts { saved: in_use(&then.vision), all: all(&now.vision), world }
    }

    /// Sets what a pass keeps for backward: how many blocks are recomputed in full and how many keep everything, and
    /// the 16-bit type.
    const fn set_kept(&mut self, full: usize, none: usize, narrow: bool, rounds_gradients: bool) {
        self.blocks.checkpointing = Checkpointing::Blocks { full, none };
        self.blocks.narrow = match (narrow, rounds_gradients) {
            (true, true) => Some(Half::F16),
            (true, false) => Some(Half::Bf16),
            (false, _) => None,
        };
    }

    /// Walks a pass forward and backward on a counted GPU. Its images have the pixels `shown`.
    ///
    /// # Errors
    /// As [`Model::forward_backward`].
    pub fn gpu_bytes(&mut self, walk: &GpuWalk, shown: &[Arc<Pixels>]) -> Result<GpuBytes> {
        let (GpuWalk { tokens, labelled, .. }, device) = (*walk, self.device());
        self.set_kept(walk.full, walk.none, walk.narrow, walk.rounds_gradients);
        self.release();
        self.pool.reserve(walk.room);
        let batch = Batch {
            tokens: vec![0; tokens],
            targets: (0..tokens).map(|token| if token < labelled { 0 } else { IGNORE }).collect(),
            cu_seqlens: vec![0, tokens],
            ..Batch::default()
        };
        let batch = self.showing_images(batch, shown, walk.images);
        let mut grads = FloatBuffer::zeros(device, self.params.len());
        let before = memory::live(device);
        memory::reset_peak(device);
        // The second time all buffers are there from the first on, beside work spaces that come and go. Those of many experts are
        // so many that this does not matter.
        let experts: usize = self.blocks.experts().map(|(_, moe)| moe.experts.len()).sum();
        for _ in 0..if experts > 1024 { 1 } else { 2 } {
            self.forward_backward_into(&batch, 1.0, 1.0, 0, &mut Grads::whole(&mut grads))?;
        }
        let (most, head) = (memory::peak(device) - before, self.idle_bytes()[1]);
        let Buffers { bytes, host, .. } = std::mem::take(&mut self.at_head);
        let kept = bytes.saturating_sub(before + head);
        self.release();
        Ok(GpuBytes { kept, pools: most.saturating_sub(head), head, host })
    }

    /// Walks the forward pass of a validation on the meta device, up to the head. Its images have the pixels `shown`.
    ///
    /// # Errors
    /// As [`Model::forward_backward`].
    pub fn forward_counts(&mut self, walk: &Walk, shown: &[Arc<Pixels>]) -> Result<BufferCounts> {
        let Walk { tokens, labelled, .. } = *walk;
        self.release();
        self.pool.reserve(walk.room);
        let batch = Batch { tokens: vec![0; tokens], cu_seqlens: vec![0, tokens], ..Batch::default() };
        let batch = self.showing_images(batch, shown, walk.images);
        let rows: Vec<usize> = (0..labelled).collect();
        self.evaluate(&batch, &rows, |_, _| ())?;
        let now = self.buffers(tokens, labelled);
        let vision = self.vision_counts(&Buffers::default(), &now);
        let Buffers { main, experts, .. } = now;
        let experts = self.blocks.expert_pools().zip(&experts).map(|((index, _), counts)| ExpertCounts {
            saved: Counts::new(),
            all: all(counts),
            labelled: self.blocks.picks_rows(index, false),
        });
        Ok(BufferCounts { all: all(&main), experts: experts.collect(), vision, ..BufferCounts::default() })
    }

    /// Walks a pass forward and backward on the meta device. Its images have the pixels `shown`.
    ///
    /// # Errors
    /// As [`Model::forward_backward`].
    pub fn buffer_counts(&mut self, walk: &Walk, shown: &[Arc<Pixels>]) -> Result<BufferCounts> {
        let Walk { tokens, labelled, full, none, .. } = *walk;
        self.set_kept(full, none, walk.narrow, walk.rounds_gradients);
        self.release();
        self.pool.reserve(walk.room);
        let targets = (0..tokens).map(|token| if token < labelled { 0 } else { IGNORE }).collect();
        let batch = Batch { tokens: vec![0; tokens], targets, cu_seqlens: vec![0, tokens], ..Batch::default() };
        let batch = self.showing_images(batch, shown, walk.images);
        let grads = FloatsMut::meta(self.params.len());
        self.forward_backward_into(&batch, 1.0, 1.0, 0, &mut Grads::whole(grads))?;
        let (then, now) = (std::mem::take(&mut self.at_head), self.buffers(tokens, labelled));
        let experts = self.blocks.expert_pools().zip(then.experts.iter().zip(&now.experts));
        let experts = experts.map(|((index, _), (then, now))| ExpertCounts {
            saved: in_use(then),
            all: all(now),
            labelled: self.computes_labelled(index),
        });
        let head = self.head.pool.counts(labelled);
        Ok(BufferCounts {
            saved: in_use(&then.main),
            all: all(&now.main),
            experts: experts.collect(),
            head: all(&head),
            vision: self.vision_counts(&then, &now),
        })
    }
}
