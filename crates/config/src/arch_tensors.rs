//! Names and shapes of the tensors and linear modules of blocks.
use super::arch::{
    ALTUP_PROJECTIONS, ALTUP_UNEMBED_PROJECTIONS, AltUpSpec, Arch, AttentionSpec, BranchSpec, CrossAttentionSpec,
    DeltaNetNames, DeltaNetSpec, ExpertNames, Experts, GateSpec, LAYER_SCALAR, LatentSpec, LinearSpec, MambaSpec,
    PER_LAYER_EMBEDDING, PER_LAYER_NORM, PER_LAYER_PROJECTION, PartSpec, QkNorm, SharedExpert, ShortConvSpec,
    TensorSpec,
};

/// A linear module within a block: name, out features, in features, bias.
type Linear = (String, usize, usize, bool);

/// Tensors below a prefix.
struct Tensors {
    prefix: String,
    all: Vec<TensorSpec>,
}

impl Tensors {
    fn add(&mut self, name: &str, shape: &[usize]) {
        self.all.push(TensorSpec::new(&format!("{}.{name}", self.prefix), shape));
    }
}

impl Arch {
    pub(super) fn layer_tensors(&self, layer: usize) -> Vec<TensorSpec> {
        let mut tensors = Tensors { prefix: format!("model.layers.{layer}"), all: Vec::new() };
        for branch in &self.blocks[layer].branches {
            self.branch_tensors(layer, branch, &mut tensors);
        }
        if self.layer_scalar {
            tensors.add("layer_scalar", &[1]);
        }
        if self.altup.is_some() {
            for linear in self.altup_linears().into_iter().chain(self.laurel_linears()) {
                let (name, out, inputs, _) = linear;
                tensors.add(&format!("{name}.weight"), &[out, inputs]);
            }
            for name in ["altup.router_norm.weight", "altup.correct_output_scale", "laurel.post_laurel_norm.weight"] {
                tensors.add(name, &[self.hidden_size]);
            }
        }
        tensors.all
    }

    /// The tensors of the per-layer embeddings; empty without them.
    pub(super) fn per_layer_tensors(&self) -> Vec<TensorSpec> {
        let (Some(spec), Some(projection)) = (&self.per_layer, self.per_layer_projection()) else { return Vec::new() };
        let all = projection.out_features;
        vec![
            TensorSpec::new(PER_LAYER_EMBEDDING, &[spec.vocab_size, all]),
            TensorSpec::new(&projection.weight(), &[all, self.hidden_size]),
            TensorSpec::new(PER_LAYER_NORM, &[spec.width]),
        ]
    }

    /// The projection from the token embedding to the per-layer embeddings.
    fn per_layer_projection(&self) -> Option<LinearSpec> {
        let spec = self.per_layer.as_ref()?;
        Some(LinearSpec {
            name: PER_LAYER_PROJECTION.into(),
            out_features: self.num_hidden_layers * spec.width,
            in_features: self.hidden_size,
            bias: false,
            layer: None,
        })
    }

    /// The projections that make or join the further streams (`module`); none without several streams.
    pub(super) fn stream_linears(&self, module: &str) -> impl Iterator<Item = LinearSpec> {
        let others = self.altup.as_ref().map_or(0, |spec| spec.streams - 1);
        let (module, hidden) = (module.to_owned(), self.hidden_size);
        (0..others).map(move |index| LinearSpec {
            name: format!("{module}.{index}"),
            out_features: hidden,
            in_features: hidden,
            bias: false,
            layer: None,
        })
    }

    /// The matrices with which a block predicts and corrects streams.
    fn altup_linears(&self) -> Vec<Linear> {
        let Some(AltUpSpec { streams, .. }) = self.altup else { return Vec::new() };
        vec![
            ("altup.correction_coefs".into(), streams, streams, false),
            ("altup.prediction_coefs".into(), streams * streams, streams, false),
            ("altup.modality_router".into(), streams, self.hidden_size, false),
        ]
    }

    /// The two matrices of the low-rank branch beside attention.
    fn laurel_linears(&self) -> Vec<Linear> {
        let Some(AltUpSpec { laurel_rank: rank, .. }) = self.altup else { return Vec::new() };
        vec![
            ("laurel.linear_left".into(), rank, self.hidden_size, false),
            ("laurel.linear_right".into(), self.hidden_size, rank, false),
        ]
    }

    fn branch_tensors(&self, layer: usize, branch: &BranchSpec, tensors: &mut Tensors) {
        let hidden = self.hidden_size;
        if let Some(norm) = branch.norm {
            tensors.all.extend(self.norm_tensors(&format!("{}.{norm}", tensors.prefix)));
        }
        for linear in self.part_linears(layer, &branch.part) {
            tensors.all.push(TensorSpec::new(&linear.weight(), &[linear.out_features, linear.in_features]));
            if linear.bias {
                tensors.all.push(TensorSpec::new(&format!("{}.bias", linear.name), &[linear.out_features]));
            }
            if let PartSpec::Attention(attention) = &branch.part {
                let (shares, names) = (attention.kv_from.is_some(), self.module_names);
                // A block that takes keys from another block still has a norm on its queries.
                if linear.name.ends_with(if shares { ".q_proj" } else { ".k_proj" }) {
                    let [query, key] = self.qk_norm_sizes(attention);
                    for (name, size) in [(names.q_norm, query), (names.k_norm, key.filter(|_| !shares))] {
                        if let Some(size) = size {
                            tensors.add(&format!("{}.{name}.weight", names.attention), &[size]);
                        }
                    }
                }
            }
        }
        match &branch.part {
            PartSpec::DeltaNet(spec) => {
                for (name, channels) in spec.convolutions() {
                    tensors.add(&format!("linear_attn.{name}.weight"), &[channels, 1, spec.kernel]);
                }
                tensors.add("linear_attn.A_log", &[spec.value_heads]);
                tensors.add("linear_attn.dt_bias", &[spec.value_heads]);
                tensors.add(&format!("linear_attn.{}.weight", spec.names.norm()), &[spec.value_dim]);
            }
            PartSpec::Mamba(spec) => {
                let mixer = self.module_names.mamba;
                tensors.add(&format!("{mixer}.conv1d.weight"), &[spec.conv_size(), 1, spec.kernel]);
                if spec.conv_bias {
                    tensors.add(&format!("{mixer}.conv1d.bias"), &[spec.conv_size()]);
                }
                for name in ["A_log", "D", "dt_bias"] {
                    tensors.add(&format!("{mixer}.{name}"), &[spec.heads]);
                }
                tensors.add(&format!("{mixer}.norm.weight"), &[spec.inner_size()]);
            }
            PartSpec::ShortConv(spec) => {
                tensors.add("conv.conv.weight", &[hidden, 1, spec.kernel]);
                if spec.bias {
                    tensors.add("conv.conv.bias", &[hidden]);
                }
            }
            PartSpec::Experts => self.expert_tensors(tensors),
            PartSpec::MlpAndExperts { .. } => {
                for norm in ["post_feedforward_layernorm_1", "pre_feedforward_layernorm_2"] {
                    tensors.add(&format!("{norm}.weight"), &[hidden]);
                }
                tensors.add("router.scale", &[hidden]);
                tensors.add("router.per_expert_scale", &[self.experts.as_ref().map_or(0, |experts| experts.count)]);
                self.expert_tensors(tensors);
                tensors.add("post_feedforward_layernorm_2.weight", &[hidden]);
            }
            PartSpec::Attention(AttentionSpec { latent: Some(latent), .. }) => {
                if let Some(rank) = latent.query_rank {
                    tensors.add("self_attn.q_a_layernorm.weight", &[rank]);
                }
                tensors.add("self_attn.kv_a_layernorm.weight", &[latent.kv_rank]);
            }
            PartSpec::Attention(attention) if self.sinks => tensors.add("self_attn.sinks", &[attention.num_heads]),
            PartSpec::Attention(_)
            | PartSpec::CrossAttention(_)
            | PartSpec::Mlp { .. }
            | PartSpec::PlainMlp { .. }
            | PartSpec::PerLayer => {}
        }
        if let Some(norm) = branch.post_norm {
            tensors.all.extend(self.norm_tensors(&format!("{}.{norm}", tensors.prefix)));
        }
    }

    /// Whether the tensor is a buffer in Transformers, so that no run trains it.
    pub fn is_buffer(&self, tensor: &str) -> bool {
        let bias = self.experts.as_ref().and_then(Experts::choice_bias);
        let of_choice = bias.is_some_and(|bias| tensor.strip_suffix(bias).is_some_and(|block| block.ends_with('.')));
        of_choice || self.layer_scalar && tensor.ends_with(LAYER_SCALAR)
    }

    /// Whether the model has any such tensor.
    pub fn has_buffers(&self) -> bool {
        self.layer_scalar || self.experts.as_ref().is_some_and(|experts| experts.choice_bias().is_some())
    }

    /// The tensors of a block's router and experts. A router that is a linear module is left out.
    fn expert_tensors(&self, tensors: &mut Tensors) {
        let (Some(experts), hidden) = (&self.experts, self.hidden_size) else { return };
        if experts.names != ExpertNames::Gemma4 {
            tensors.add(experts.router(), &[experts.count, hidden]);
        }
        let features = experts.latent.unwrap_or(hidden);
        if experts.biased {
            tensors.add(&experts.router().replace(".weight", ".bias"), &[experts.count]);
        }
        if let Some(name) = experts.choice_bias() {
            tensors.add(name, &[experts.count]);
        }
        for expert in 0..experts.count {
            let names = experts.names(expert);
            for (index, name) in names.iter().enumerate() {
                let inner = [experts.width, features];
                tensors.add(name, &if index + 1 < names.len() { inner } else { [features, experts.width] });
            }
            if let Some([gate, up, down]) = experts.bias_names(expert) {
                tensors.add(&gate, &[experts.width]);
                tensors.add(&up, &[experts.width]);
                tensors.add(&down, &[hidden]);
            }
        }
    }

    /// The routers of sparse blocks, by their module names in Transformers 5. Those that are linear modules anyway are
    /// left out.
    pub fn routers(&self) -> impl Iterator<Item = LinearSpec> + '_ {
        let of = |layer| {
            let experts = self.experts_of(layer).filter(|experts| experts.names != ExpertNames::Gemma4)?;
            Some(LinearSpec {
                name: format!("model.layers.{layer}.{}", experts.router_module()),
                out_features: experts.count,
                in_features: self.hidden_size,
                bias: experts.biased,
                layer: Some(layer),
            })
        };
        (0..self.num_hidden_layers).filter_map(of)
    }

    /// The lengths of the weights of a block's norms on q and k.
    fn qk_norm_sizes(&self, attention: &AttentionSpec) -> [Option<usize>; 2] {
        match self.qk_norm {
            QkNorm::None | QkNorm::Weightless => [None; 2],
            QkNorm::Head => [Some(attention.head_dim); 2],
            QkNorm::Whole => [Some(attention.query_size()), Some(attention.kv_size())],
        }
    }

    /// Every linear module in model order: the projection to per-layer embeddings, attention and MLP of each block,
    /// then `lm_head` (tied or not) or `score`. Routed experts are not included, and neither are most routers, which
    /// are parameters.
    pub fn linear_modules(&self) -> Vec<LinearSpec> {
        let mut modules: Vec<_> = self.per_layer_projection().into_iter().collect();
        modules.extend(self.stream_linears(ALTUP_PROJECTIONS));
        modules.extend((0..self.num_hidden_layers).flat_map(|layer| self.layer_linears(layer)));
        modules.extend(self.stream_linears(ALTUP_UNEMBED_PROJECTIONS));
        modules.push(LinearSpec {
            name: if self.score.is_some() { "score" } else { "lm_head" }.into(),
            out_features: self.outputs(),
            in_features: self.hidden_size,
            bias: false,
            layer: None,
        });
        modules
    }

    fn layer_linears(&self, layer: usize) -> impl Iterator<Item = LinearSpec> {
        let of_streams = self.altup_linears().into_iter().chain(self.laurel_linears());
        let of_streams = of_streams.map(move |linear| block_linear(layer, linear));
        let branches = self.blocks[layer].branches.iter();
        branches.flat_map(move |branch| self.part_linears(layer, &branch.part)).chain(of_streams)
    }

    /// The linear modules of a part of block `layer`.
    fn part_linears(&self, layer: usize, part: &PartSpec) -> Vec<LinearSpec> {
        let linears = match part {
            PartSpec::Attention(attention) => self.attention_linears(attention),
            PartSpec::CrossAttention(spec) => cross_attention_linears(*spec, self.hidden_size),
            PartSpec::DeltaNet(spec) => delta_net_linears(spec, self.hidden_size),
            PartSpec::ShortConv(spec) => short_conv_linears(spec, self.hidden_size),
            PartSpec::Mamba(spec) => mamba_linears(spec, self.module_names.mamba, self.hidden_size),
            PartSpec::Mlp { intermediate_size, .. } => self.mlp_linears(*intermediate_size),
            PartSpec::PlainMlp { intermediate_size, .. } => self.plain_mlp_linears(*intermediate_size),
            PartSpec::Experts => self.shared_expert_linears(),
            PartSpec::MlpAndExperts { intermediate_size } => {
                let mut linears = self.mlp_linears(*intermediate_size);
                let experts = self.experts.as_ref().map_or(0, |experts| experts.count);
                linears.push(("router.proj".into(), experts, self.hidden_size, false));
                linears
            }
            PartSpec::PerLayer => self.per_layer_linears(),
        };
        linears.into_iter().map(|linear| block_linear(layer, linear)).collect()
    }

    fn attention_linears(&self, attention: &AttentionSpec) -> Vec<Linear> {
        let (hidden, width, key) = (self.hidden_size, attention.query_size(), attention.kv_size());
        let query = if attention.gate == GateSpec::Beside { 2 * width } else { width };
        let module = self.module_names.attention;
        let of = |name: &str, out, inputs, bias| (format!("{module}.{name}"), out, inputs, bias);
        let mut linears = match (attention.kv_from, self.fused) {
            _ if attention.latent.is_some() => self.latent_linears(attention),
            (Some(_), _) => vec![of("q_proj", query, hidden, self.qkv_bias)],
            (None, true) => vec![of(self.module_names.qkv_proj, query + 2 * key, hidden, self.qkv_bias)],
            (None, false) => vec![
                of("q_proj", query, hidden, self.qkv_bias),
                of("k_proj", key, hidden, self.qkv_bias),
                of("v_proj", key, hidden, self.qkv_bias),
            ],
        };
        match attention.gate {
            GateSpec::Own => linears.push(of("gate_proj", width, hidden, false)),
            GateSpec::Heads => linears.push(of("g_proj", attention.num_heads, hidden, false)),
            GateSpec::None | GateSpec::Beside => {}
        }
        if attention.k_eq_v && attention.kv_from.is_none() {
            linears.truncate(2);
        }
        linears.push(of(self.module_names.o_proj, hidden, attention.mixed_size(), self.o_bias));
        linears
    }

    /// The linear modules of multi-head latent attention except the output projection. The modules that read a latent
    /// have no biases, and neither has `q_proj`.
    fn latent_linears(&self, attention: &AttentionSpec) -> Vec<Linear> {
        let Some(LatentSpec { query_rank, kv_rank, nope_dim, rope_dim, value_dim }) = attention.latent else {
            return Vec::new();
        };
        let (hidden, query, bias) = (self.hidden_size, attention.query_size(), self.qkv_bias);
        let of = |name: &str, out, inputs, bias| (format!("self_attn.{name}"), out, inputs, bias);
        let mut linears = match query_rank {
            Some(rank) => vec![of("q_a_proj", rank, hidden, bias), of("q_b_proj", query, rank, false)],
            None => vec![of("q_proj", query, hidden, false)],
        };
        linears.push(of("kv_a_proj_with_mqa", kv_rank + rope_dim, hidden, bias));
        linears.push(of("kv_b_proj", attention.num_heads * (nope_dim + value_dim), kv_rank, false));
        linears
    }

    fn mlp_linears(&self, inner: usize) -> Vec<Linear> {
        let (hidden, mlp, [gate, up, down]) = (self.hidden_size, self.module_names.mlp, self.module_names.projections);
        let of = |name: &str, out, inputs| (format!("{mlp}.{name}"), out, inputs, self.mlp_bias);
        match self.module_names.gate_up {
            Some(gate_up) => vec![of(gate_up, 2 * inner, hidden), of(down, hidden, inner)],
            None => vec![of(gate, inner, hidden), of(up, inner, hidden), of(down, hidden, inner)],
        }
    }

    fn plain_mlp_linears(&self, inner: usize) -> Vec<Linear> {
        let (hidden, mlp, [_, up, down]) = (self.hidden_size, self.module_names.mlp, self.module_names.projections);
        let of = |name: &str, out, inputs| (format!("{mlp}.{name}"), out, inputs, self.mlp_bias);
        vec![of(up, inner, hidden), of(down, hidden, inner)]
    }

    fn per_layer_linears(&self) -> Vec<Linear> {
        let (hidden, width) = (self.hidden_size, self.per_layer.as_ref().map_or(0, |spec| spec.width));
        vec![
            ("per_layer_input_gate".into(), width, hidden, false),
            ("per_layer_projection".into(), hidden, width, false),
        ]
    }

    fn shared_expert_linears(&self) -> Vec<Linear> {
        let experts = self.experts.as_ref().and_then(|experts| Some((experts.shared?, experts.shared_module())));
        let Some((SharedExpert { width, gated }, module)) = experts else { return Vec::new() };
        if module == self.module_names.mlp {
            return self.mlp_linears(width);
        }
        let experts = self.experts.as_ref();
        let (hidden, latent) = (self.hidden_size, experts.and_then(|experts| experts.latent));
        let has_gate = experts.is_some_and(|experts| experts.gated);
        let bias = !has_gate && self.mlp_bias;
        let of = |name: &str, out, inputs| (format!("{module}{name}"), out, inputs, bias);
        let mut linears = if has_gate { vec![of(".gate_proj", width, hidden)] } else { Vec::new() };
        linears.extend([of(".up_proj", width, hidden), of(".down_proj", hidden, width)]);
        if gated {
            linears.push(of("_gate", 1, hidden));
        }
        if let Some(latent) = latent {
            let feed = experts.map_or("", Experts::feed);
            linears.push((format!("{feed}.fc1_latent_proj"), latent, hidden, bias));
            linears.push((format!("{feed}.fc2_latent_proj"), hidden, latent, bias));
        }
        linears
    }
}

/// A module of a block.
fn block_linear(layer: usize, (name, out_features, in_features, bias): Linear) -> LinearSpec {
    LinearSpec { name: format!("model.layers.{layer}.{name}"), out_features, in_features, bias, layer: Some(layer) }
}

fn cross_attention_linears(spec: CrossAttentionSpec, hidden: usize) -> Vec<Linear> {
    let [query, key_value, out] =
        CrossAttentionSpec::LINEARS.map(|name| format!("{}.{name}", CrossAttentionSpec::MODULE));
    let width = spec.size();
    vec![(query, width, hidden, true), (key_value, 2 * width, hidden, true), (out, hidden, width, true)]
}

fn delta_net_linears(spec: &DeltaNetSpec, hidden: usize) -> Vec<Linear> {
    let of = |name: &str, out, inputs| (format!("linear_attn.{name}"), out, inputs, false);
    let (heads, value) = (spec.value_heads, spec.value_size());
    match spec.names {
        DeltaNetNames::Qwen => vec![
            of("in_proj_qkv", spec.qkv_size(), hidden),
            of("in_proj_z", value, hidden),
            of("in_proj_b", heads, hidden),
            of("in_proj_a", heads, hidden),
            of("out_proj", hidden, value),
        ],
        DeltaNetNames::Olmo => vec![
            of("q_proj", spec.key_size(), hidden),
            of("k_proj", spec.key_size(), hidden),
            of("v_proj", value, hidden),
            of("a_proj", heads, hidden),
            of("b_proj", heads, hidden),
            of("g_proj", value, hidden),
            of("o_proj", hidden, value),
        ],
        DeltaNetNames::QwenNext => vec![
            of("in_proj_qkvz", spec.qkv_size() + value, hidden),
            of("in_proj_ba", 2 * heads, hidden),
            of("out_proj", hidden, value),
        ],
    }
}

fn mamba_linears(spec: &MambaSpec, mixer: &str, hidden: usize) -> Vec<Linear> {
    let of = |name: &str, out, inputs| (format!("{mixer}.{name}"), out, inputs, spec.bias);
    let all = spec.inner_size() + spec.conv_size() + spec.heads;
    vec![of("in_proj", all, hidden), of("out_proj", hidden, spec.inner_size())]
}

fn short_conv_linears(spec: &ShortConvSpec, hidden: usize) -> Vec<Linear> {
    let of = |name: &str, out| (format!("conv.{name}"), out, hidden, spec.bias);
    vec![of("in_proj", 3 * hidden), of("out_proj", hidden)]
}
