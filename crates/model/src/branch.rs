//! A branch of a block: a norm, the part that computes, and how its output joins the residual stream.
use super::attention::{self, Attention};
use super::cross_attention::{self, CrossAttention};
use super::delta_net::{self, DeltaNet};
use super::grads::Grads;
use super::laurel::{self, Laurel};
use super::linear::{self, Input, Linear};
use super::mamba::{self, Mamba};
use super::mixers::Mixing;
use super::mlp::{self, Mlp};
use super::mlp_and_experts::{self, MlpAndExperts};
use super::moe::{self, Moe};
use super::norm::Norm;
use super::pass::{BlockRows, Pass};
use super::per_layer::{self, PerLayerGate};
use super::plain_mlp::{self, PlainMlp};
use super::short_conv::{self, ShortConv};
use super::weight::Weight;
use tunesmith_device::FloatBuffer;
use tunesmith_ops::activation::Activation;
use tunesmith_ops::elementwise;
use tunesmith_ops::feature_scale;
use tunesmith_ops::route::Routing;

/// A branch: `y = join(x, part(norm(x)))`, from `[tokens, hidden]` to `[rows, hidden]`. The rows are all tokens, unless
/// an attention gives an output for only some ([`super::pass::Rows::picked`]).
#[derive(Debug)]
pub struct Branch {
    pub norm: Option<Norm>,
    pub part: Part,
    pub join: Join,
    /// A low-rank branch beside an attention (Gemma 3n).
    pub laurel: Option<Box<Laurel>>,
}

/// What a branch computes on its normed input.
#[derive(Debug)]
pub enum Part {
    /// Self-attention: the only part that can give an output for only some of the tokens.
    Attention(Box<Attention>),
    /// Attention over image features.
    CrossAttention(Box<CrossAttention>),
    DeltaNet(Box<DeltaNet>),
    ShortConv(Box<ShortConv>),
    Mamba(Box<Mamba>),
    Mlp(Box<Mlp>),
    /// An MLP without a gate (GPT-2, Nemotron-H, image encoders).
    Plain(Box<PlainMlp>),
    Experts(Box<Moe>),
    MlpAndExperts(Box<MlpAndExperts>),
    PerLayer(Box<PerLayerGate>),
}

/// How a branch joins the residual stream.
#[derive(Debug)]
pub enum Join {
    /// `x + y`, which the branch's last matrix product adds up by itself.
    Plain,
    /// `x + factor y`: Granite has a residual multiplier.
    Scaled(f32),
    /// `x + norm(y)`. Gemma 2, OLMo 2.
    Normed(Norm),
    /// `x + gain y`, with a factor for each feature. `DINOv2`.
    Gained(Gained),
}

/// A factor for each feature, `[features]`, such as the layer scale of `DINOv2`.
#[derive(Debug)]
pub struct Gained {
    pub gain: Weight,
    /// A vector of ones for the gradient of the factors; only where they are trained.
    ones: Option<FloatBuffer>,
}

impl Gained {
    pub fn new(gain: Weight, ones: impl FnOnce() -> FloatBuffer) -> Self {
        let ones = gain.trains().then(ones);
        Self { gain, ones }
    }

    /// `gain v`, feature by feature: `[tokens, features]`.
    pub fn times(&self, pass: &Pass<'_>, v: &Activation) -> Activation {
        feature_scale::times(v, self.gain.view(pass.values).vector())
    }

    /// From the gradient of [`Gained::times`] to that of `v`. Adds that of the factors to `grads`, if they are trained.
    pub fn backward(&self, pass: &Pass<'_>, v: &Activation, dy: &Activation, grads: &mut Grads<'_>) -> Activation {
        if let (Some(ones), Some(range)) = (&self.ones, self.gain.trained()) {
            feature_scale::backward(dy, v, ones.view(), grads.at(range));
        }
        self.times(pass, dy)
    }
}

/// What [`Join`] keeps for backward: the input and `rstd` of a norm, or what the factors multiplied, without `rstd`.
type Raw<T = Activation> = Option<(T, Option<Activation>)>;

/// What forward keeps for backward, beside the branch's input.
#[derive(Debug)]
pub struct Saved<T = Activation> {
    /// The normed input, where it is kept.
    normed: Option<T>,
    rstd: Option<Activation>,
    part: PartSaved<T>,
    raw: Raw<T>,
    laurel: Option<laurel::Saved<T>>,
}

/// What a part keeps for backward.
#[derive(Debug)]
enum PartSaved<T> {
    /// With what its output projection keeps.
    Attention(attention::Saved<T>, Option<linear::Saved<T>>),
    /// With what its output projection keeps.
    CrossAttention(cross_attention::Saved<T>, Option<linear::Saved<T>>),
    /// With what its output projection keeps.
    DeltaNet(delta_net::Saved<T>, Option<linear::Saved<T>>),
    /// With what its output projection keeps.
    ShortConv(short_conv::Saved<T>, Option<linear::Saved<T>>),
    /// With what its output projection keeps.
    Mamba(mamba::Saved<T>, Option<linear::Saved<T>>),
    /// With what `down` keeps, and the input of `down`, where that is kept.
    Mlp(mlp::Saved<T>, Option<linear::Saved<T>>, Option<T>),
    /// With what `fc2` keeps, and the input of `fc2`, where that is kept.
    Plain(plain_mlp::Saved<T>, Option<linear::Saved<T>>, Option<T>),
    Experts(moe::Saved<T>),
    /// Nothing: backward recomputes the branch, tile by tile.
    Again,
    MlpAndExperts(Box<mlp_and_experts::Saved<T>>),
    /// With what its projection keeps.
    PerLayer(per_layer::Saved<T>, Option<linear::Saved<T>>),
}

impl<T> Saved<T> {
    /// What a branch keeps that backward recomputes tile by tile: nothing ([`super::tiled_branch`]).
    pub const fn again() -> Self {
        Self { normed: None, rstd: None, part: PartSaved::Again, raw: None, laurel: None }
    }

    /// Applies `f` to each activation that is kept: to store it in 16 bits or on the host, or to restore it
    /// ([`super::kept`]).
    pub fn map<U>(self, f: &impl Fn(T) -> U) -> Saved<U> {
        let extra = |extra: Option<linear::Saved<T>>| extra.map(|extra| extra.map(f));
        Saved {
            normed: self.normed.map(f),
            rstd: self.rstd,
            part: match self.part {
                PartSaved::Attention(saved, o) => PartSaved::Attention(saved.map(f), extra(o)),
                PartSaved::CrossAttention(saved, o) => PartSaved::CrossAttention(saved.map(f), extra(o)),
                PartSaved::DeltaNet(saved, out) => PartSaved::DeltaNet(saved.map(f), extra(out)),
                PartSaved::ShortConv(saved, out) => PartSaved::ShortConv(saved.map(f), extra(out)),
                PartSaved::Mamba(saved, out) => PartSaved::Mamba(saved.map(f), extra(out)),
                PartSaved::Mlp(saved, down, middle) => PartSaved::Mlp(saved.map(f), extra(down), middle.map(f)),
                PartSaved::Plain(saved, fc2, middle) => PartSaved::Plain(saved.map(f), extra(fc2), middle.map(f)),
                PartSaved::Experts(saved) => PartSaved::Experts(saved.map(f)),
                PartSaved::Again => PartSaved::Again,
                PartSaved::MlpAndExperts(saved) => PartSaved::MlpAndExperts(Box::new(saved.map(f))),
                PartSaved::PerLayer(saved, out) => PartSaved::PerLayer(saved.map(f), extra(out)),
            },
            raw: self.raw.map(|(input, rstd)| (f(input), rstd)),
            laurel: self.laurel.map(|saved| saved.map(f)),
        }
    }

    /// Which experts the tokens went to, in a branch of experts.
    pub const fn routing(&self) -> Option<&Routing> {
        match &self.part {
            PartSaved::Experts(saved) => Some(&saved.routing),
            PartSaved::MlpAndExperts(saved) => Some(&saved.moe.routing),
            _ => None,
        }
    }
}

impl Join {
    /// Adds the branch's output, `last(input)`, to the residual stream `x`.
    fn forward(
        &self,
        pass: &Pass<'_>,
        last: &Linear,
        input: &Activation,
        x: &Activation,
    ) -> (Activation, Option<linear::Saved>, Raw) {
        if let Self::Plain = self {
            let (y, extra) = last.forward(pass, input, Some(x));
            return (y, extra, None);
        }
        let (y, extra) = last.forward(pass, input, None);
        let (y, raw) = self.add(pass, y, x);
        (y, extra, raw)
    }

    /// Adds the branch's output `y` to the residual stream `x`.
    fn add(&self, pass: &Pass<'_>, mut y: Activation, x: &Activation) -> (Activation, Raw) {
        match self {
            Self::Plain => {
                elementwise::add(&mut y, x);
                (y, None)
            }
            Self::Scaled(factor) => {
                elementwise::scale_add(&mut y, *factor, x);
                (y, None)
            }
            Self::Normed(norm) => {
                let (mut normed, rstd) = norm.forward(pass, &y, 1);
                elementwise::add(&mut normed, x);
                (normed, Some((y, Some(rstd))))
            }
            Self::Gained(Gained { gain, ones }) => {
                let mut joined = x.copy();
                feature_scale::add(&mut joined, &y, gain.view(pass.values).vector());
                (joined, ones.is_some().then_some((y, None)))
            }
        }
    }

    /// The gradient of the branch's output, where it isn't `dy` itself, that of the joined stream.
    fn backward(&self, pass: &Pass<'_>, raw: Raw, dy: &Activation, grads: &mut Grads<'_>) -> Option<Activation> {
        match (self, raw) {
            (Self::Plain, _) => None,
            (Self::Scaled(factor), _) => Some(elementwise::scaled(dy, *factor)),
            (Self::Normed(norm), Some((raw, Some(rstd)))) => {
                let mut d_last = dy.like();
                norm.backward(pass, &raw, &rstd, dy, Some((&mut d_last, false)), grads);
                Some(d_last)
            }
            (Self::Gained(gained), Some((y, _))) => Some(gained.backward(pass, &y, dy, grads)),
            (Self::Gained(gained), None) => Some(gained.times(pass, dy)),
            (Self::Normed(_), _) => unreachable!("a norm keeps its input"),
        }
    }

    fn weights_mut(&mut self) -> Vec<&mut Weight> {
        match self {
            Self::Normed(norm) => norm.weights_mut().collect(),
            Self::Gained(gained) => vec![&mut gained.gain],
            Self::Plain | Self::Scaled(_) => Vec::new(),
        }
    }

    fn trains(&self) -> bool {
        match self {
            Self::Normed(norm) => norm.trains(),
            Self::Gained(gained) => gained.gain.trains(),
            Self::Plain | Self::Scaled(_) => false,
        }
    }
}

impl Branch {
    /// Every weight of the base, without those of adapters.
    pub fn weights_mut(&mut self) -> Vec<&mut Weight> {
        let part = match &mut self.part {
            Part::Attention(attention) => attention.weights_mut(),
            Part::CrossAttention(part) => part.weights_mut(),
            Part::DeltaNet(part) => part.weights_mut(),
            Part::ShortConv(part) => part.weights_mut(),
            Part::Mamba(part) => part.weights_mut(),
            Part::Mlp(mlp) => mlp.weights_mut().collect(),
            Part::Plain(mlp) => mlp.weights_mut().collect(),
            Part::Experts(moe) => moe.weights_mut(),
            Part::MlpAndExperts(both) => both.weights_mut(),
            Part::PerLayer(gate) => gate.weights_mut().collect(),
        };
        let norm = self.norm.iter_mut().flat_map(Norm::weights_mut);
        let laurel = self.laurel.iter_mut().flat_map(|laurel| laurel.weights_mut());
        norm.chain(self.join.weights_mut()).chain(part).chain(laurel).collect()
    }

    /// Whether anything in it is trained.
    pub fn trains(&self) -> bool {
        let part = match &self.part {
            Part::Attention(attention) => attention.linears().any(Linear::trains) || attention.trains_norms(),
            Part::CrossAttention(part) => part.linears().any(Linear::trains),
            Part::DeltaNet(part) => part.trains(),
            Part::ShortConv(part) => part.trains(),
            Part::Mamba(part) => part.trains(),
            Part::Mlp(mlp) => mlp.linears().any(Linear::trains),
            Part::Plain(mlp) => mlp.linears().any(Linear::trains),
            Part::Experts(moe) => moe.trains(),
            Part::MlpAndExperts(both) => both.trains(),
            Part::PerLayer(gate) => gate.linears().any(Linear::trains),
        };
        let laurel = self.laurel.as_ref().is_some_and(|laurel| laurel.trains());
        part || laurel || self.trains_norm() || self.join.trains()
    }

    fn trains_norm(&self) -> bool {
        self.norm.as_ref().is_some_and(Norm::trains)
    }

    /// The residual stream after the branch, and what backward needs. With `whole`, that includes what backward could
    /// recompute at little cost: the normed input, and the input of the MLP's last product.
    pub fn forward(
        &self,
        pass: &Pass<'_>,
        x: &Activation,
        rows: BlockRows<'_>,
        whole: bool,
        mixing: &mut dyn Mixing,
    ) -> (Activation, Saved) {
        match self.tiled(x.tokens(), rows) {
            Some(tiles) => (self.forward_tiled(tiles, pass, x, rows), Saved::again()),
            None => self.forward_whole(pass, x, rows, whole, mixing),
        }
    }

    /// As [`Branch::forward`], all tokens at once.
    pub fn forward_whole(
        &self,
        pass: &Pass<'_>,
        x: &Activation,
        rows: BlockRows<'_>,
        whole: bool,
        mixing: &mut dyn Mixing,
    ) -> (Activation, Saved) {
        if let Some(y) = self.forward_one(pass, x, rows, mixing) {
            // A model for inference trains nothing: nothing is kept.
            return (y, Saved::again());
        }
        let (h, rstd) = self.norm.as_ref().map(|norm| norm.forward(pass, x, 1)).unzip();
        let input = h.as_ref().unwrap_or(x);
        match &self.part {
            Part::Attention(attention) => {
                let saved = mixing.attention(attention, pass, input, rows);
                let picked = rows.outputs.picked.as_ref().map(|picked| x.gather(picked));
                let stream = picked.as_ref().unwrap_or(x);
                let last = |o: &Linear, mixed: &Activation| self.join.forward(pass, o, mixed, stream);
                let (mut y, extra, raw) = attention.output(&saved, last);
                let laurel = self.laurel.as_ref().map(|laurel| {
                    let picked = rows.outputs.picked.as_ref().map(|picked| input.gather(picked));
                    laurel.join(pass, picked.as_ref().unwrap_or(input), &mut y)
                });
                let normed = h.filter(|_| whole);
                (y, Saved { normed, rstd, part: PartSaved::Attention(saved, extra), raw, laurel })
            }
            Part::CrossAttention(part) => {
                let saved = mixing.cross_attention(part, pass, input, rows);
                let normed = h.filter(|_| whole);
                let (y, extra, raw) = self.join.forward(pass, &part.o, &saved.mixed, x);
                (y, Saved { normed, rstd, part: PartSaved::CrossAttention(saved, extra), raw, laurel: None })
            }
            Part::DeltaNet(part) => {
                let saved = mixing.delta_net(part, pass, input, rows);
                let normed = h.filter(|_| whole);
                let (y, extra, raw) = self.join.forward(pass, &part.out_proj, &part.middle(pass, &saved), x);
                (y, Saved { normed, rstd, part: PartSaved::DeltaNet(saved, extra), raw, laurel: None })
            }
            Part::Mamba(part) => {
                let saved = mixing.mamba(part, pass, input, rows);
                let normed = h.filter(|_| whole);
                let (y, extra, raw) = self.join.forward(pass, &part.out_proj, &part.middle(pass, &saved), x);
                (y, Saved { normed, rstd, part: PartSaved::Mamba(saved, extra), raw, laurel: None })
            }
            Part::ShortConv(part) => {
                let (saved, middle) = mixing.short_conv(part, pass, input, rows);
                let normed = h.filter(|_| whole);
                let (y, extra, raw) = self.join.forward(pass, &part.out_proj, &middle, x);
                (y, Saved { normed, rstd, part: PartSaved::ShortConv(saved, extra), raw, laurel: None })
            }
            Part::Mlp(mlp) => {
                let saved = mlp.forward(pass, input);
                let normed = h.filter(|_| whole);
                let middle = mlp.middle(&saved);
                let (y, extra, raw) = self.join.forward(pass, &mlp.down, &middle, x);
                let part = PartSaved::Mlp(saved, extra, whole.then_some(middle));
                (y, Saved { normed, rstd, part, raw, laurel: None })
            }
            Part::Plain(mlp) => {
                let (middle, saved) = mlp.forward(pass, input);
                let normed = h.filter(|_| whole);
                let (y, extra, raw) = self.join.forward(pass, &mlp.fc2, &middle, x);
                let part = PartSaved::Plain(saved, extra, whole.then_some(middle));
                (y, Saved { normed, rstd, part, raw, laurel: None })
            }
            Part::Experts(moe) => {
                let (y, saved) = moe.forward(pass, input);
                let normed = h.filter(|_| whole);
                let (y, raw) = self.join.add(pass, y, x);
                (y, Saved { normed, rstd, part: PartSaved::Experts(saved), raw, laurel: None })
            }
            Part::MlpAndExperts(both) => {
                let (y, saved) = both.forward(pass, x, input);
                let normed = h.filter(|_| whole);
                let (y, raw) = self.join.add(pass, y, x);
                (y, Saved { normed, rstd, part: PartSaved::MlpAndExperts(Box::new(saved)), raw, laurel: None })
            }
            Part::PerLayer(gate) => {
                let saved = gate.forward(pass, input);
                let middle = gate.middle(&saved, rows.own_embeddings(), rows.outputs);
                let normed = h.filter(|_| whole);
                let (y, extra, raw) = self.join.forward(pass, &gate.projection, &middle, x);
                (y, Saved { normed, rstd, part: PartSaved::PerLayer(saved, extra), raw, laurel: None })
            }
        }
    }

    /// As [`Branch::forward`] for one token, where the part can compute with vectors; `None` where it cannot. In a
    /// vector, the features of the token lie side by side. So threads hand each other a sixteenth of the memory of a
    /// panel of 16 tokens. The result is the same to the bit.
    fn forward_one(
        &self,
        pass: &Pass<'_>,
        x: &Activation,
        rows: BlockRows<'_>,
        mixing: &mut dyn Mixing,
    ) -> Option<Activation> {
        if x.tokens() != 1 || self.laurel.is_some() {
            return None;
        }
        let input = || match &self.norm {
            None => x.to_vector(),
            Some(norm) => {
                norm.of_vector(pass, &x.to_vector(), 1).unwrap_or_else(|| norm.forward(pass, x, 1).0.to_vector())
            }
        };
        let (last, middle) = match &self.part {
            Part::Attention(attention) => (&attention.o, mixing.attention_of_one(attention, pass, rows, &input)?),
            Part::Mlp(mlp) if mlp.takes_vectors(pass) => (&mlp.down, mlp.middle_of_vector(pass, &input())),
            _ => return None,
        };
        let plain = matches!(self.join, Join::Plain);
        let y = last.forward_one(pass, &middle, plain.then_some(x));
        Some(if plain { y } else { self.join.add(pass, y, x).0 })
    }

    /// From `dy [rows, hidden]` to the gradient of `x [tokens, hidden]`, or none if `want_dx` is false. Adds to `grads`.
    pub fn backward(
        &self,
        pass: &Pass<'_>,
        x: &Activation,
        saved: Saved,
        mut dy: Activation,
        rows: BlockRows<'_>,
        want_dx: bool,
        grads: &mut Grads<'_>,
    ) -> Option<Activation> {
        if let (PartSaved::Again, Some(tiles)) = (&saved.part, rows.tiles) {
            return self.backward_tiled(tiles, pass, x, dy, rows, want_dx, grads);
        }
        let Saved { normed: mut kept, rstd, part, raw, laurel } = saved;
        let norm = self.norm.as_ref().zip(rstd.as_ref());
        let of_laurel = self.laurel.as_ref().zip(laurel).map(|(laurel, saved)| {
            kept = kept.take().or_else(|| norm.map(|(norm, rstd)| norm.again(pass, x, rstd)));
            let (h, picked) = (kept.as_ref().unwrap_or(x), rows.outputs.picked.as_deref());
            let rows = picked.map(|picked| h.gather(picked));
            let dh = laurel.backward(pass, rows.as_ref().unwrap_or(h), saved, &mut dy, grads);
            match picked {
                Some(picked) => dh.scatter(picked, x.tokens()),
                None => dh,
            }
        });
        let again = || kept.or_else(|| norm.map(|(norm, rstd)| norm.again(pass, x, rstd)));
        let d_last = self.join.backward(pass, raw, &dy, grads);
        let d_part = d_last.as_ref().unwrap_or(&dy);
        // The gradient that goes to the stream without passing the branch's norm.
        let mut beside = None;
        let mut dh = match (&self.part, part) {
            (Part::Attention(attention), PartSaved::Attention(mut saved, extra)) => {
                let d_mixed = attention.backward_output(pass, &mut saved, extra.as_ref(), d_part, grads);
                drop(d_last);
                let (projected, gate, extra) = attention.backward_mix(pass, saved, d_mixed, rows, grads);
                let (h, want_dh) = (again(), want_dx || self.trains_norm());
                let h = h.as_ref().unwrap_or(x);
                attention.backward_projections(pass, h, (projected, gate), &extra, rows.outputs, want_dh, grads)?
            }
            (Part::CrossAttention(part), PartSaved::CrossAttention(saved, extra)) => {
                let mut d_mixed = saved.mixed.like();
                let to = Some((&mut d_mixed, false));
                part.o.backward(pass, &Input::new(&saved.mixed), extra.as_ref(), d_part, to, grads);
                drop(d_last);
                let (h, want_dh) = (again(), want_dx || self.trains_norm());
                let (h, of_rows) = (h.as_ref().unwrap_or(x), (rows.pictures(), rows.outputs));
                part.backward(pass, h, saved, &d_mixed, of_rows, want_dh, grads)?
            }
            (Part::DeltaNet(part), PartSaved::DeltaNet(saved, extra)) => {
                let middle = part.middle(pass, &saved);
                let d_middle = part.out_proj.backward_through(pass, middle, extra.as_ref(), d_part, grads);
                drop(d_last);
                let (h, want_dh) = (again(), want_dx || self.trains_norm());
                let (h, sequences) = (h.as_ref().unwrap_or(x), rows.all.sequences());
                part.backward(pass, h, saved, &d_middle, &sequences, want_dh, grads)?
            }
            (Part::Mamba(part), PartSaved::Mamba(saved, extra)) => {
                let middle = part.middle(pass, &saved);
                let d_middle = part.out_proj.backward_through(pass, middle, extra.as_ref(), d_part, grads);
                drop(d_last);
                let (h, want_dh) = (again(), want_dx || self.trains_norm());
                let (h, sequences) = (h.as_ref().unwrap_or(x), rows.all.sequences());
                part.backward(pass, h, saved, &d_middle, &sequences, want_dh, grads)?
            }
            (Part::ShortConv(part), PartSaved::ShortConv(saved, extra)) => {
                let sequences = rows.all.sequences();
                let middle = part.middle(pass, &saved, &sequences);
                let d_middle = part.out_proj.backward_through(pass, middle, extra.as_ref(), d_part, grads);
                drop(d_last);
                let (h, want_dh) = (again(), want_dx || self.trains_norm());
                part.backward(pass, h.as_ref().unwrap_or(x), saved, &d_middle, &sequences, want_dh, grads)?
            }
            (Part::Mlp(mlp), PartSaved::Mlp(mut saved, extra, middle)) => {
                mlp.backward_down(pass, &mut saved, middle, extra.as_ref(), d_part, grads);
                mlp.backward_gate_up(pass, again().as_ref().unwrap_or(x), saved, grads)
            }
            (Part::Plain(mlp), PartSaved::Plain(saved, extra, middle)) => {
                let middle = middle.unwrap_or_else(|| mlp.middle(&saved));
                let d_middle = mlp.fc2.backward_through(pass, middle, extra.as_ref(), d_part, grads);
                drop(d_last);
                let want_dh = want_dx || self.trains_norm();
                mlp.backward(pass, again().as_ref().unwrap_or(x), saved, &d_middle, want_dh, grads)?
            }
            (Part::Experts(moe), PartSaved::Experts(saved)) => {
                moe.backward(pass, again().as_ref().unwrap_or(x), saved, d_part, grads)
            }
            (Part::MlpAndExperts(both), PartSaved::MlpAndExperts(saved)) => {
                let h = again();
                let (dx, dh) = both.backward(pass, (x, h.as_ref().unwrap_or(x)), *saved, d_part, grads);
                beside = Some(dx);
                dh
            }
            (Part::PerLayer(gate), PartSaved::PerLayer(saved, extra)) => {
                let h = again();
                let inputs = (h.as_ref().unwrap_or(x), rows.own_embeddings(), rows.outputs);
                gate.backward(pass, inputs, saved, extra.as_ref(), d_part, grads)
            }
            _ => unreachable!("a branch keeps its own kind"),
        };
        if let Some(of_laurel) = &of_laurel {
            elementwise::add(&mut dh, of_laurel);
        }
        let picked = match &self.part {
            Part::Attention(_) => rows.outputs.picked.as_ref(),
            _ => None,
        };
        let mut dx = want_dx.then(|| match picked {
            Some(picked) => dy.scatter(picked, x.tokens()),
            None => dy,
        });
        match norm {
            Some((norm, rstd)) => norm.backward(pass, x, rstd, &dh, dx.as_mut().map(|dx| (dx, true)), grads),
            None => dx.iter_mut().for_each(|dx| elementwise::add(dx, &dh)),
        }
        if let (Some(dx), Some(beside)) = (&mut dx, &beside) {
            elementwise::add(dx, beside);
        }
        dx
    }
}
