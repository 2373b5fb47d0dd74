//! Names and shapes of the tensors and linear modules of blocks.
use super::arch::{
    Arch, AttentionSpec, BranchSpec, DeltaNetSpec, LatentSpec, LinearSpec, PartSpec, QkNorm, SharedExpert,
    ShortConvSpec, TensorSpec,
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
        tensors.all
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
            PartSpec::Experts => {
                if let Some(experts) = &self.experts {
                    tensors.add(experts.router(), &[experts.count, hidden]);
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
            }
            PartSpec::Attention(AttentionSpec { latent: Some(latent), .. }) => {
                if let Some(rank) = latent.query_rank {
                    tensors.add("self_attn.q_a_layernorm.weight", &[rank]);
                }
                tensors.add("self_attn.kv_a_layernorm.weight", &[latent.kv_rank]);
            }
            PartSpec::Attention(attention) if self.sinks => tensors.add("self_attn.sinks", &[attention.num_heads]),
            PartSpec::Attention(_) | PartSpec::Mlp { .. } => {}
        }
        if let Some(norm) = branch.post_norm {
            tensors.add(&format!("{norm}.weight"), &[hidden]);
        }
    }

    /// The routers of sparse blocks, under their module names in Transformers 5.
    pub fn routers(&self) -> impl Iterator<Item = LinearSpec> + '_ {
        let of = |layer| {
            let experts = self.experts_of(layer)?;
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

    /// Every linear module in model order: attention and MLP of each block, then `lm_head` (tied or not) or `score`. Routers and routed
    /// experts are not among them.
    pub fn linear_modules(&self) -> Vec<LinearSpec> {
        let mut modules: Vec<_> = (0..self.num_hidden_layers).flat_map(|layer| self.layer_linears(layer)).collect();
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
        let (hidden, query, key) = (self.hidden_size, attention.query_size(), attention.kv_size());
        let query = if attention.gated { 2 * query } else { query };
        let of = |name: &str, out, inputs, bias| (format!("self_attn.{name}"), out, inputs, bias);
        let mut linears = match (attention.kv_from, self.fused) {
            _ if attention.latent.is_some() => self.latent_linears(attention),
            (Some(_), _) => vec![of("q_proj", query, hidden, self.qkv_bias)],
            (None, true) => vec![of("qkv_proj", query + 2 * key, hidden, self.qkv_bias)],
            (None, false) => vec![
                of("q_proj", query, hidden, self.qkv_bias),
                of("k_proj", key, hidden, self.qkv_bias),
                of("v_proj", key, hidden, self.qkv_bias),
            ],
        };
        linears.push(of(self.module_names.o_proj, hidden, attention.mixed_size(), self.o_bias));
        linears
    }

    /// Those of multi-head latent attention but for the last. The second ones have no biases.
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
        if self.fused {
            vec![of("gate_up_proj", 2 * inner, hidden), of(down, hidden, inner)]
        } else {
            vec![of(gate, inner, hidden), of(up, inner, hidden), of(down, hidden, inner)]
        }
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
