//! Names and shapes of the tensors and linear modules of blocks.
use super::arch::{
    Arch, AttentionSpec, BranchSpec, DeltaNetNames, DeltaNetSpec, LinearSpec, MambaSpec, PartSpec, QkNorm,
    SharedExpert, ShortConvSpec, TensorSpec,
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
            PartSpec::Attention(attention) if self.sinks => tensors.add("self_attn.sinks", &[attention.num_heads]),
            PartSpec::Attention(_) | PartSpec::Mlp { .. } | PartSpec::PlainMlp { .. } => {}
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
            PartSpec::Mamba(spec) => mamba_linears(spec, self.module_names.mamba, self.hidden_size),
            PartSpec::Mlp { intermediate_size } => self.mlp_linears(*intermediate_size),
            PartSpec::PlainMlp { intermediate_size } => self.plain_mlp_linears(*intermediate_size),
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
        let (hidden, mixed, key) = (self.hidden_size, attention.query_size(), attention.kv_size());
        let query = if attention.gated { 2 * mixed } else { mixed };
        let module = self.module_names.attention;
        let of = |name: &str, out, inputs, bias| (format!("{module}.{name}"), out, inputs, bias);
        let mut linears = match (attention.kv_from, self.fused) {
            (Some(_), _) => vec![of("q_proj", query, hidden, self.qkv_bias)],
            (None, true) => vec![of("qkv_proj", query + 2 * key, hidden, self.qkv_bias)],
            (None, false) => vec![
                of("q_proj", query, hidden, self.qkv_bias),
                of("k_proj", key, hidden, self.qkv_bias),
                of("v_proj", key, hidden, self.qkv_bias),
            ],
        };
        linears.push(of(self.module_names.o_proj, hidden, mixed, self.o_bias));
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
