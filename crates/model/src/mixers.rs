//! How the parts of a block compute in which a token takes from others: over a batch, or from what caches hold.
use super::attention::{self, Attention};
use super::cross_attention::{self, CrossAttention};
use super::delta_net::{self, DeltaNet};
use super::mamba::{self, Mamba};
use super::pass::{BlockRows, Pass};
use super::short_conv::{self, ShortConv};
use tunesmith_ops::activation::Activation;

/// Computes mixers on a branch's normed input `h [tokens, hidden]`.
pub trait Mixing {
    /// What an attention mixes.
    fn attention(&mut self, part: &Attention, pass: &Pass<'_>, h: &Activation, rows: BlockRows<'_>)
    -> attention::Saved;

    /// What a cross-attention mixes.
    fn cross_attention(
        &mut self,
        part: &CrossAttention,
        pass: &Pass<'_>,
        h: &Activation,
        rows: BlockRows<'_>,
    ) -> cross_attention::Saved;

    /// What an attention mixes for one token, as a vector `[features, 1]`; `h` computes its normed input `[hidden, 1]`. `None` if it is
    /// not computed with vectors here.
    fn attention_of_one(
        &mut self,
        _part: &Attention,
        _pass: &Pass<'_>,
        _rows: BlockRows<'_>,
        _h: &dyn Fn() -> Activation,
    ) -> Option<Activation> {
        None
    }

    /// What a gated delta rule gives.
    fn delta_net(&mut self, part: &DeltaNet, pass: &Pass<'_>, h: &Activation, rows: BlockRows<'_>) -> delta_net::Saved;

    /// What a convolution between gates gives, and what its output projection takes.
    fn short_conv(
        &mut self,
        part: &ShortConv,
        pass: &Pass<'_>,
        h: &Activation,
        rows: BlockRows<'_>,
    ) -> (short_conv::Saved, Activation);

    /// What a selective state space gives.
    fn mamba(&mut self, part: &Mamba, pass: &Pass<'_>, h: &Activation, rows: BlockRows<'_>) -> mamba::Saved;
}

/// Over the sequences of a batch.
#[derive(Debug)]
pub struct OverBatch;

impl Mixing for OverBatch {
    fn attention(
        &mut self,
        part: &Attention,
        pass: &Pass<'_>,
        h: &Activation,
        rows: BlockRows<'_>,
    ) -> attention::Saved {
        part.forward(pass, h, rows)
    }

    fn cross_attention(
        &mut self,
        part: &CrossAttention,
        pass: &Pass<'_>,
        h: &Activation,
        rows: BlockRows<'_>,
    ) -> cross_attention::Saved {
        part.forward(pass, h, rows.pictures(), rows.outputs)
    }

    fn delta_net(&mut self, part: &DeltaNet, pass: &Pass<'_>, h: &Activation, rows: BlockRows<'_>) -> delta_net::Saved {
        part.forward(pass, h, &rows.all.sequences())
    }

    fn short_conv(
        &mut self,
        part: &ShortConv,
        pass: &Pass<'_>,
        h: &Activation,
        rows: BlockRows<'_>,
    ) -> (short_conv::Saved, Activation) {
        part.forward(pass, h, &rows.all.sequences())
    }

    fn mamba(&mut self, part: &Mamba, pass: &Pass<'_>, h: &Activation, rows: BlockRows<'_>) -> mamba::Saved {
        part.forward(pass, h, &rows.all.sequences())
    }
}
