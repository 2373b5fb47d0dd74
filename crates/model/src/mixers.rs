//! How mixers, the parts in which a token sees others, are computed: over a batch, or over what caches hold. So blocks
//! have one walk for training and for decoding.
use super::attention::{self, Attention};
use super::cross_attention::{self, CrossAttention};
use super::delta_net::{self, DeltaNet};
use super::mamba::{self, Mamba};
use super::pass::{BlockRows, Pass};
use super::short_conv::{self, ShortConv};
use tunesmith_ops::activation::Activation;

/// Computes mixers on a branch's normed input `h [tokens, hidden]`.
pub trait Mixing {
    /// The mixed values of an attention, and what backward needs.
    fn attention(&mut self, part: &Attention, pass: &Pass<'_>, h: &Activation, rows: BlockRows<'_>)
    -> attention::Saved;

    /// The mixed values of an attention for one token, as a vector `[features, 1]`. `h` computes the normed input
    /// `[hidden, 1]` when it is needed. `None` if vectors are not used here.
    fn attention_of_one(
        &mut self,
        _part: &Attention,
        _pass: &Pass<'_>,
        _rows: BlockRows<'_>,
        _h: &dyn Fn() -> Activation,
    ) -> Option<Activation> {
        None
    }

    /// The mixed values of a cross-attention, and what backward needs.
    fn cross_attention(
        &mut self,
        part: &CrossAttention,
        pass: &Pass<'_>,
        h: &Activation,
        rows: BlockRows<'_>,
    ) -> cross_attention::Saved;

    /// The output of a gated delta rule, and what backward needs.
    fn delta_net(&mut self, part: &DeltaNet, pass: &Pass<'_>, h: &Activation, rows: BlockRows<'_>) -> delta_net::Saved;

    /// What backward through a gated short convolution needs, and the input of its output projection.
    fn short_conv(
        &mut self,
        part: &ShortConv,
        pass: &Pass<'_>,
        h: &Activation,
        rows: BlockRows<'_>,
    ) -> (short_conv::Saved, Activation);

    /// The output of a selective state space (Mamba 2), and what backward needs.
    fn mamba(&mut self, part: &Mamba, pass: &Pass<'_>, h: &Activation, rows: BlockRows<'_>) -> mamba::Saved;
}

/// Computes mixers over the sequences of a batch, for training and evaluation.
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
