//! A mixture of experts: its sizes, its router, and what its tensors are called.

/// The mixture of experts of the blocks that have one ([`super::arch::PartSpec::Experts`]).
#[allow(clippy::struct_excessive_bools)] // each is a fact of its own
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Experts {
    /// Number of routed experts in a block.
    pub count: usize,
    /// Number of experts that the router chooses for a token.
    pub per_token: usize,
    /// Intermediate size of an expert.
    pub width: usize,
    /// Whether the routing weights of a token's experts are scaled to sum to 1 (`norm_topk_prob`).
    pub normalised: bool,
    /// What else the router does.
    pub router: RouterSpec,
    /// The MLP beside the experts, which every token goes through; `None` without one.
    pub shared: Option<SharedExpert>,
    /// Coefficient of the load-balancing loss (`router_aux_loss_coef`); `None` where `output_router_logits` is off.
    pub balance: Option<f64>,
    /// What their tensors are called.
    pub names: ExpertNames,
    /// The constants of gpt-oss's activation; `None`: that of the other MLPs.
    pub clamp: Option<Clamp>,
    /// Whether router, gate, up and down have biases.
    pub biased: bool,
    /// Whether they have a gate, as the shared one then has too; else an expert is `down(relu(up(h))^2)`.
    pub gated: bool,
    /// The features that they see and give, between two projections of the block's; `None`: all (`moe_latent_size`).
    pub latent: Option<usize>,
    /// Whether `config.json` says that the files hold their matrices in MXFP4.
    pub mxfp4: bool,
}

/// How a router scores experts and chooses among them.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RouterSpec {
    /// Whether scores are sigmoids of the logits; else their softmax.
    pub sigmoid: bool,
    /// Whether a buffer, which is never trained, is added to the scores for the choice ([`Experts::choice_bias`]).
    pub choice_bias: bool,
    /// Among which groups of experts a token chooses; `None`: among all.
    pub groups: Option<ExpertGroups>,
    /// Added to the sum that normalised weights are divided by.
    pub eps: f64,
    /// Factor on all weights (`routed_scaling_factor`).
    pub scale: f64,
}

/// Groups of experts of one size, of which a token chooses some.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExpertGroups {
    /// How many there are (`n_group`).
    pub count: usize,
    /// How many of them a token may go to (`topk_group`).
    pub chosen: usize,
    /// Whether the score of a group is that of its best expert; else it is the sum of its best two.
    pub by_best: bool,
}

impl RouterSpec {
    /// A softmax, and the largest probabilities.
    pub const SOFTMAX: Self = Self { sigmoid: false, choice_bias: false, groups: None, eps: 0.0, scale: 1.0 };
    /// A sigmoid each, and a bias for the choice.
    pub const SIGMOID: Self = Self { sigmoid: true, choice_bias: true, ..Self::SOFTMAX };
}

/// What tensors of experts are called within a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExpertNames {
    /// `mlp.gate`, `mlp.experts.0.gate_proj`, `mlp.shared_expert`.
    Qwen,
    /// `block_sparse_moe.gate`, `block_sparse_moe.experts.0.w1`.
    Mixtral,
    /// As Qwen's, with `mlp.gate.e_score_correction_bias` and `mlp.shared_experts` (`DeepSeek`, GLM).
    DeepSeek,
    /// `feed_forward.gate`, `feed_forward.experts.0.w1`, `feed_forward.expert_bias`.
    Lfm2,
    /// As Qwen's, with `mlp.router.gate`, `mlp.expert_bias` and `mlp.shared_experts`.
    Afmoe,
    /// As Mixtral's, with `block_sparse_moe.e_score_correction_bias`.
    MiniMax,
    /// `mlp.router`, and experts as Qwen's, which its files hold stacked, transposed, and with gate and up in turn.
    GptOss,
    /// `router.proj`, a module, and `experts.0.gate_proj`, which its files hold stacked.
    Gemma4,
    /// As `DeepSeek`'s, in the block's `mixer`, with projections `fc1_latent_proj` and `fc2_latent_proj` around the experts.
    Nemotron,
    /// `block_sparse_moe.router.layer`, `block_sparse_moe.experts.0.gate_proj`, which its files hold stacked, and `shared_mlp`.
    Granite,
}

/// gpt-oss's activation: `(up + 1) g sigmoid(alpha g)`, where `g` is the gate cut at `limit`, and `up` is cut at both sides.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Clamp {
    /// Factor within the sigmoid (`swiglu_alpha`).
    pub alpha: f64,
    /// Where gate and up are cut (`swiglu_limit`).
    pub limit: f64,
}

/// An MLP beside the experts of a block: every token goes through it, and its output is added to theirs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SharedExpert {
    /// Width of its hidden layer.
    pub width: usize,
    /// Whether its output is multiplied by the sigmoid of a linear module of one output (`shared_expert_gate`).
    pub gated: bool,
}

impl Experts {
    /// Whether Transformers reads this family's experts only from stacked tensors, as in the makers' files.
    pub const fn are_only_stacked(&self) -> bool {
        matches!(self.names, ExpertNames::Gemma4 | ExpertNames::Granite)
    }

    /// Tensor names of an expert's projections, within the block: gate, up and down, or up and down.
    pub fn names(&self, expert: usize) -> Vec<String> {
        let names = self.modules(expert).map(|module| format!("{module}.weight"));
        names.into_iter().skip(usize::from(!self.gated)).collect()
    }

    /// Names of the parameters of all experts in Transformers 5, below [`Experts::module`]: what comes before the activation, and down.
    pub const fn parameters(&self) -> [&'static str; 2] {
        if self.gated { ["gate_up_proj", "down_proj"] } else { ["up_proj", "down_proj"] }
    }

    /// Tensor names of their biases, where they have some.
    pub fn bias_names(&self, expert: usize) -> Option<[String; 3]> {
        self.biased.then(|| self.modules(expert).map(|module| format!("{module}.bias")))
    }

    fn modules(&self, expert: usize) -> [String; 3] {
        let projections = match self.names {
            ExpertNames::Mixtral | ExpertNames::Lfm2 | ExpertNames::MiniMax => ["w1", "w3", "w2"],
            ExpertNames::Qwen
            | ExpertNames::GptOss
            | ExpertNames::DeepSeek
            | ExpertNames::Afmoe
            | ExpertNames::Gemma4
            | ExpertNames::Nemotron
            | ExpertNames::Granite => ["gate_proj", "up_proj", "down_proj"],
        };
        let experts = match self.names {
            ExpertNames::Gemma4 => "experts".to_owned(),
            _ => format!("{}.experts", self.feed()),
        };
        projections.map(|name| format!("{experts}.{expert}.{name}"))
    }

    /// The module of router and experts, within the block.
    pub const fn feed(&self) -> &'static str {
        match self.names {
            ExpertNames::Qwen | ExpertNames::GptOss | ExpertNames::DeepSeek | ExpertNames::Afmoe => "mlp",
            ExpertNames::Mixtral | ExpertNames::MiniMax | ExpertNames::Granite => "block_sparse_moe",
            ExpertNames::Lfm2 => "feed_forward",
            ExpertNames::Nemotron => "mixer",
            ExpertNames::Gemma4 => "",
        }
    }

    /// The module of the experts in Transformers 5, within the block.
    pub const fn module(&self) -> &'static str {
        match self.names {
            ExpertNames::Lfm2 => "feed_forward.experts",
            ExpertNames::Gemma4 => "experts",
            ExpertNames::Nemotron => "mixer.experts",
            ExpertNames::Granite => "block_sparse_moe.experts",
            _ => "mlp.experts",
        }
    }

    /// Whether their parameter of gate and up in Transformers 5 has the outputs of both in turn (gpt-oss).
    pub const fn is_interleaved(&self) -> bool {
        matches!(self.names, ExpertNames::GptOss)
    }

    /// Tensor name of the router, within the block.
    pub const fn router(&self) -> &'static str {
        match self.names {
            ExpertNames::Qwen | ExpertNames::DeepSeek => "mlp.gate.weight",
            ExpertNames::Mixtral | ExpertNames::MiniMax => "block_sparse_moe.gate.weight",
            ExpertNames::GptOss => "mlp.router.weight",
            ExpertNames::Lfm2 => "feed_forward.gate.weight",
            ExpertNames::Afmoe => "mlp.router.gate.weight",
            ExpertNames::Gemma4 => "router.proj.weight",
            ExpertNames::Nemotron => "mixer.gate.weight",
            ExpertNames::Granite => "block_sparse_moe.router.layer.weight",
        }
    }

    /// Module name of the router in Transformers 5, within the block.
    pub const fn router_module(&self) -> &'static str {
        match self.names {
            ExpertNames::Qwen | ExpertNames::Mixtral | ExpertNames::DeepSeek | ExpertNames::MiniMax => "mlp.gate",
            ExpertNames::GptOss => "mlp.router",
            ExpertNames::Lfm2 => "feed_forward.gate",
            ExpertNames::Afmoe => "mlp.router.gate",
            ExpertNames::Gemma4 => "router.proj",
            ExpertNames::Nemotron => "mixer.gate",
            ExpertNames::Granite => "block_sparse_moe.router",
        }
    }

    /// Tensor name of the buffer that is added to the scores for the choice, `[experts]`, within the block.
    pub fn choice_bias(&self) -> Option<&'static str> {
        self.router.choice_bias.then_some(match self.names {
            ExpertNames::Mixtral | ExpertNames::MiniMax | ExpertNames::Granite => {
                "block_sparse_moe.e_score_correction_bias"
            }
            ExpertNames::Lfm2 => "feed_forward.expert_bias",
            ExpertNames::Afmoe => "mlp.expert_bias",
            ExpertNames::Nemotron => "mixer.gate.e_score_correction_bias",
            ExpertNames::Qwen | ExpertNames::GptOss | ExpertNames::DeepSeek | ExpertNames::Gemma4 => {
                "mlp.gate.e_score_correction_bias"
            }
        })
    }

    /// Module of the MLP beside the experts, within the block.
    pub const fn shared_module(&self) -> &'static str {
        match self.names {
            ExpertNames::DeepSeek | ExpertNames::Afmoe => "mlp.shared_experts",
            ExpertNames::Nemotron => "mixer.shared_experts",
            ExpertNames::Granite => "shared_mlp",
            _ => "mlp.shared_expert",
        }
    }
}
