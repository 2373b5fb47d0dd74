//! Names and shapes of the tensors and linear modules of blocks.
use super::arch::{
    Arch, AttentionSpec, BranchSpec, DeltaNetSpec, ExpertNames, LinearSpec, PER_LAYER_EMBEDDING, PER_LAYER_NORM,
    PER_LAYER_PROJECTION, PartSpec, QkNorm, SharedExpert, ShortConvSpec, TensorSpec,
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
        tensors.all
    }

    /// Those of the embeddings for each block.
    pub(super) fn per_layer_tensors(&self) -> Vec<TensorSpec> {
        let (Some(spec), Some(projection)) = (&self.per_layer, self.per_layer_projection()) else { return Vec::new() };
        let all = projection.out_features;
        vec![
            TensorSpec::new(PER_LAYER_EMBEDDING, &[spec.vocab_size, all]),
            TensorSpec::new(&projection.weight(), &[all, self.hidden_size]),
            TensorSpec::new(PER_LAYER_NORM, &[spec.width]),
        ]
    }

    /// The module that projects the embedding to those of each block.
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

    fn branch_tensors(&self, layer: usize, branch: &BranchSpec, tensors: &mut Tensors) {
        let hidden = self.hidden_size;
        if let Some(norm) = branch.norm {
            tensors.add(&format!("{norm}.weight"), &[hidden]);
        }
        for linear in self.part_linears(layer, &branch.part) {
            tensors.all.push(TensorSpec::new(&linear.weight(), &[linear.out_features, linear.in_features]));
            if linear.bias {
                tensors.all.push(TensorSpec::new(&format!("{}.bias", linear.name), &[linear.out_features]));
            }
            if let PartSpec::Attention(attention) = &branch.part {
                let (shares, names) = (attention.kv_from.is_some(), self.module_names);
                // Queries of a block without keys of its own have a norm too.
                if linear.name.ends_with(if shares { ".q_proj" } else { ".k_proj" }) {
                    let [query, key] = self.qk_norm_sizes(attention);
                    for (name, size) in [(names.q_norm, query), (names.k_norm, key.filter(|_| !shares))] {
                        if let Some(size) = size {
                            tensors.add(&format!("self_attn.{name}.weight"), &[size]);
                        }
                    }
                }
            }
        }
        match &branch.part {
            PartSpec::DeltaNet(spec) => {
                tensors.add("linear_attn.conv1d.weight", &[spec.qkv_size(), 1, spec.kernel]);
                tensors.add("linear_attn.A_log", &[spec.value_heads]);
                tensors.add("linear_attn.dt_bias", &[spec.value_heads]);
                tensors.add("linear_attn.norm.weight", &[spec.value_dim]);
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
            PartSpec::Attention(attention) if self.sinks => tensors.add("self_attn.sinks", &[attention.num_heads]),
            PartSpec::Attention(_) | PartSpec::Mlp { .. } | PartSpec::PerLayer => {}
        }
        if let Some(norm) = branch.post_norm {
            tensors.add(&format!("{norm}.weight"), &[hidden]);
        }
    }

    /// Those of a block's router and experts, but for a router that is a linear module.
    fn expert_tensors(&self, tensors: &mut Tensors) {
        let (Some(experts), hidden) = (&self.experts, self.hidden_size) else { return };
        if experts.names != ExpertNames::Gemma4 {
            tensors.add(experts.router(), &[experts.count, hidden]);
        }
        if experts.biased {
            tensors.add(&experts.router().replace(".weight", ".bias"), &[experts.count]);
        }
        for expert in 0..experts.count {
            let [gate, up, down] = experts.names(expert);
            tensors.add(&gate, &[experts.width, hidden]);
            tensors.add(&up, &[experts.width, hidden]);
            tensors.add(&down, &[hidden, experts.width]);
            if let Some([gate, up, down]) = experts.bias_names(expert) {
                tensors.add(&gate, &[experts.width]);
                tensors.add(&up, &[experts.width]);
                tensors.add(&down, &[hidden]);
            }
        }
    }

    /// The routers of sparse blocks, under their module names in Transformers 5, but for those that are linear modules.
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

    /// Lengths of the q and k norm weights of a block.
    fn qk_norm_sizes(&self, attention: &AttentionSpec) -> [Option<usize>; 2] {
        match self.qk_norm {
            QkNorm::None => [None; 2],
            QkNorm::Head => [Some(attention.head_dim); 2],
            QkNorm::Whole => [Some(attention.query_size()), Some(attention.kv_size())],
        }
    }

    /// Every linear module in model order: the projection of embeddings for each block, attention and MLP of each block, then `lm_head`
    /// (tied or not) or `score`. Routed experts are not among them, nor most routers, which are parameters.
    pub fn linear_modules(&self) -> Vec<LinearSpec> {
        let mut modules: Vec<_> = self.per_layer_projection().into_iter().collect();
        modules.extend((0..self.num_hidden_layers).flat_map(|layer| self.layer_linears(layer)));
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
        self.blocks[layer].branches.iter().flat_map(move |branch| self.part_linears(layer, &branch.part))
    }

    /// The linear modules of a part of block `layer`.
    fn part_linears(&self, layer: usize, part: &PartSpec) -> Vec<LinearSpec> {
        let linears = match part {
            PartSpec::Attention(attention) => self.attention_linears(attention),
            PartSpec::DeltaNet(spec) => delta_net_linears(spec, self.hidden_size),
            PartSpec::ShortConv(spec) => short_conv_linears(spec, self.hidden_size),
            PartSpec::Mlp { intermediate_size } => self.mlp_linears(*intermediate_size),
            PartSpec::Experts => self.shared_expert_linears(),
            PartSpec::MlpAndExperts { intermediate_size } => {
                let mut linears = self.mlp_linears(*intermediate_size);
                let experts = self.experts.as_ref().map_or(0, |experts| experts.count);
                linears.push(("router.proj".into(), experts, self.hidden_size, false));
                linears
            }
            PartSpec::PerLayer => self.per_layer_linears(),
        };
        let spec = |(name, out_features, in_features, bias)| LinearSpec {
            name: format!("model.layers.{layer}.{name}"),
            out_features,
            in_features,
            bias,
            layer: Some(layer),
        };
        linears.into_iter().map(spec).collect()
    }

    fn attention_linears(&self, attention: &AttentionSpec) -> Vec<Linear> {
        let (hidden, mixed, key) = (self.hidden_size, attention.query_size(), attention.kv_size());
        let query = if attention.gated { 2 * mixed } else { mixed };
        let of = |name: &str, out, inputs, bias| (format!("self_attn.{name}"), out, inputs, bias);
        let mut linears = match (attention.kv_from, self.fused) {
            (Some(_), _) => vec![of("q_proj", query, hidden, self.qkv_bias)],
            (None, true) => vec![of("qkv_proj", query + 2 * key, hidden, self.qkv_bias)],
            (None, false) => vec![
                of("q_proj", query, hidden, self.qkv_bias),
                of("k_proj", key, hidden, self.qkv_bias),
                of("v_proj", key, hidden, self.qkv_bias),
            ],
        };
        if attention.k_eq_v && attention.kv_from.is_none() {
            linears.truncate(2);
        }
        linears.push(of(self.module_names.o_proj, hidden, mixed, self.o_bias));
        linears
    }

    fn mlp_linears(&self, inner: usize) -> Vec<Linear> {
        let (hidden, mlp, [gate, up, down]) = (self.hidden_size, self.module_names.mlp, self.module_names.projections);
        let of = |name: &str, out, inputs| (format!("{mlp}.{name}"), out, inputs, self.mlp_bias);
        if self.fused {
            vec![of("gate_up_proj", 2 * inner, hidden), of(down, hidden, inner)]
        } else {
            vec![of(gate, inner, hidden), of(up, inner, hidden), of(down, hidden, inner)]
        }
    }

    fn per_layer_linears(&self) -> Vec<Linear> {
        let (hidden, width) = (self.hidden_size, self.per_layer.as_ref().map_or(0, |spec| spec.width));
        vec![
            ("per_layer_input_gate".into(), width, hidden, false),
            ("per_layer_projection".into(), hidden, width, false),
        ]
    }

    fn shared_expert_linears(&self) -> Vec<Linear> {
        let Some(SharedExpert { width, gated }) = self.experts.as_ref().and_then(|experts| experts.shared) else {
            return Vec::new();
        };
        let hidden = self.hidden_size;
        let of = |name: &str, out, inputs| (format!("mlp.{name}"), out, inputs, false);
        let mut linears = vec![
            of("shared_expert.gate_proj", width, hidden),
            of("shared_expert.up_proj", width, hidden),
            of("shared_expert.down_proj", hidden, width),
        ];
        if gated {
            linears.push(of("shared_expert_gate", 1, hidden));
        }
        linears
    }
}

fn delta_net_linears(spec: &DeltaNetSpec, hidden: usize) -> Vec<Linear> {
    let of = |name: &str, out, inputs| (format!("linear_attn.{name}"), out, inputs, false);
    vec![
        of("in_proj_qkv", spec.qkv_size(), hidden),
        of("in_proj_z", spec.value_size(), hidden),
        of("in_proj_b", spec.value_heads, hidden),
        of("in_proj_a", spec.value_heads, hidden),
        of("out_proj", hidden, spec.value_size()),
    ]
}

fn short_conv_linears(spec: &ShortConvSpec, hidden: usize) -> Vec<Linear> {
    let of = |name: &str, out| (format!("conv.{name}"), out, hidden, spec.bias);
    vec![of("in_proj", 3 * hidden), of("out_proj", hidden)]
}
